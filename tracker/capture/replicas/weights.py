"""Read a module's weights as plain tensors: offloaded, quantised, sharded, or made under inference mode.

All code that depends on accelerate, bitsandbytes and distributed tensors is here; none of them is imported unless the
model uses it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tracker.capture.replicas.sharded import Gather, gather_alone
from tracker.errors import UsageError


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor holds its own values: not quantised, sharded, sparse or offloaded."""
    return (
        type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and getattr(tensor, "quant_state", None) is None
        and getattr(tensor, "SCB", None) is None
    )


def plain_tensor(module: nn.Module, name: str, tensor: Tensor, gather: Gather = gather_alone) -> Tensor:
    """Return the full, dequantised, detached value of a module's parameter or buffer.

    Args:
        gather: reads a sharded tensor.

    Raises:
        UsageError: if the weights are on the meta device and accelerate has no offloaded copy.
    """
    if tensor.device.type == "meta":
        tensor = _offloaded(module, name)
    if getattr(tensor, "quant_state", None) is not None:  # bitsandbytes, 4 bit
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(tensor.data, tensor.quant_state)  # type: ignore[attr-defined]
    if getattr(tensor, "SCB", None) is not None:  # bitsandbytes, 8 bit
        from bitsandbytes.functional import int8_vectorwise_dequant

        return int8_vectorwise_dequant(tensor.data, tensor.SCB)  # type: ignore[attr-defined]
    if hasattr(tensor, "full_tensor"):
        return gather(tensor).detach()
    return tensor.detach() if tensor.requires_grad else tensor


def check_whole(module: nn.Module) -> None:
    """Check that the weights of a module can be read one by one.

    Raises:
        UsageError: for weights in flattened pieces (FSDP 1, DeepSpeed ZeRO 3).
    """
    flattened = any("_fsdp_wrapped_module" in part._modules for part in module.modules())
    if flattened or any(hasattr(parameter, "ds_id") for parameter in module.parameters()):
        raise UsageError(
            f"{'FSDP 1' if flattened else 'DeepSpeed ZeRO 3'} keeps weights in flattened pieces that can't be read one by one; "
            "shard with FSDP2 (in Lightning, ModelParallelStrategy), or train with DDP"
        )


def plain_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class whose forward takes plain weights: nn.Linear for a quantised linear layer, else `cls`."""
    quantised = cls.__module__.startswith("bitsandbytes.") and issubclass(cls, nn.Linear)
    return nn.Linear if quantised else cls


def _offloaded(module: nn.Module, name: str) -> Tensor:
    """Return the value that accelerate's hook on the module would load for its forward pass."""
    hook: Any = module.__dict__.get("_hf_hook")
    for one in getattr(hook, "hooks", [hook]):
        offloaded = getattr(one, "weights_map", None)
        if offloaded is not None:
            return torch.as_tensor(offloaded[name])
    raise UsageError(
        f"the weights of {type(module).__name__} are on the meta device, with no offloaded copy; load the model first"
    )
