"""One class: built, run, measured, compared with the oracle, looked over for changes, used and measured again."""

import copy
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

import tracker
from tests.support.brute_force import couplings
from tests.support.formulas import OF_PATHS
from tests.support.models import tokenizer
from tests.support.unchanged import differences, snapshot
from tests.sweep import oracle, use
from tests.sweep.catalogue import Built, NotBuilt, last_line
from tracker.common.errors import UsageError

KS = (3, 6)
TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3}


@dataclass
class Outcome:
    """What became of one class."""

    name: str
    group: str
    # Right, refused, wrong, raw exception, changed, differs after use, no oracle, not built, too slow
    outcome: str
    detail: str = ""
    error: float = float("nan")
    blocks: str = ""
    note: str = ""
    used: str = ""  # how it was used before the second measurement


class Wrong(Exception):
    """The measurement is not what the oracle says."""


def judge(name: str, group: str, build: Callable[[], Built]) -> Outcome:
    """Measure a class and say what came of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            built = build()
        except NotBuilt as error:
            return Outcome(name, group, "not built", str(error))
        result = Outcome(name, group, "right", note=built.note)
        _examine(built, result)
    return result


def _examine(built: Built, result: Outcome):
    pristine, worst, stage = copy.deepcopy(built), [], ""
    before = snapshot(built.model.train())
    fresh = None
    try:
        fresh = _measured_or_refused(built)
        if isinstance(fresh, str):
            raise UsageError(fresh)
        result.blocks, measured = _short(fresh), [([built.inputs], fresh)]
        if built.prompts:
            prompts = [" ".join(map(str, ids[0].tolist())) for ids in built.prompts]
            calls = [{"input_ids": ids} for ids in built.prompts]
            stage = "two prompts: "
            measured.append((calls, _measured(built, prompts, tokenizer=tokenizer)))
        stage = ""
        with oracle.quiet():
            for calls, ds in measured:
                for i, call in enumerate(calls):
                    part = ds if len(calls) == 1 else ds.isel(prompt=[i])
                    worst.append(compare(pristine, call, part, result))
            if not built.text:
                token(
                    pristine, _measured(built, built.inputs, tokens=None, measures=["trajectory"])
                )
    except UsageError as error:
        result.outcome, result.detail = "refused", stage + str(error).splitlines()[0]
    except Wrong as error:
        result.outcome, result.detail = "wrong", str(error)
    except oracle.Unsuitable as error:
        result.outcome, result.detail = "no oracle", str(error)
    except _Raised as error:
        result.outcome, result.detail = "raw exception", stage + last_line(error.__cause__ or error)
    result.error = max(worst, default=float("nan"))
    changes = differences(before, snapshot(built.model), parts=())
    if changes:
        was = f" (else: {result.outcome} {result.detail})"
        result.outcome, result.detail = "changed", "; ".join(changes[:3]) + was
    if fresh is not None and result.outcome in ("right", "refused", "no oracle"):
        _use(pristine, built, fresh, result)


def _use(pristine: Built, built: Built, fresh: xr.Dataset | str, result: Outcome):
    """Use the measured model and measure it again. Where its own output changes with use, another measurement is right."""
    try:
        own = use.output(pristine.model, built)
    # With the caches that a measurement does without, a tiny model may raise anything
    except Exception as error:
        result.note += f"; not used, since its own forward pass raises {type(error).__name__}"
        return
    repeats = use.identical(own, use.output(pristine.model, built))
    if repeats and not use.identical(own, use.output(built.model, built)):
        result.outcome, result.detail = "changed", "gives another output after it was measured"
        return
    result.used = ", ".join(use.use(built))
    after_use = use.output(built.model, built)
    if repeats and not use.identical(own, after_use):
        result.note += "; computes something else after use"
        return
    before = snapshot(built.model.train())
    try:
        again = _measured_or_refused(built)
        found = use.difference(fresh, again)
    except _Raised as error:
        result.outcome, result.detail = (
            "raw exception",
            "after use: " + last_line(error.__cause__ or error),
        )
        return
    changes = differences(before, snapshot(built.model), parts=())
    if repeats and not use.identical(own, use.output(built.model, built)):
        changes.append("gives another output")
    if found and use.by_rounding(fresh, again):
        result.note += "; the same to rounding after use"
    elif found:
        result.outcome, result.detail = "differs after use", found
    if changes:
        result.outcome, result.detail = "changed", "after use: " + "; ".join(changes[:3])


class _Raised(Exception):
    """`measure` raised something other than a UsageError; the cause is what."""


def _measured(built: Built, inputs: Any, **settings: Any) -> xr.Dataset:
    """What `measure` says of the model, which is in training mode."""
    requested = {"k": list(KS), "tokens": [1, -1], "dtype": built.dtype}
    try:
        return tracker.measure(built.model, copy.deepcopy(inputs), **(requested | settings))
    except UsageError:
        raise
    except Exception as error:
        raise _Raised from error


def _measured_or_refused(built: Built) -> xr.Dataset | str:
    """The measurement, or the message of the refusal."""
    try:
        return _measured(built, built.inputs)
    except UsageError as error:
        return str(error)


def compare(built: Built, inputs: dict[str, Any], ds: xr.Dataset, result: Outcome) -> float:
    """The worst error of a measurement of one forward call.

    Raises:
        Wrong: if it is above the tolerance, or other blocks were measured than those of the model's own tower.
    """
    names = ds.attrs["blocks"].split(", ")
    graph = oracle.run(built.fresh(), inputs, names)
    calls = [call.name for call in graph.blocks]
    if calls != names:
        raise Wrong(f"measured {names}, but the model calls {calls}")
    for before, after in itertools.pairwise(graph.blocks):
        if not torch.equal(before.y, after.x):
            raise Wrong(f"{after.name} does not take what {before.name} gives")
    B = ds.sizes["prompt"]
    graph.batch_first = graph.blocks[0].x.shape[0] == B
    tower(built, inputs, graph, result)
    norm = _final_norm(built, graph, ds)
    errors = {}
    for b in range(B):
        at = b
        # -1: this sample drew none
        seed = int(ds.random_seed[b]) if ds.attrs["random_draws"] else -1
        if seed >= 0:  # as `measure` runs a sample: alone, and with these random numbers
            alone = {name: value[b : b + 1] for name, value in inputs.items()}
            graph = oracle.run(built.fresh(), alone, names, seed=seed)
            norm, at = _final_norm(built, graph, ds), 0
        errors |= _of_states(
            ds.isel(prompt=b), graph.states(norm)[:, at], graph.states(None)[:, at], b
        )
        for i, t in enumerate(ds.token_position.values[b].astype(int).tolist()):
            J = [graph.jacobians(l, at, t, None) for l in range(len(names))]
            by_end = {"": J} | (
                {}
                if norm is None
                else {"_normed": [*J[:-1], graph.jacobians(len(J) - 1, at, t, norm)]}
            )
            for end, of_blocks in by_end.items():
                errors |= _of_jacobians(
                    ds.isel(prompt=b, token=i), of_blocks, end, f"sample {b} token {t}"
                )
    worst = max(errors, key=lambda key: errors[key] if errors[key] == errors[key] else np.inf)
    if not errors[worst] <= TOLERANCE[built.dtype]:
        raise Wrong(f"{worst}: error {errors[worst]:.1e}")
    return errors[worst]


def token(built: Built, ds: xr.Dataset):
    """Check the token that is measured by default against those that a pooled output reads.

    Raises:
        Wrong: if the output reads one token, and another is measured; or it reads not at all the one measured.
    """
    names = ds.attrs["blocks"].split(", ")
    graph = oracle.run(built.fresh(), built.inputs, names)
    out = pooled(graph.output)
    grad = None if out is None else graph.dependence(out, graph.blocks[-1].y)
    if grad is None:
        return
    at = ds.token_position.values[0].astype(int).tolist()
    first = graph.blocks[0].x
    if (
        ds.attrs["tokens"] == "cls"
        and len(first) > 1
        and not torch.equal(first[0, at], first[1, at])
    ):
        raise Wrong(
            f"tokens='cls' by default is position {at}, which holds another vector for another image"
        )
    read = [t for t in range(grad.shape[1]) if grad[0, t].any()]
    if len(read) == 1 and len(first) > 1 and not torch.equal(first[0, read], first[1, read]):
        # A patch that is read like a class token (Janus): without a class token the default is the last one
        return
    if (len(read) == 1 and at != read) or not set(at) <= set(read):
        shown = read if len(read) < 4 else f"{read[0]} .. {read[-1]}"
        raise Wrong(
            f"tokens={ds.attrs['tokens']!r} by default is position {at}, but the output reads position {shown}"
        )


def tower(built: Built, inputs: dict[str, Any], graph: oracle.Graph, result: Outcome):
    """Check that the blocks are those whose chain ends in the output, all of them, and the whole state.

    Raises:
        Wrong: if they are not.
    """
    last = graph.blocks[-1].y
    out = output_of(graph.output)
    if not any(
        graph.dependence(value, last) is not None for value in (out, *oracle.floats(graph.output))
    ):
        raise Wrong(
            f"the output does not depend on the last block measured, {graph.blocks[-1].name}"
        )
    names = {call.name for call in graph.blocks}
    classes = {type(built.model.get_submodule(name)) for name in names}
    for container, calls in graph.lists.items():
        inside = any(container.startswith(f"{name}.") or container == name for name in names)
        holds = any(name.startswith(f"{call.name}.") for name in names for call in calls)
        if inside or holds or graph.dependence(out, calls[-1].y) is None:
            continue
        alike = [c for c in calls if type(built.model.get_submodule(c.name)) in classes]
        later = graph.dependence(calls[-1].y, last) is not None
        earlier = graph.dependence(last, calls[-1].y) is not None
        attending = [c for c in calls if _attends(built.model.get_submodule(c.name))]
        if alike and (later or earlier) and not built.text:
            raise Wrong(
                f"{len(names)} blocks measured, but {container} holds {len(alike)} more of their class"
            )
        if attending and later and (built.text or len(attending) > len(names)):
            raise Wrong(
                f"{len(attending)} blocks in {container} lie between the last block measured and the output"
            )
        if attending and not later and not earlier:
            raise Wrong(
                f"{container}, {len(attending)} blocks, reaches the output beside those measured: neither lies behind"
            )
        if len(attending) > len(names) and earlier and not built.text:
            raise Wrong(
                f"{len(names)} blocks measured, but {container} before them holds {len(attending)}"
            )
    if built.depth is not None and len(graph.blocks) != built.depth:
        raise Wrong(
            f"{len(graph.blocks)} calls of blocks measured, but the tower has {built.depth} layers"
        )
    whole_state(built, inputs, graph, result)


def whole_state(built: Built, inputs: dict[str, Any], graph: oracle.Graph, result: Outcome):
    """Note what reaches the output past a hidden state; a second stream beside it makes the measurement wrong."""
    names = [call.name for call in graph.blocks]
    past = []
    for l in range(len(names)):
        cut = oracle.run(built.fresh(), inputs, names, cut=l)
        if cut.dependence(output_of(cut.output), cut.blocks[0].x) is not None:
            past.append(l + 1)
    note = f"output depends on x^0 past block {', '.join(map(str, past))}"
    if past and note not in result.note:
        result.note += f"; {note}"
    if len(names) in past and graph.blocks[-1].other:
        raise Wrong(
            "a second tensor of the state's shape leaves each block and reaches the output past the first"
        )


def pooled(output: Any) -> Tensor | None:
    """The output that has no token axis."""
    for name in ("logits", "pooler_output", "image_embeds"):
        value = output.get(name) if isinstance(output, dict) else getattr(output, name, None)
        if isinstance(value, Tensor) and value.dim() == 2:
            return value
    return output if isinstance(output, Tensor) and output.dim() == 2 else None


def output_of(output: Any) -> Tensor:
    """What the model is run for: its logits, else its pooled state, else its first floating tensor."""
    for name in ("logits", "pooler_output", "last_hidden_state", "prediction_logits"):
        value = output.get(name) if isinstance(output, dict) else getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    tensors = list(oracle.floats(output))
    if not tensors:
        raise oracle.Unsuitable("the model gives no floating tensor")
    return tensors[0]


def _attends(module: nn.Module) -> bool:
    return any("att" in type(part).__name__.lower() for part in module.modules())


def _final_norm(built: Built, graph: oracle.Graph, ds: xr.Dataset) -> Tensor | None:
    """The output of the norm that takes the last block's output.

    Raises:
        Wrong: if the measurement names another than the graph shows, or none for a language model that has one.
    """
    if ds.attrs["final_norm"] != "include":
        blocks = graph.blocks[-1].name
        beside = [name for name, _ in graph.norms if blocks.startswith(name.rpartition(".")[0])]
        if built.text and beside:
            raise Wrong(f"the final norm {beside[0]} of a language model was left out")
        return None
    found = [y for name, y in graph.norms if name == ds.attrs["final_norm_module"]]
    if not found:
        raise Wrong(
            f"the final norm named, {ds.attrs['final_norm_module']}, does not take the last block's output"
        )
    return found[0]


OF_STATES = ("lss", "expodistance", "equidistance", "alpha_mean", "norm")


def _of_states(ds: xr.Dataset, X: Tensor, raw: Tensor, b: int) -> dict[str, float]:
    ends = {"": raw} | ({"_normed": X} if ds.attrs["final_norm"] == "include" else {})
    errors = {}
    for end, states in ends.items():
        paths = states.transpose(0, 1).double().numpy()
        for name in OF_STATES:
            expected = np.stack([OF_PATHS[name](path) for path in paths], -1)
            found = ds[f"{name}{end}"].values[..., : len(paths)]
            errors[f"{name}{end} sample {b}"] = _difference(found, expected)
    return errors


def _of_jacobians(ds: xr.Dataset, J: list[Tensor], end: str, where: str) -> dict[str, float]:
    S = torch.stack([torch.linalg.svdvals(matrix) for matrix in J])
    ranks = ds.sizes["rank"]
    seen = torch.as_tensor(ds[f"singular_value{end}"].values[:, :ranks])
    errors = {
        f"singular values{end}, {where}": float(
            ((seen - S[:, :ranks]).abs().amax(1) / S[:, 0].clamp(1e-12)).max()
        )
    }
    for K in KS:
        # Singular vectors turn by the error over the gap (Wedin).
        gaps = -S[:, : K + 1].diff()
        turn = float((S[:, :1] / gaps.clamp(1e-300)).max()) / 10
        # Some blocks change the dtype
        for name, expected in couplings(torch.stack([matrix.double() for matrix in J]), K).items():
            scale = max(1.0, float(expected.max())) if name == "offdiag" else 1.0
            error = _difference(ds[f"{name}{end}"].sel(k=K).values, expected.numpy(), scale)
            errors[f"{name}{end} k={K}, {where}"] = error / max(1.0, turn)
    return errors


def _difference(seen: np.ndarray, expected: np.ndarray, scale: float | None = None) -> float:
    both = np.isnan(seen) & ~np.isfinite(expected)
    scale = scale or max(1.0, float(np.abs(expected[np.isfinite(expected)]).max(initial=0)))
    return float(np.where(both, 0, np.abs(seen - expected)).max()) / scale


def _short(ds: xr.Dataset) -> str:
    names = ds.attrs["blocks"].split(", ")
    return f"{len(names)}: {names[0]} .. {names[-1]}, norm {ds.attrs['final_norm']}, tokens {ds.attrs['tokens']}"
