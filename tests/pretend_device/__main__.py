"""Print what measurements cost on an accelerator: launches, waits of the host, and copies, counted on the pretend device.

    python -m tests.pretend_device [CASE ...]

The counts do not depend on the machine. They are not times: a launch costs a GPU at least some microseconds, and a wait ends
the overlap of host and device.
"""

import sys
import warnings
from collections.abc import Callable

import timm
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import tracker
from tests import pretend_device
from tests.pretend_device import Counts
from tracker.linalg.svd import triplets_of_each

COLUMNS = ("launches", "syncs", "to_device", "to_host")
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}


def deit(device: torch.device, images: int, blocks: int) -> Callable[[], object]:
    """Return a measurement of DeiT-Ti at 197 tokens, coupling alone."""
    model = timm.create_model("deit_tiny_patch16_224", num_classes=10, depth=blocks).to(device).eval()
    return lambda: tracker.measure(model, torch.randn(images, 3, 224, 224), k=10, measures="coupling")


def neox(
    device: torch.device, svd: str, prompts: int = 1, measures: tuple[str, ...] = ("coupling",)
) -> Callable[[], object]:
    """Return a measurement of a GPT-NeoX with 4 blocks of d = 640 at the last of 128 tokens."""
    sizes = {"hidden_size": 640, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 2560}
    config = GPTNeoXConfig(vocab_size=512, rope_parameters=ROPE, max_position_embeddings=2048, **sizes)
    model = GPTNeoXForCausalLM(config).to(device).eval()
    tokens = torch.randint(0, 512, (prompts, 128))
    return lambda: tracker.measure(model, tokens, k=10, svd=svd, measures=measures)


def matrices(device: torch.device, number: int, d: int) -> Callable[[], object]:
    """Return the search for the top 10 triplets of matrices, half of them with a falling spectrum."""
    Js = [torch.randn(1, d, d) * torch.logspace(0, -3 * (i % 2), d) / d**0.5 for i in range(number)]
    on_device = [J.to(device) for J in Js]
    return lambda: triplets_of_each(on_device, 10, "krylov")


CASES = {
    "deit-ti, 12 blocks, 64 images": lambda device: deit(device, 64, 12),
    "deit-ti, 2 blocks, 8 images": lambda device: deit(device, 8, 2),
    "gpt-neox, svd=auto": lambda device: neox(device, "auto"),
    "gpt-neox, svd=full": lambda device: neox(device, "full"),
    "gpt-neox, svd=krylov": lambda device: neox(device, "krylov"),
    "gpt-neox, svd=matrix-free": lambda device: neox(device, "matrix-free"),
    "gpt-neox, svd=auto, 8 prompts": lambda device: neox(device, "auto", 8),
    "gpt-neox, coupling and trajectory": lambda device: neox(device, "auto", 1, ("coupling", "trajectory")),
    "8 matrices, d=1024": lambda device: matrices(device, 8, 1024),
    "1 matrix, d=2048": lambda device: matrices(device, 1, 2048),
}


def count(case: str) -> Counts:
    """Run a case once and return its counts."""
    pretend = pretend_device.load()
    with pretend.available():
        torch.manual_seed(0)
        run = CASES[case](pretend.device)
        with pretend.count() as counts:
            run()
    return counts


def main() -> None:
    """Print a table of the chosen cases, or of all."""
    warnings.simplefilter("ignore")
    chosen = sys.argv[1:] or list(CASES)
    if unknown := [case for case in chosen if case not in CASES]:
        sys.exit(f"there is no case {', '.join(unknown)}; the cases are: " + "; ".join(CASES))
    print("| case | " + " | ".join(COLUMNS) + " |\n| --- |" + " ---: |" * len(COLUMNS))
    for case in chosen:
        counts = count(case)
        print(f"| {case} | " + " | ".join(f"{getattr(counts, name):,}" for name in COLUMNS) + " |", flush=True)


if __name__ == "__main__":
    main()
