"""Copy a model for one measurement: its module tree, with the model's weights in the measuring dtype while they are needed.

So bf16 and fp16 weights are measured in float32, the caller's modules never run, and nothing has to be restored
when measuring raises. Memory: in the measuring dtype, the weights outside the blocks and those of one block at a time. Weights
that have the measuring dtype and device already are shared, not copied.

The copy has no compiled wrappers and is in eval mode. Lists, arrays and other objects that the modules hold are copied, and
configs that forward passes need otherwise; functions are rebuilt over the copies (`functions`); tensors share the caller's memory
until a forward pass writes to them (`guard`). What a library attaches to a model at its first use is copied as any other
attribute, except hooks. The attribute by which transformers knows that it has attached them is dropped with them, so that it
attaches them to the copy when it needs them.

Of hooks, the copy has those that compute part of the model's function (`hooks`), also rebuilt. A block's own
hooks are part of the block: its state is what it receives before its pre-hooks and what it returns after its forward hooks.

A block that reads what an earlier call left in its attributes is not a function of its hidden state. To detect this, the
attributes besides weights and buffers (counters, cached keys, tables of sines) are saved before a call and restored before
another (`ModuleState`). A replica's buffers are those of the caller's model at every use, so what a module writes to them is
lost. So are, then, its attributes since: a rotary embedding whose tables are buffers keeps their length as an attribute.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy, deepcopy
from functools import partial
from threading import get_ident
from types import FunctionType
from typing import Any
from weakref import ProxyTypes, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from tracker.common.errors import UsageError
from tracker.linalg.transfer import read
from tracker.model.attention import hook_attn_method
from tracker.model.description import Blocks
from tracker.model.functions import holds_objects, reachable, rebuild
from tracker.model.guard import (
    FUNCTIONS,
    MODULES,
    SharedTensors,
    WriteGuard,
    attributes,
    clone_if_tensor,
    copy_nested,
    equal_nested,
)
from tracker.model.hooks import Hooks
from tracker.model.kernels import is_experts_kernel, is_kernel, supports_sdpa
from tracker.model.proposals import BlocksNotFound, chained
from tracker.model.random_numbers import Generator, Generators, noise_like, seed_of
from tracker.model.weights import (
    Gather,
    check_whole,
    gather_alone,
    is_plain,
    noting_forward,
    plain_class,
    plain_tensor,
)
from tracker.model.wrappers import names_by_id, path_inside


def adjust_configs(replica: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Replace the configs in a replica's modules by changed copies.

    Args:
        replica: of a Hugging Face or TransformerLens model, or any other, which stays as it is.
        dtype: the measuring dtype.
        device: where the replica runs.
    """
    copies: dict[int, Any] = {}
    kernel = "sdpa" if supports_sdpa(replica) else "eager"

    def changed_copy(config: Any, change: Callable[[Any], None]) -> Any:
        # Modules share a config, of which they get one copy.
        if id(config) not in copies:
            new = copy(config)
            # The original is kept alive, so that its id is not reused.
            copies[id(config)] = config, new
            for name in getattr(config, "sub_configs", ()):
                if hasattr(part_of := vars(config).get(name), "_attn_implementation"):
                    vars(new)[name] = changed_copy(part_of, change)
            change(new)
        return copies[id(config)][1]

    def own(config: Any, name: str) -> Any:
        """Return what sets a name in this config alone, not in those of its parts."""
        return {"": name} if hasattr(config, "sub_configs") else name

    def of_huggingface(config: Any) -> None:
        """Turn off the cache, where a replay would find the block's own keys, and kernels without float32 or derivatives."""
        config.use_cache = False
        if is_kernel(config._attn_implementation):
            config._attn_implementation = own(config, kernel)
        if is_experts_kernel(getattr(config, "_experts_implementation", None)):
            config._experts_implementation = own(config, "eager")

    def of_transformer_lens(config: Any) -> None:
        config.dtype = dtype  # norms cast to it
        if hasattr(config, "device"):
            config.device = str(device)  # each block moves its input there
        if hasattr(config, "n_devices"):
            config.n_devices = 1

    for part in replica.modules():
        state = part.__dict__
        if hasattr(state.get("config"), "_attn_implementation"):
            state["config"] = changed_copy(state["config"], of_huggingface)
        if isinstance(getattr(state.get("cfg"), "dtype", None), torch.dtype):
            state["cfg"] = changed_copy(state["cfg"], of_transformer_lens)


# Relative, of all entries and of the largest: two runs of the same code may differ in rounding on some devices
STATELESS = 1e-6
NOT_STATE = ("_parameters", "_buffers", "_modules", "config", "training")


class ModuleState:
    """A copy of the attributes of a module and of all modules in it."""

    def __init__(self, block: nn.Module) -> None:
        memo: dict[int, Any] = {}
        self._attributes = [(part, _copy(_attributes(part), memo)) for part in block.modules()]

    def changed(self) -> bool:
        """Whether an attribute was replaced, or its contents changed, since it was saved."""
        return any(not equal_nested(_attributes(part), saved) for part, saved in self._attributes)

    def restore(self) -> None:
        """Restore the saved attributes and remove those added since; may be called more than once."""
        memo: dict[int, Any] = {}
        for part, saved in self._attributes:
            for name in _attributes(part).keys() - saved.keys():
                del part.__dict__[name]
            part.__dict__.update(_copy(saved, memo))


def require_stateless(
    module: nn.Module,
    before: ModuleState,
    run: Callable[[], Tensor],
    observation: str,
    description: Blocks,
) -> None:
    """Check that a call gives the same from a module's attributes as they are now as from those before.

    Args:
        run: the call, on another state than the one that was recorded: a cached output would agree on that.
        observation: what to say if it does not.
        description: of the model's blocks.

    Raises:
        UsageError: if it does not; also for a call that is random.
    """
    after = ModuleState(module)
    again = run()
    before.restore()
    expected = run()
    after.restore()
    # The largest entry as well: a difference in one row would be small beside the norm of all.
    norms = [
        partial(torch.linalg.vector_norm, ord=order, dtype=torch.float64)
        for order in (2, torch.inf)
    ]
    if not all(norm(again - expected) <= STATELESS * norm(expected) for norm in norms):
        raise irreproducible(observation, description)


class WeightHolder:
    """A part of the replica that holds weights, and its attributes before.

    What it writes to its buffers ends with the weights. Then so do its attributes: they may say what the buffers have, such as
    the length of a table.
    """

    def __init__(self, part: nn.Module) -> None:
        self.part = part
        self.before = dict(part.__dict__)
        # The buffers as given, to see whether it writes to them; None before
        self.given: list[tuple[str, int, int]] | None = None

    def release(self, written: "list[WeightHolder] | None") -> None:
        """Take the weights; restore the part, or put it into the list, if it wrote to its buffers."""
        if self.given is None or self.given == _versions(self.part):
            self.part.__dict__.update(
                _parameters=self.before["_parameters"], _buffers=self.before["_buffers"]
            )
        elif written is None:
            self.restore()
        else:
            self.part.__dict__["_parameters"] = self.before["_parameters"]
            written.append(self)

    def restore(self) -> None:
        """Restore all attributes."""
        self.part.__dict__.clear()
        self.part.__dict__.update(self.before)


def _versions(part: nn.Module) -> list[tuple[str, int, int]]:
    """Identify a part's buffers and what was written to them."""
    return [
        (name, id(t), t._version) for name, t in part.__dict__["_buffers"].items() if t is not None
    ]


def irreproducible(observation: str, description: Blocks) -> BlocksNotFound:
    """Return the error for a model whose repeated call gave another result.

    A block may read what the model leaves for it in a global variable. A span runs that part of the model, too.
    """
    finding = (
        f"{observation}: it is random, keeps state between calls, or is given other weights at each "
        "(torch.func.functional_call), so by itself it has no Jacobian to measure"
    )
    return BlocksNotFound(finding, chained(description), remedy="")


def _attributes(part: nn.Module) -> dict[str, Any]:
    attributes = {}
    for name, value in part.__dict__.items():
        if name not in NOT_STATE and not name.endswith(("_hooks", "_hooks_with_kwargs")):
            attributes[name] = value
    return attributes


def _copy(attributes: dict[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
    return {name: copy_nested(value, clone_if_tensor, memo) for name, value in attributes.items()}


class ModuleCopier:
    """Copy a model's modules: own dictionaries and containers, shared tensors, eval mode, no compiled wrappers, few hooks."""

    def __init__(self, model: nn.Module, shared: SharedTensors, generators: Generators) -> None:
        self.model = model
        self.shared = shared
        self.generators = generators
        self.memo: dict[int, Any] = {}  # by id of the original
        self.hooks = Hooks(model)
        self._copied: list[nn.Module] = []

    def copy_model(self) -> nn.Module:
        """Copy the model; its hooks after all modules, as they may share what these hold."""
        new = self.copy(self.model)
        for module in self._copied:  # which grows
            self._copy_hooks(module, self.memo[id(module)])
        return new

    def copy(self, module: nn.Module) -> nn.Module:
        """Copy a module and all its parts; each module has one copy, however many modules hold or wrap it."""
        if isinstance(module, ProxyTypes):
            module = module.__init__.__self__
        steps, module = path_inside(module)
        new = self.memo[id(module)] if id(module) in self.memo else self._copy(module)
        for step in steps:
            # The model's own code may reach through a wrapper: self.net.module.embed(x)
            if not hasattr(new, step):
                new.__dict__[step] = new
        return new

    def _copy(self, module: nn.Module) -> nn.Module:
        # In place of the constructor, which would ask for arguments and allocate weights.
        new = self.memo[id(module)] = object.__new__(plain_class(type(module)))
        state = new.__dict__
        for name, value in attributes(module).items():
            if name == _HOOKS_INSTALLED:
                continue
            if name not in module.__dict__:  # in a slot
                object.__setattr__(new, name, self.copy_nested(value))
            elif name in _HOOKS:
                state[name] = OrderedDict()
            elif name in ("_parameters", "_buffers", "_modules"):
                state[name] = {
                    key: None if entry is None else self.copy_leaf(entry)
                    for key, entry in value.items()
                }
            else:
                state[name] = self.copy_nested(value)
        # Dropout off; a compiled call would run the caller's modules.
        state.update(training=False, _compiled_call_impl=None)
        self._copied.append(module)
        _replace_forward(module, new)
        return new

    def _copy_hooks(self, module: nn.Module, new: nn.Module) -> None:
        """Give the copy of a module those of its forward hooks and forward pre-hooks that compute part of its function."""
        for store in _FORWARD_HOOKS:
            for key, hook in module.__dict__[store].items():
                if not self.hooks.compute(module, hook):
                    continue
                # A hook's marks (with keywords, called always) are in stores of their own, under the same key.
                for name, marks in module.__dict__.items():
                    if name in _HOOKS and name.startswith(store) and key in marks:
                        new.__dict__[name][key] = self.copy_nested(marks[key])

    @contextmanager
    def refusing_originals(self) -> Iterator[None]:
        """Refuse a pass of the copy, in this thread, that runs a module of the original, or looks for one that was copied."""
        names, thread = names_by_id(self.model), get_ident()

        def refusal(module: str, reached: str) -> UsageError:
            return UsageError(
                f"the forward pass can't run on copies: code reaches {module} of the model {reached}, by a global variable, an "
                "attribute of a class, or an object that can't be copied. Let the modules that use it hold it as an attribute"
            )

        def refuse(module: nn.Module, args: tuple) -> None:
            if get_ident() == thread and isinstance(self.memo.get(id(module)), nn.Module):
                raise refusal(names.get(id(module)) or type(module).__name__, "itself")

        with register_module_forward_pre_hook(refuse):
            try:
                yield
            except KeyError as error:
                if any(isinstance(key, MODULES) for key in error.args):
                    raise refusal("what belongs to a module", "by the module itself") from error
                raise

    def copy_nested(self, value: Any) -> Any:
        """Copy what a module or a function holds."""
        return copy_nested(value, self.copy_attribute, self.memo)

    def copy_attribute(self, value: Any) -> Any:
        """Copy what a module holds besides weights. Inference tensors are copied; those in weights, when a pass uses them."""
        if isinstance(value, Tensor) and value.is_inference():
            return self.shared.share(value.clone())
        if isinstance(value, FunctionType) and hasattr(value, "_torchdynamo_orig_callable"):
            # What `torch.compile` made of a function is compiled for the caller's modules.
            return self.copy_nested(value._torchdynamo_orig_callable)
        if isinstance(value, ref) and isinstance(module := value(), nn.Module):
            return ref(self.copy(module))
        if isinstance(value, FUNCTIONS) and holds_objects(value, self.memo):
            return rebuild(value, self.copy_nested, self.memo)
        return self.copy_leaf(value)

    def copy_leaf(self, value: Any) -> Any:
        """Copy a module, or a generator, share a plain tensor, keep anything else; `copy_nested` has handled containers."""
        if isinstance(value, nn.Module):
            return self.copy(value)
        if isinstance(value, Tensor) and is_plain(value):
            if id(value) not in self.memo:  # tied weights stay tied
                self.memo[id(value)] = self.shared.share(value)
            return self.memo[id(value)]
        if isinstance(value, Generator):
            self.generators.held.append(deepcopy(value))
            return self.generators.held[-1]
        return value


_HOOKS_INSTALLED = "_output_capturing_hooks_installed"  # of transformers.utils.output_capturing
_HOOKS = [
    name
    for name in vars(nn.Module())
    if name.endswith(("_hooks", "_hooks_with_kwargs", "_always_called"))
]
_FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def _replace_forward(module: nn.Module, new: nn.Module) -> None:
    """Drop the forward that accelerate installed on an instance.

    Raises:
        UsageError: if a forward on the instance can't be rebuilt over the copies.
    """
    state = new.__dict__
    if "_original_forward" in state:  # what accelerate wrapped in autocast
        state["forward"] = state.pop("_original_forward")
    if "_hf_hook" in state:
        state["forward"] = state["_old_forward"]
    if "forward" in state and not isinstance(state["forward"], FUNCTIONS):
        raise UsageError(
            f"the forward of {type(module).__name__} was replaced on the instance by {state['forward']!r}, and what that "
            "computes is not known: measure the model without it, or make it a method or a subclass"
        )


def modules_outside(block: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules outside a block that its functions, hooks and containers hold; of a model around it, no other blocks."""
    # In this order on all ranks, which gather weights together.
    inside = dict.fromkeys(block.modules())
    attributes = [
        {name: v for name, v in vars(part).items() if name not in NOT_STATE} for part in inside
    ]
    outside: dict[nn.Module, None] = {}
    for held in reachable(attributes):
        if isinstance(held, nn.Module) and held not in inside:
            parts = list(held.modules())
            left_out = set(inside)
            if block in parts:
                # It is around the block: a reference to the whole model must not bring in all blocks' weights.
                left_out = {part for other in blocks for part in other.modules()}
            outside |= {part: None for part in parts if part not in left_out}
    return [part for part in outside if part not in inside]


class StopForward(BaseException):
    """Raised by a hook, with a value, to end a forward pass (`Replica.run`) with it. A model's code may catch any Exception."""


class Replica:
    """A copy of a model's module tree whose modules hold weights, in `dtype` on `device`, only inside `materialize`."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Blocks,
        dtype: torch.dtype,
        device: torch.device,
        gather: Gather = gather_alone,
    ):
        check_whole(model)
        self.model = model
        self._shared = SharedTensors()
        self.generators = Generators(device)
        self._copier = ModuleCopier(model, self._shared, self.generators)
        self.module = self._copier.copy_model()
        for part in self.module.modules():
            hook_attn_method(part)
            # LightningModule's own record of dtype and device
            if isinstance(part.__dict__.get("_dtype"), torch.dtype):
                part.__dict__.update(_dtype=dtype, _device=device)
        adjust_configs(self.module, dtype, device)
        self.blocks: list[nn.Module] = []
        if not blocks.spans:
            self.blocks = [self.module.get_submodule(name) for name in blocks.names]
        self.held_outside = {
            id(block): modules_outside(block, self.blocks) for block in self.blocks
        }
        self.description = blocks
        self.dtype = dtype
        self.device = device
        self.gather = gather  # reads a weight that is sharded over ranks
        self.stateless: set[int] = set()  # blocks, by id, found to keep no state between calls
        # Blocks, by id, found not to use the random numbers that they draw
        self.draws_for_nothing: set[int] = set()
        self._writers: set[int] = set()  # modules, by id, that write to their weights or buffers

    def fresh(self, blocks: Blocks | None = None) -> "Replica":
        """Return another replica of the same model, with the same or other blocks: what a pass through one writes does not
        reach the other.
        """
        return Replica(self.model, blocks or self.description, self.dtype, self.device, self.gather)

    def oriented(self, state: Tensor) -> Tensor:
        """Return a state (B, n, d) as the model's blocks take it, or one of theirs as (B, n, d): the same exchange of axes."""
        return state if self.description.batch_first else state.transpose(0, 1)

    @property
    def waits(self) -> bool:
        """Whether a pass so far waited for other ranks."""
        return self._shared.waits

    def guard(self) -> WriteGuard:
        """Return the context for a forward pass: writes to the caller's tensors go to copies of them."""
        return WriteGuard(self._shared)

    def forward(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Run the forward pass on copies of these inputs, which seed its random numbers."""
        copies = self.copy_inputs((list(arguments), dict(keywords)))
        return self.run(*copies, seed=seed_of(arguments, keywords))

    def run(self, arguments: Sequence[Any], keywords: Mapping[str, Any], seed: int) -> Any:
        """Run the forward pass under `guard`; return its output, or the value of the `StopForward` that ended it.

        Args:
            seed: of the random numbers that the pass may draw.
        """
        self.generators.seed(seed)
        with (
            self.guard(),
            noting_forward(
                f"{type(self.module).__name__}, whose weights and tables are converted to dtype={self.dtype}"
            ),
            self._copier.refusing_originals(),
        ):
            try:
                return self.module(*arguments, **keywords)
            except StopForward as stopped:
                return stopped.args[0]

    @contextmanager
    def watch_writes(self, module: nn.Module) -> Iterator[None]:
        """Undo on exit what `module` wrote to its weights, and remember that it writes to them."""
        self._shared.begin_call()
        yield
        self._undo_writes(module)

    def _undo_writes(self, module: nn.Module) -> None:
        if self._shared.undo_writes():
            self._writers.add(id(module))

    def fresh_weights(self, block: nn.Module) -> AbstractContextManager[None]:
        """Return the context for one call of a block that holds its weights: copies of them, if it writes to them."""
        return self.materialize(block) if id(block) in self._writers else nullcontext()

    @contextmanager
    def stream_blocks(
        self, enter: Callable[..., None], leave: Callable[..., Any]
    ) -> Iterator[None]:
        """Hold the weights outside the blocks throughout, and each block's weights while that block runs.

        Args:
            enter: a forward pre-hook (with keywords) for every block, called before the block's weights are loaded.
            leave: a forward hook for every block, called before they are released, when the block's writes to them are
                undone. It may call the block again: that runs neither hook.
        """
        # With no stack: called again while it runs
        running: list[tuple[nn.Module, ExitStack | None]] = []
        # Parts of blocks that wrote to their buffers, which a later call in this pass may read.
        written: list[WeightHolder] = []

        def load(block: nn.Module, args: tuple, kwargs: dict) -> None:
            if any(block is other for other, _ in running):
                running.append((block, None))
                return
            enter(block, args, kwargs)
            weights = ExitStack()
            running.append((block, weights))
            weights.enter_context(self.materialize(block, written=written))
            self._shared.begin_call()

        def release(block: nn.Module, args: tuple, output: Any) -> Any:
            _, weights = running[-1]
            changed = None
            if weights is not None:
                # In this order: the block's own writes are undone before a hook may call the block again.
                self._undo_writes(block)
                changed = leave(block, args, output)
                weights.close()
            running.pop()
            return changed

        with ExitStack() as stack:
            # Before the blocks' hooks: their callbacks run in the reverse order, and weights of blocks lie over those of the
            # whole.
            stack.enter_context(self.materialize(self.module, exclude=self.blocks))
            stack.callback(lambda: [part.restore() for part in reversed(written)])
            # A pass that raised left blocks without their forward hook.
            stack.callback(
                lambda: [weights.close() for _, weights in reversed(running) if weights is not None]
            )
            for block in self.blocks:
                # First, as the block's own pre-hooks are part of the block.
                before = block.register_forward_pre_hook(load, prepend=True, with_kwargs=True)
                stack.callback(before.remove)
                stack.callback(block.register_forward_hook(release).remove)
            yield

    @contextmanager
    def materialize(
        self,
        module: nn.Module | None,
        exclude: Sequence[nn.Module] = (),
        dtype: torch.dtype | None = None,
        written: list[WeightHolder] | None = None,
    ) -> Iterator[None]:
        """Give `module`, except the parts in `exclude`, its weights on the device, in the measuring dtype or in `dtype`.

        A block's functions may run modules outside it: those have theirs, too.

        Args:
            written: collects the parts that wrote to their buffers, instead of restoring them on exit.
        """
        copied = id(module) in self._writers
        skipped = {id(part) for excluded in exclude for part in excluded.modules()}
        # By id of the module's own tensor: tied weights stay tied
        converted: dict[int, Tensor] = {}
        held: list[WeightHolder] = []

        def materialized(part: nn.Module, name: str, tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            if id(tensor) not in converted:
                plain = self.convert(plain_tensor(part, name, tensor, self.gather), dtype)
                # Buffers are written to in ordinary passes (running means, caches of tables); weights, by few models.
                converted[id(tensor)] = plain.clone() if copied or name in part._buffers else plain
            return converted[id(tensor)]

        try:
            parts = []
            if module is not None:
                # A block's functions and hooks may call modules that it does not contain.
                parts = [*module.modules(), *self.held_outside.get(id(module), ())]
            for part in parts:
                if id(part) in skipped:
                    continue
                held.append(WeightHolder(part))
                for store in ("_parameters", "_buffers"):
                    part.__dict__[store] = {
                        name: materialized(part, name, t)
                        for name, t in part.__dict__[store].items()
                    }
                held[-1].given = _versions(part)
            with self._shared.watch(converted.values()):
                yield
        finally:
            for part in held:
                part.release(written)

    def fill_zeros(self, parts: Iterable[nn.Module]) -> None:
        """Give parameters of these parts that are all zero other values, the same in every pass, while the parts hold weights."""
        held = [
            (part.__dict__["_parameters"], name, value)
            for part in parts
            for name, value in part.__dict__["_parameters"].items()
            if value is not None and value.is_floating_point()
        ]
        for (parameters, name, value), nonzero in zip(
            held, read([value.any() for *_, value in held]), strict=True
        ):
            if not nonzero:
                parameters[name] = noise_like(value)

    def copy_inputs(self, value: Any) -> Any:
        """Copy a forward pass's inputs, nested or not, their tensors converted: the pass may write to them."""

        def leaf(entry: Any) -> Any:
            if isinstance(entry, Generator):
                return deepcopy(entry)
            converted = self.convert(entry) if isinstance(entry, Tensor) else entry
            return clone_if_tensor(converted) if converted is entry else converted

        return copy_nested(value, leaf, {})

    def convert(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Move a tensor to the device; cast it to the measuring dtype, or to `dtype`, if it is floating."""
        dtype = (dtype or self.dtype) if tensor.is_floating_point() else tensor.dtype
        if dtype.itemsize > tensor.itemsize:
            # Cast there: on the host it would grow before it is copied
            tensor = tensor.to(self.device)
        tensor = tensor.to(self.device, dtype)
        # Inference tensors can't enter a graph
        return tensor.clone() if tensor.is_inference() else tensor
