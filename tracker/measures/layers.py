"""The Jacobians of blocks at their rows, as the measures use them: with singular triplets, moments and products.

The plan says whether Jacobians are kept on the device, in the host's memory or in a file. `keep=` of `tracker.measure` returns
them, and their singular vectors, themselves.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tracker.common.errors import UsageError
from tracker.common.text import size
from tracker.jacobians.kept import Jacobian, JacobianFile, on_device, on_host
from tracker.jacobians.restriction import CallRows
from tracker.jacobians.rows import CheckResults, Jacobians
from tracker.linalg.svd import Triplets, triplets_of_each
from tracker.measures.coupling import Moments, declared_parts, moments
from tracker.measures.declaration import DIAGNOSTICS, LAYER, NORMED, WITH_NORM, Measure
from tracker.measures.plan import Plan
from tracker.measures.settings import Settings


@dataclass(frozen=True)
class Layer:
    """One block's Jacobians at R rows, kept where the plan says, with their singular triplets and moments.

    Attributes:
        jacobian: () -> J (R, d, d), on the device.
        moments: those of J that null levels need.
        checks: the checks of the Jacobian at each row; empty if they are not stored.
    """

    triplets: Triplets
    jacobian: Jacobian
    moments: Moments
    checks: Sequence[CheckResults] = ()


def layers_of(
    jacobians: Jacobians, blocks: Sequence[Sequence[CallRows]], plan: Plan
) -> list[Layer]:
    """Return the layers of some blocks, with their Jacobians kept where the plan says."""
    if plan.kept == "device":
        return _layers(jacobians, blocks, plan, on_device)
    keep = on_host if plan.kept == "host" else JacobianFile().keep
    rows = sum(len(rows) for _, rows in blocks[0])
    together = plan.blocks_together(rows)
    parts = (blocks[start : start + together] for start in range(0, len(blocks), together))
    # What these blocks leave of the memory is for forming Jacobians.
    with jacobians.with_more_memory(max(0, plan.memory - together * rows * plan.bytes_of_jacobian)):
        return [layer for part in parts for layer in _layers(jacobians, part, plan, keep)]


def _layers(
    jacobians: Jacobians,
    blocks: Sequence[Sequence[CallRows]],
    plan: Plan,
    keep: Callable[[Tensor], Jacobian],
) -> list[Layer]:
    """Return layers whose Jacobians are formed and decomposed, then kept by a function."""
    Js, checks = [], []
    for selections in blocks:
        J, checks_of_rows = _form_jacobians(jacobians, selections)
        Js.append(J)
        checks.append(checks_of_rows)
    # All blocks in one call: it decomposes small matrices one on each core, or all as one batch on an accelerator.
    triplets = triplets_of_jacobians(Js, plan, jacobians.advance)
    layers = []
    for J, of_J, checks_of_J in zip(Js, triplets, checks, strict=True):
        # The moments need J while it is on the device: `keep` may move it to a file.
        moments_of_J = moments(J, of_J.S[:, 0])
        layers.append(Layer(of_J, keep(J), moments_of_J, checks_of_J))
    return layers


def triplets_of_jacobians(
    Js: Sequence[Float[Tensor, "R d d"]], plan: Plan, advance: Callable[[int], None]
) -> list[Triplets]:
    """Return the triplets of each block's Jacobians.

    What they leave of the plan's memory, half of the budget, and the quarter of the budget that their cotangents have freed, is
    for the decomposition.
    """
    free = plan.memory // 2 + max(0, plan.memory - sum(J.nbytes for J in Js))
    return triplets_of_each(Js, plan.K, plan.svd, free, advance)


def _form_jacobians(
    jacobians: Jacobians, selections: Sequence[CallRows]
) -> tuple[Float[Tensor, "R d d"], list[CheckResults]]:
    Js, checks = zip(*jacobians(selections), strict=True)
    jacobians.advance(sum(map(len, Js)))
    # Selections share a check of values and derivatives; the comparison with differences is of each row.
    of_rows = [
        replace(check, independent_errors=(error,))
        for check in checks
        for error in check.independent_errors
    ]
    return Js[0] if len(Js) == 1 else torch.cat(Js), of_rows


KEPT = ("jacobian", "singular_vectors")


def with_kept(settings: Settings, keep: str | Sequence[str]) -> Settings:
    """Return the settings of a measurement that also keeps what is named.

    Raises:
        UsageError: for another name, or if no Jacobians of blocks are measured.
    """
    several = isinstance(keep, Sequence) and not isinstance(keep, str)
    names = tuple(keep) if several else (keep,)
    if set(names) - {*KEPT}:
        raise UsageError(f"keep={keep!r}; choose from {', '.join(KEPT)}")
    if names and not settings.includes("coupling"):
        raise UsageError(
            f"keep={keep!r}, but measures={settings.measures!r} needs no Jacobians of blocks; add 'coupling'"
        )
    return replace(settings, keep=names)


def check_kept(settings: Settings, d: int, L: int, rows: int) -> None:
    """Check that the machine's memory holds what is kept of L blocks of width d at so many rows.

    Raises:
        UsageError: if it does not.
    """
    needed = kept_bytes(settings, d, L, rows)
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise UsageError(
            f"keep={settings.keep!r} takes {size(needed)} for {rows} tokens, and the machine has {size(available)}; keep the "
            "singular vectors alone, or measure fewer prompts or tokens at a time"
        )


def kept_bytes(settings: Settings, d: int, L: int, rows: int) -> int:
    """Return the bytes of what `check_kept` checks; while samples are joined, there are two copies of it."""
    of_block = 0
    if "jacobian" in settings.keep:
        of_block += d**2
    if "singular_vectors" in settings.keep:
        of_block += 2 * d * max(settings.ks(d))
    return 2 * rows * L * of_block * settings.torch_dtype.itemsize


def kept_arrays(layers: Sequence[Layer], keep: Sequence[str]) -> dict[str, np.ndarray]:
    """Return what is to be kept of every row and layer, in the host's memory: J over (row, layer, output, input), U and V."""

    def stack(values: Iterable[Tensor]) -> np.ndarray:
        return np.stack([value.cpu().numpy() for value in values], 1)

    arrays = {}
    if "jacobian" in keep:
        arrays["jacobian"] = stack(layer.jacobian() for layer in layers)
    if "singular_vectors" in keep:
        for side, part in (("left", "U"), ("right", "V")):
            arrays[f"{side}_singular_vector"] = stack(
                torch.where(one.determined[:, None], getattr(one, part), torch.nan)
                for one in (layer.triplets for layer in layers)
            )
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
    "full_svd": ("whether the triplets come from a full decomposition", YES),
    "sliced": (
        "whether the Jacobian was evaluated at its row alone, not over the full sequence",
        YES,
    ),
    "value_error": (
        "error of the row's output against the recorded one",
        "‖f − f₀‖ / max(‖f₀‖, floor ‖x‖), f of the row alone, f₀ as recorded",
    ),
    "derivative_error": (
        "error of a vector-Jacobian product of a row alone against that of the full sequence; NaN where the model is asked",
        "‖Jᵀu − g‖ / max(‖g‖, floor ‖u‖), g of the full sequence, u random",
    ),
    "independent_error": (
        "error of J v against differences of values",
        "‖Dv − Jv‖ / max(‖Jv‖, ‖Dv‖, floor ‖v‖), Dv = (f(x + hv) − f(x − hv)) / 2h of the row, v random",
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
                **shared,
            ),
            *(
                Measure(
                    f"{DIAGNOSTICS}{name}{end}",
                    LAYER,
                    f"{label}{text}",
                    formula=formula,
                    **shared,
                )
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
