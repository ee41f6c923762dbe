"""The Jacobians of blocks at their rows, as the measures use them: singular triplets, moments and products.

The plan says whether Jacobians are kept on the device or in the host's memory, formed and dropped, or never formed. `keep=` of
`tracker.measure` returns them, and their singular vectors, themselves.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tracker.capture.recording import Recording, to_host
from tracker.common.errors import UsageError
from tracker.common.text import size
from tracker.jacobians.restriction import CallRows
from tracker.jacobians.rows import PROBES, CheckResults, Jacobians, Sketch
from tracker.linalg.svd import Triplets, triplets_by_products, triplets_of_each
from tracker.measures.coupling import Moments, declared_parts, moments
from tracker.measures.declaration import DIAGNOSTICS, LAYER, NORMED, OURS, WITH_NORM, Measure
from tracker.measures.plan import SQUARES, Plan
from tracker.measures.settings import Settings


@dataclass(frozen=True)
class Layer:
    """Singular triplets, moments and products of one block's Jacobians at R rows.

    Attributes:
        product: V (R, d, m) -> J V (R, d, m).
        moments: those of J that null levels need.
        checks: the checks of the Jacobian at each row; empty if they are not stored.
        formed: whether the Jacobian at each row was formed entry by entry; empty if that is not stored.
        dense: the Jacobians (R, d, d), kept or formed again; None: not asked for.
    """

    triplets: Triplets
    product: Callable[[Tensor], Tensor]
    moments: Moments
    checks: list[CheckResults]
    formed: Sequence[bool]
    dense: Callable[[], Tensor] | None = None

    def jacobian(self) -> Float[Tensor, "R d d"]:
        """Return the Jacobians, which the layer may not keep."""
        assert self.dense is not None
        return self.dense()


def layers_of(jacobians: Jacobians, blocks: Sequence[Sequence[CallRows]], plan: Plan) -> list[Layer]:
    """Return the layers of some blocks, with their Jacobians kept where the plan says."""
    if plan.kept == "device":
        return _dense_layers(jacobians, blocks, plan)
    if plan.kept == "host":
        return [_dense_layers(jacobians, [selections], plan, on_host=True)[0] for selections in blocks]
    layer_of = {"nowhere": _recomputed_layer, "not formed": matrix_free_layer}[plan.kept]
    return [layer_of(jacobians, selections, plan) for selections in blocks]


def _dense_layers(
    jacobians: Jacobians, blocks: Sequence[Sequence[CallRows]], plan: Plan, on_host: bool = False
) -> list[Layer]:
    """Return layers that keep their Jacobians, on the device or in the host's memory."""
    Js, checks = zip(*(_form_jacobians(jacobians, selections) for selections in blocks), strict=True)
    triplets = triplets_of_jacobians(Js, plan, jacobians.advance)
    of_blocks = [moments(J, of_block.S[:, 0]) for J, of_block in zip(Js, triplets, strict=True)]
    device = Js[0].device
    kept = [lambda J=J: J.to(device, non_blocking=True) for J in (map(to_host, Js) if on_host else Js)]
    return [
        Layer(of_block, lambda V, dense=dense: dense() @ V, of_J, checks_of_block, [True] * len(checks_of_block), dense)
        for of_block, dense, of_J, checks_of_block in zip(triplets, kept, of_blocks, checks, strict=True)
    ]


def triplets_of_jacobians(
    Js: Sequence[Float[Tensor, "R d d"]], plan: Plan, advance: Callable[[int], None]
) -> list[Triplets]:
    """Return the triplets of each block's Jacobians.

    What they leave of the plan's memory, half of the budget, and the quarter of the budget that their cotangents have freed, is
    for the decomposition.
    """
    free = plan.memory // 2 + max(0, plan.memory - sum(J.nbytes for J in Js))
    return triplets_of_each(Js, plan.K, "auto" if plan.svd == "matrix-free" else plan.svd, free, advance)


def _form_jacobians(
    jacobians: Jacobians, selections: Sequence[CallRows]
) -> tuple[Float[Tensor, "R d d"], list[CheckResults]]:
    Js, checks = zip(*jacobians(selections), strict=True)
    jacobians.advance(sum(map(len, Js)))
    return Js[0] if len(Js) == 1 else torch.cat(Js), _for_each_row(checks, selections)


def _recomputed_layer(jacobians: Jacobians, selections: Sequence[CallRows], plan: Plan) -> Layer:
    """Return a layer that drops its Jacobians and computes its products from the block again."""
    (layer,) = _dense_layers(jacobians, [selections], plan)

    def product(V: Tensor) -> Tensor:
        JV = jacobians.sketch(selections).operator.apply(V)
        jacobians.advance(len(V))
        return JV

    return replace(layer, product=product, dense=lambda: _form_jacobians(jacobians, selections)[0])


def matrix_free_layer(jacobians: Jacobians, selections: Sequence[CallRows], plan: Plan) -> Layer:
    """Return a layer whose triplets come from products or, at rows where the iteration fails, from the dense Jacobians."""
    sketch = jacobians.sketch(selections)
    operator, like = sketch.operator, sketch.signs[..., 0]
    triplets = triplets_by_products(operator.apply, operator.apply_transpose, like, plan.K)
    failed = ~triplets.complete.cpu()
    if failed.all():
        return _recomputed_layer(jacobians, selections, replace(plan, svd="full"))
    if failed.any():
        formed = _recomputed_layer(jacobians, _subset(selections, failed), replace(plan, svd="full"))
        others = matrix_free_layer(jacobians, _subset(selections, ~failed), plan)
        return _merged(formed, others, failed)
    jacobians.advance(2 * len(like))  # as for a Jacobian that is formed and decomposed

    def product(V: Tensor) -> Tensor:
        JV = jacobians.product(selections, sketch.compute_dtype, V)
        jacobians.advance(len(V))
        return JV

    checks = _for_each_row(sketch.checks, selections)
    dense = lambda: _form_jacobians(jacobians, selections)[0]  # noqa: E731
    return Layer(triplets, product, _estimated_moments(sketch, triplets), checks, [False] * len(like), dense)


def _subset(selections: Sequence[CallRows], chosen: Bool[Tensor, " R"]) -> list[CallRows]:
    """Return the chosen rows of all selections."""
    parts = chosen.split([len(rows) for _, rows in selections])
    return [(call, rows.subset(part)) for (call, rows), part in zip(selections, parts, strict=True) if part.any()]


def _merged(one: Layer, other: Layer, of_one: Bool[Tensor, " R"]) -> Layer:
    """Return a layer with the rows of two: those of `one` where `of_one`."""
    device = one.triplets.S.device
    order = torch.cat([of_one.nonzero()[:, 0], (~of_one).nonzero()[:, 0]]).argsort()
    at, places = order.to(device), order.tolist()
    mask = of_one.to(device)

    def joined(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([a, b])[at]

    def joined_fields(a: Any, b: Any) -> Iterator[Tensor]:
        return (joined(getattr(a, of.name), getattr(b, of.name)) for of in fields(a))

    checks, formed = [*one.checks, *other.checks], [*one.formed, *other.formed]
    return Layer(
        Triplets(*joined_fields(one.triplets, other.triplets)),
        lambda V: joined(one.product(V[mask]), other.product(V[~mask])),
        Moments(*joined_fields(one.moments, other.moments)),
        [checks[place] for place in places],
        [formed[place] for place in places],
        lambda: joined(one.jacobian(), other.jacobian()),
    )


def _estimated_moments(sketch: Sketch, triplets: Triplets) -> Moments:
    """Estimate the moments of Jacobians from products: exactly on the triplets, and from random products on the rest.

    With J = P + R, P = U S V^T, and random signs z: tr R from z . R z, |R|_F^2 from |R^T z|^2, as in Hutch++ (Meyer et al. 2021),
    and tr J^2 = tr P^2 + 2 tr P R + tr R^2 from (2 P + R)^T z . R z.
    """
    U, V = triplets.U, triplets.V
    d = U.shape[-2]
    scale = torch.where(triplets.S[:, :1] > 0, triplets.S[:, :1], 1.0)  # squares of tiny entries underflow
    S, JTz, z = triplets.S / scale, sketch.products / scale[..., None], sketch.signs
    few = z[..., :SQUARES]
    Jz = sketch.operator.apply(few) / scale[..., None]
    PTz = V @ (S[..., None] * (U.mT @ z))
    rest, rest_z = JTz - PTz, Jz - U @ (S[..., None] * (V.mT @ few))
    M = S[..., None] * (V.mT @ U)  # tr P^2 = tr M^2
    trace = (S * (U * V).sum(-2)).sum(-1) + (z * rest).sum((-2, -1)) / PROBES
    of_square = (M * M.mT).sum((-2, -1)) + ((2 * PTz + rest)[..., :SQUARES] * rest_z).sum((-2, -1)) / SQUARES
    isotropic = trace / d
    # |J0|^2 = |S0|^2 + |A0|^2 and tr J0^2 = |S0|^2 - |A0|^2 of J0 = J - tau I
    whole = ((S**2).sum(-1) + (rest**2).sum((-2, -1)) / PROBES - d * isotropic**2).clamp_min(0)
    difference = (of_square - d * isotropic**2).clamp(-whole, whole)
    parts = (((whole + sign * difference) / 2).sqrt() for sign in (1, -1))
    return Moments(*(value * scale[:, 0] for value in (isotropic, *parts)))


def _for_each_row(checks: Sequence[CheckResults], selections: Sequence[CallRows]) -> list[CheckResults]:
    return [check for check, (_, rows) in zip(checks, selections, strict=True) for _ in rows.sample]


KEPT = ("jacobian", "singular_vectors")


def with_kept(settings: Settings, keep: str | Sequence[str]) -> Settings:
    """Return the settings of a measurement that also keeps what is named.

    Raises:
        UsageError: for another name, or if no Jacobians of blocks are measured.
    """
    names = (keep,) if isinstance(keep, str) else tuple(keep) if isinstance(keep, Sequence) else (keep,)
    if set(names) - {*KEPT}:
        raise UsageError(f"keep={keep!r}; choose from {', '.join(KEPT)}")
    if names and not settings.includes("coupling"):
        raise UsageError(
            f"keep={keep!r}, but measures={settings.measures!r} needs no Jacobians of blocks; add 'coupling'"
        )
    return replace(settings, keep=names)


def check_kept(settings: Settings, recording: Recording, rows: int) -> None:
    """Check that the machine's memory holds what is kept at so many rows.

    Raises:
        UsageError: if it does not.
    """
    needed, available = kept_bytes(settings, recording, rows), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise UsageError(
            f"keep={settings.keep!r} takes {size(needed)} for {rows} tokens, and the machine has {size(available)}; keep the "
            "singular vectors alone, or measure fewer prompts or tokens at a time"
        )


def kept_bytes(settings: Settings, recording: Recording, rows: int) -> int:
    """Return the bytes of what is kept at so many rows; while samples are joined, there are two copies of it."""
    d, L = recording.calls[0].x.shape[-1], len(recording.calls)
    of_block = ("jacobian" in settings.keep) * d**2 + ("singular_vectors" in settings.keep) * 2 * d * max(
        settings.ks(d)
    )
    return 2 * rows * L * of_block * settings.torch_dtype.itemsize


def kept_arrays(layers: Sequence[Layer], keep: Sequence[str]) -> dict[str, np.ndarray]:
    """Return what is to be kept of every row and layer, in the host's memory: J over (row, layer, output, input), U and V."""
    arrays = {}
    if "jacobian" in keep:
        arrays["jacobian"] = np.stack([layer.jacobian().cpu().numpy() for layer in layers], 1)
    if "singular_vectors" in keep:
        for name, part in (("left_singular_vector", "U"), ("right_singular_vector", "V")):
            arrays[name] = np.stack([getattr(layer.triplets, part).cpu().numpy() for layer in layers], 1)
    return arrays


YES = "1: yes, 0: no"
CERTIFICATE = {  # of each Jacobian and its singular triplets: label, formula
    "residual": (
        "largest residual of a triplet, relative to s₁",
        "max over k of ‖J vₖ − sₖ uₖ‖ and ‖Jᵀ uₖ − sₖ vₖ‖, / s₁",
    ),
    "complete": (
        "whether no larger singular value was missed",
        f"{YES}; σ² I − R Rᵀ is positive definite, R = J − U S Vᵀ, σ = 1.0001 s_K",
    ),
    "formed": ("whether the Jacobian was formed, not known by its products alone", YES),
    "full_svd": ("whether the triplets come from a full decomposition", YES),
    "sliced": ("whether the Jacobian was evaluated at its row alone, not over the full sequence", YES),
    "value_error": (
        "error of the row's output against the recorded one",
        "‖f − f₀‖ / max(‖f₀‖, floor ‖x‖), f of the row alone, f₀ as recorded",
    ),
    "derivative_error": (
        "error of a vector-Jacobian product against that of the full sequence",
        "‖Jᵀu − g‖ / max(‖g‖, floor ‖u‖), g of the full sequence, u random",
    ),
    "independent_error": (
        "error of J v against forward mode, or differences of values",
        "root mean square over u of (uᵀ(Jv)ᵢ − (Jᵀu)ᵀv) / max(‖(Jv)ᵢ‖, ‖Jᵀu‖, floor ‖v‖), (Jv)ᵢ not by reverse mode, u, v random",
    ),
}


def _declared() -> tuple[Measure, ...]:
    """Return the singular values and certificates of the Jacobians, with and without the final norm in the last block."""
    measures = []
    for end, variant, text in (("", "", ""), (NORMED, "normed", f", last block {WITH_NORM}")):
        shared: dict[str, Any] = {"option": "coupling", "variant": variant}
        gap = "gap to the next singular value, relative to s_1"
        measures += [
            Measure(
                f"singular_value{end}",
                (*LAYER, "rank"),
                f"singular value{text}",
                formula="sₖ, J = U S Vᵀ",
                reference="paper, eq. 9",
                **shared,
            ),
            Measure(
                f"{DIAGNOSTICS}singular_gap{end}",
                (*LAYER, "rank"),
                f"{gap}{text}",
                formula="(sₖ − sₖ₊₁) / s₁",
                reference=OURS,
                **shared,
            ),
            *(
                Measure(f"{DIAGNOSTICS}{name}{end}", LAYER, f"{label}{text}", formula=formula, reference=OURS, **shared)
                for name, (label, formula) in CERTIFICATE.items()
            ),
            *declared_parts("", end, LAYER, text, shared),
        ]
    return tuple(measures)


DECLARED = _declared()
DECLARED_KEPT = (  # the variables of `keep=`
    Measure(
        "jacobian",
        (*LAYER, "output", "input"),
        "Jacobian of the block's residual function at the token",
        option="keep",
        formula="Jˡ = ∂fˡ(x) / ∂x at x = xˡ⁻¹, without the identity of the skip connection",
        reference="paper, eq. 8",
    ),
    *(
        Measure(
            f"{side}_singular_vector",
            (*LAYER, dim, "rank"),
            f"{side} singular vector",
            option="keep",
            formula=f"{symbol}ₖ, column k of {symbol.upper()}, J = U S Vᵀ",
            reference="paper, eq. 9",
        )
        for side, dim, symbol in (("left", "output", "u"), ("right", "input", "v"))
    ),
)
