"""A differentiable estimate of how far blocks are from sharing singular vectors, to add to a training loss.

Two real matrices J_a and J_b have one pair of orthogonal bases that makes both diagonal, J_a = U S V^T and J_b = U D V^T with D
real, if and only if C = J_a^T J_b and R = J_a J_b^T are symmetric (Eckart and Young 1939). The penalty of a pair of blocks is the
share of C and R that is not:

    p = (|C - C^T|_F^2 + |R - R^T|_F^2) / (2 |C|_F^2 + 2 |R|_F^2)        in [0, 2]

0: coupled in all directions. 1 - 1/d: the expectation of numerator over that of denominator for unrelated bases (independent,
Haar-distributed). Directions count by the singular values of both blocks; there is no K, and nothing is decomposed. An entry of D
may be negative: blocks that move a direction oppositely count as coupled, which mis-coupling does not.

For a random vector v with independent entries of mean 0 and variance 1, E |M v|^2 = |M|_F^2. With x = C v and y = C^T v,
numerator and denominator are estimated by |x - y|^2 and |x|^2 + |y|^2, the same for R, so that an estimate is in [0, 2] as well.
It is a ratio of two unbiased estimates: its bias falls as 1 / probes (docs/training.md has figures). Cost per pair and probe:
eight products with J or J^T on the full sequence of each sample, which are differentiated again in the backward pass.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import BoundArguments
from itertools import combinations
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from tracker.blocks.find import Blocks, Named, find_blocks, innermost, unwrap
from tracker.capture.global_state import checkpointing_disabled
from tracker.capture.hidden_state import bind_arguments, describe_output, hidden_state
from tracker.capture.inputs import batches, positions
from tracker.capture.replica import StopForward, adjust_configs
from tracker.common.errors import UsageError

Products = Callable[[Tensor], Tensor]  # (B, d) -> (B, d)
Pairs = int | Sequence[tuple[int, int]]


def coupling_penalty(
    model: nn.Module,
    inputs: Any,
    *,
    tokens: str | Sequence[int] = "last",
    pairs: Pairs = 1,
    probes: int | Float[Tensor, "P d"] = 1,
    blocks: Named | Blocks | None = None,
    generator: torch.Generator | None = None,
) -> Float[Tensor, ""]:
    """Return an estimate of the blocks' distance from coupling, in [0, 2], differentiable with respect to the weights.

    Runs the model once up to the last chosen block, in eval mode (no dropout) and outside autocast; modes are restored, and no
    `.grad` is written. The final norm is not part of the last block. The gradient includes the effect of the weights on the
    hidden states at which the Jacobians are taken.

        loss = cross_entropy(model(batch), labels) + 0.1 * tracker.coupling_penalty(model, batch)

    Args:
        model: a transformer whose blocks are modules, with all its weights on this process.
        inputs: a tensor (batch first) or a mapping that the model's forward takes, as in `tracker.measure`; no prompts.
            Padding is known from an `attention_mask` alone.
        tokens: the token of each sample at which Jacobians are taken: "last", "cls", or a list of one index.
        pairs: how many different pairs of distinct blocks to draw, or a list of pairs of layers, counted from 1.
        probes: number of random vectors for each sample, or the vectors themselves. The columns of an orthogonal matrix, such as
            torch.eye(d), give the exact penalty.
        blocks: as in `tracker.find_blocks`.
        generator: of the CPU, draws pairs and probes; torch's global generator by default.

    Raises:
        UsageError: for inputs, tokens, pairs or blocks that can't be used.
    """
    model = innermost(model)
    parts = blocks if isinstance(blocks, Blocks) else find_blocks(model, blocks)
    if parts.spans:
        raise UsageError("coupling_penalty needs blocks that are modules; these are given by their boundaries")
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise UsageError(
            "the weights are sharded over processes (FSDP); coupling_penalty needs all of them on each process"
        )
    chosen = _choose_pairs(pairs, len(parts.names), generator)
    layers = sorted({layer for pair in chosen for layer in pair})
    (batch, *others) = batches(model, inputs, None, None)
    assert not others  # only prompts, which need a tokenizer, have several
    with _differentiable(model):
        calls = _record(model, parts, layers, batch.arguments, batch.keywords)
        x = calls[layers[0]].x
        B, n, _ = x.shape
        rows = torch.tensor([_position(tokens, n, parts, batch.valid, sample) for sample in range(B)], device=x.device)
        v = _draw(probes, x, generator)
        jacobians = {layer: _linearize(calls[layer], rows) for layer in layers}
        return torch.stack([pair_penalty(jacobians[a], jacobians[b], v) for a, b in chosen]).mean()


@dataclass(frozen=True)
class Jacobian:
    """Products with the Jacobians of one block's residual function at one token of each sample."""

    apply: Products
    apply_transpose: Products


def pair_penalty(a: Jacobian, b: Jacobian, v: Float[Tensor, "P B d"]) -> Float[Tensor, ""]:
    """Return the mean over samples of the estimate from these probes, which is exact for all columns of an orthogonal matrix."""
    different, total = v.new_zeros(v.shape[1]), v.new_zeros(v.shape[1])
    for probe in v:
        for x, y in (
            (a.apply_transpose(b.apply(probe)), b.apply_transpose(a.apply(probe))),
            (a.apply(b.apply_transpose(probe)), b.apply(a.apply_transpose(probe))),
        ):
            different = different + (x - y).square().sum(-1)
            total = total + x.square().sum(-1) + y.square().sum(-1)
    # A block that adds nothing, such as one whose last layer begins at zero, has no directions: its penalty is 0.
    return (different / (total + torch.finfo(v.dtype).tiny)).mean()


def _choose_pairs(pairs: Pairs, L: int, generator: torch.Generator | None) -> list[tuple[int, int]]:
    if L < 2:
        raise UsageError("the model has one block; coupling needs two")
    unordered = list(combinations(range(1, L + 1), 2))
    if isinstance(pairs, int):
        if not 1 <= pairs <= len(unordered):
            raise UsageError(f"pairs={pairs}; {L} blocks have 1 to {len(unordered)} pairs")
        return [unordered[i] for i in torch.randperm(len(unordered), generator=generator)[:pairs].tolist()]
    chosen = [(a, b) for a, b in pairs]
    if not chosen or any(a == b or not {a, b} <= set(range(1, L + 1)) for a, b in chosen):
        raise UsageError(f"pairs={chosen}; give a number, or pairs of two different layers from 1 to {L}")
    return chosen


def _draw(probes: int | Tensor, x: Float[Tensor, "B n d"], generator: torch.Generator | None) -> Float[Tensor, "P B d"]:
    B, _, d = x.shape
    if isinstance(probes, Tensor):
        if probes.dim() != 2 or probes.shape[1] != d or not len(probes):
            raise UsageError(f"probes of shape {tuple(probes.shape)}; give a number, or vectors of shape (number, {d})")
        return probes.to(x)[:, None].expand(-1, B, -1)
    if probes < 1:
        raise UsageError(f"probes={probes}; give at least 1")
    return torch.randn(probes, B, d, generator=generator).to(x)  # on the CPU, so that every device has the same


def _position(tokens: str | Sequence[int], n: int, parts: Blocks, valid: Tensor | None, sample: int) -> int:
    valid_positions = list(range(n)) if valid is None else valid[sample].nonzero().flatten().tolist()
    chosen = positions(tokens, valid_positions, parts.class_token)
    if len(chosen) != 1:
        raise UsageError(f"tokens={tokens!r} selects {len(chosen)} tokens of a sample; coupling_penalty takes one")
    return chosen[0]


class _PlainLayerNorm(TorchFunctionMode):
    """Compute layer norms from elementary operations: the third derivative of torch's own is wrong, as it takes mean and
    variance for constants (https://github.com/pytorch/pytorch/issues/175754); the gradient of J v needs it.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace layer norms, and run any other function as it is."""
        run = _layer_norm if function in (torch.layer_norm, torch.nn.functional.layer_norm) else function
        return run(*args, **(kwargs or {}))


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    axes = tuple(range(-len(normalized_shape), 0))
    centred = input - input.mean(axes, keepdim=True)
    y = centred * (centred.square().mean(axes, keepdim=True) + eps).rsqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


@contextmanager
def _differentiable(model: nn.Module) -> Iterator[None]:
    """Run in eval mode and by operations that can be differentiated several times; restore modes and configs on exit."""
    parameter = next(model.parameters())
    with ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        for module in model.modules():
            if module.training:
                stack.callback(setattr, module, "training", True)
            for name in {"config", "cfg"} & vars(module).keys():
                stack.callback(vars(module).__setitem__, name, vars(module)[name])
        model.eval()
        adjust_configs(model, parameter.dtype, parameter.device)
        stack.enter_context(checkpointing_disabled())
        stack.enter_context(_PlainLayerNorm())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(torch.autocast(parameter.device.type, enabled=False))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.enable_grad())
        yield


@dataclass(frozen=True)
class _Call:
    """A block's call in the forward pass: its hidden state (B, n, d), and the block as a function of it."""

    x: Float[Tensor, "B n d"]
    block: Callable[[Tensor], Tensor]


def _record(model: nn.Module, parts: Blocks, layers: Sequence[int], arguments: Any, keywords: Any) -> dict[int, _Call]:
    """Run the model up to the last of these layers, and return the call of each."""
    calls: dict[int, _Call] = {}

    def enter(layer: int, block: nn.Module, args: tuple, kwargs: dict) -> None:
        bound = bind_arguments(block, args, kwargs)
        state = next(iter(bound.arguments), "")
        received = bound.arguments.get(state)
        if not isinstance(received, Tensor) or received.dim() != 3:
            raise UsageError(
                f"block {parts.names[layer - 1]} does not take a hidden state (batch, tokens, width) as its first argument"
            )

        def swapped(x: Tensor) -> Tensor:
            return x if parts.batch_first else x.transpose(0, 1)

        def run(x: Tensor) -> Tensor:
            again = BoundArguments(bound.signature, OrderedDict(bound.arguments) | {state: swapped(x)})
            output = block(*again.args, **again.kwargs)
            y = hidden_state(output)
            if not isinstance(y, Tensor) or y.shape != received.shape:
                raise UsageError(
                    f"block {parts.names[layer - 1]} takes {tuple(received.shape)} and returns {describe_output(output)}; "
                    "coupling_penalty needs blocks that return one hidden state of the same shape"
                )
            return swapped(y)

        calls[layer] = _Call(swapped(received), run)
        if layer == layers[-1]:
            raise StopForward(None)

    with ExitStack() as hooks:
        for layer in layers:
            hook = partial(enter, layer)
            block = unwrap(model).get_submodule(parts.names[layer - 1])
            hooks.callback(block.register_forward_pre_hook(hook, with_kwargs=True).remove)
        try:
            model(*arguments, **keywords)
        except StopForward:
            pass
    missing = [parts.names[layer - 1] for layer in layers if layer not in calls]
    if missing:
        raise UsageError(f"the forward pass did not reach {', '.join(missing)}")
    return calls


def _linearize(call: _Call, rows: Tensor) -> Jacobian:
    """Return products with J = J_block - 1 at one row of each sample, differentiable with respect to weights and states."""
    x = call.x
    here = torch.arange(len(x), device=x.device), rows
    at = x[here]
    at = at if at.requires_grad else at.requires_grad_()  # no weight before this block is trained
    # The other rows are constants of this Jacobian, but not of its dependence on the weights.
    y = call.block(x.index_put(here, at))[here]
    u = torch.zeros_like(y, requires_grad=True)
    (back,) = torch.autograd.grad(y, at, u, create_graph=True)

    def apply(v: Tensor) -> Tensor:
        # J^T u is linear in u: its derivative with respect to u, by reverse mode again, gives J v.
        return torch.autograd.grad(back, u, v, create_graph=True)[0] - v

    def apply_transpose(w: Tensor) -> Tensor:
        return torch.autograd.grad(y, at, w, create_graph=True)[0] - w

    return Jacobian(apply, apply_transpose)
