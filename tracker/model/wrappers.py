"""Read a module tree through wrappers: modules that hold another one and do nothing of their own in its forward pass.

The name of a module is always its name in the tree without wrappers, at whatever depth they stand. That is the tree of a replica,
so a name found in the model is valid there.
"""

from torch import nn
from torch.optim.swa_utils import AveragedModel

# The child that a wrapper holds: torch.compile, activation checkpointing, Lightning Fabric.
_HELD = ("_orig_mod", "_checkpoint_wrapped_module", "_forward_module")
# Their child is `module`
_HOLDERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)


def innermost(module: nn.Module) -> nn.Module:
    """Return the module inside wrappers, or the module itself; its parts may be wrapped."""
    return path_inside(module)[1]


def path_inside(module: nn.Module) -> tuple[list[str], nn.Module]:
    """Return the attributes that lead through a module's wrappers, the outermost first, and the module inside them."""
    steps = []
    while (held := _held(module)) is not None:
        step, module = held
        steps.append(step)
    return steps, module


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model without wrappers at any depth: the model itself if it has none, else shallow copies of its modules.

    A copy shares everything with its original except the table of its children. It is for reading, and its hooks are its
    original's; the model that runs is the original.
    """
    copies: dict[int, nn.Module] = {}  # by id of the original: a module in two places stays one

    def copy(module: nn.Module) -> nn.Module:
        module = innermost(module)
        if id(module) not in copies:
            new = copies[id(module)] = object.__new__(type(module))
            children: dict[str, nn.Module | None] = {}
            new.__dict__ = vars(module) | {"_modules": children}
            children.update(
                (key, None if child is None else copy(child))
                for key, child in module._modules.items()
            )
        return copies[id(module)]

    return model if all(_held(module) is None for module in model.modules()) else copy(model)


def names_by_id(model: nn.Module) -> dict[int, str]:
    """Return the name of every module of the model, by its id; a wrapper has the name of what it holds."""
    names: dict[int, str] = {}

    def visit(name: str, module: nn.Module) -> None:
        if id(module) in names:
            return
        names[id(module)] = name
        if (held := _held(module)) is not None:
            visit(name, held[1])
            return
        for key, child in module._modules.items():
            if child is not None:
                visit(f"{name}.{key}" if name else key, child)

    visit("", model)
    return names


def name_without_wrappers(model: nn.Module, path: str) -> str | None:
    """Return the name of the module that a path names, with the wrappers' own steps in it or without; None if there is none."""
    tree = unwrap(model)
    own = [step for step in path.split(".") if step not in (*_HELD, "module", "original_model")]
    return next((name for name in (path, ".".join(own)) if _has(tree, name)), None)


def _has(model: nn.Module, path: str) -> bool:
    """Whether a model has a module of this name, which may be one of several names of that module."""
    module: nn.Module | None = model
    for step in path.split(".") if path else ():
        module = None if module is None else module._modules.get(step)
    return module is not None


def _held(module: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the module that a wrapper holds, after the attribute that is it; None for a module that is no wrapper.

    TransformerLens's TransformerBridge is a wrapper too: it keeps the model that its forward calls outside its own tree, and puts
    its hook points into that model.
    """
    if "original_model" in vars(module) and "TransformerBridge" in {
        c.__name__ for c in type(module).__mro__
    }:
        return "original_model", vars(module)["original_model"]
    attribute = (
        "module"
        if isinstance(module, _HOLDERS)
        else next((key for key in _HELD if key in module._modules), "")
    )
    # TorchScript's table has no `get`
    held = module._modules[attribute] if attribute in module._modules else None
    return None if held is None else (attribute, held)
