"""Check Python packages and device: `python -m benchmarks.gpu.requirements --device cuda`."""

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec

# That the steps import.
PACKAGES = """
torch torchvision transformers timm lightning torchmetrics numpy xarray netCDF4 cftime jaxtyping huggingface_hub safetensors
tokenizers scipy matplotlib plotly rich jsonargparse docstring_parser typeshed_client pytest hypothesis beartype
""".split()
REMEDY = (
    "install them, or bring their wheels (pip download --no-deps --only-binary=:all: --dest DIR NAME ...) and give "
    "--wheels DIR"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is missing; return 0 if nothing is."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.requirements", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    device = parser.parse_args(arguments).device
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        print(f"error: packages are missing: {', '.join(missing)}; {REMEDY}")
        return 2
    if device.startswith("cuda"):
        import torch

        if not torch.cuda.is_available():
            built = torch.version.cuda or "no CUDA"
            print(
                f"error: there is no CUDA device (torch {torch.__version__}, built for {built}); "
                "`--device cpu --small` runs every step in small on the CPU"
            )
            return 2
        torch.zeros(1, device=device).add_(1).item()
    return 0


if __name__ == "__main__":
    sys.exit(main())
