"""Where a model's weights stay while it is measured, and the memory budget by default."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def default_budget(device: "torch.device", weights: int) -> int:
    """Return the default memory budget; it depends on the machine and the model, not on the memory that happens to be free.

    It is half of an accelerator's memory or, where the weights leave less, what they leave, if that is at least an eighth. On
    the CPU, and beside an accelerator that does not report its memory, it is a quarter of the machine's memory.
    """
    from tracker.capture.spill import host_memory

    known = _free_and_total(device)
    if known is None:
        return host_memory()
    _, total = known
    left = total * 9 // 10 - weights  # a tenth for the driver, libraries and fragmentation
    return left if total // 8 <= left < total // 2 else total // 2


def stays_on_device(device: "torch.device", weights: int, budget: int) -> bool:
    """Return whether all weights are to stay on the device: they and the budget fit into what is free."""
    if device.type == "cpu":
        return False
    known = _free_and_total(device)
    # A device that does not report its memory is taken to have half a budget more.
    free = budget + budget // 2 if known is None else known[0]
    return weights + budget <= free


def _free_and_total(device: "torch.device") -> tuple[int, int] | None:
    """Return the free and the total bytes of a device, if it reports them; memory that PyTorch holds unused is free."""
    import torch

    module: Any = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None
    free, total = module.mem_get_info(device)
    if hasattr(module, "memory_reserved"):
        free += module.memory_reserved(device) - module.memory_allocated(device)
    return free, total
