"""Packages that are missing, and the message that names the extra of the distribution that brings each.

The core installs what `tracker.measure` needs. Everything else is imported where it is used; without it, the error says what
to install.
"""

from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]  # where the packages of the distribution are
DISTRIBUTION = "block-coupling-tracker"
# Imported name -> extra, as in pyproject.toml.
EXTRAS = {
    "jsonargparse": "all",  # every command needs more than its parser
    "rich": "all",
    "transformers": "walk",
    "huggingface_hub": "walk",
    "safetensors": "walk",
    "tokenizers": "walk",
    "lightning": "train",
    "wandb": "wandb",
    "wandb_workspaces": "wandb",
    "matplotlib": "report",
    "plotly": "report",
    "timm": "vit",
    "torchvision": "vit",
    "sklearn": "vit",
    "torchmetrics": "vit",
    "ray": "ray",
    "datasets": "prompts",
}


class MissingExtraError(ImportError):
    """A package that can't be imported: one of an extra that is not installed, or one that a user's file hides."""


def missing_extra(error: ImportError, what: str) -> ImportError:
    """Return an error that names the extra for what could not be imported, or the same error if no extra brings it.

    >>> print(missing_extra(ModuleNotFoundError(name="lightning.pytorch"), "tracker.CouplingCallback"))
    tracker.CouplingCallback needs lightning, which is not installed: pip install 'block-coupling-tracker[train]'
    """
    package = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or package not in EXTRAS:
        return error
    return MissingExtraError(
        f"{what} needs {package}, which is not installed: pip install '{DISTRIBUTION}[{EXTRAS[package]}]'", name=package
    )


def require(package: str, what: str) -> None:
    """Raise MissingExtraError, which names the extra, if a package is not installed; `what` needs it."""
    if find_spec(package) is None:
        raise missing_extra(ModuleNotFoundError(name=package), what)


def require_own(package: str) -> None:
    """Raise MissingExtraError, which names the file, if a user's module hides a top-level package of this distribution."""
    spec = find_spec(package)
    found = spec and spec.origin
    if found != str(ROOT / package / "__init__.py"):
        raise MissingExtraError(
            f"this command needs its own package {package!r}, but Python finds {found or 'another folder'}: rename that, or run "
            "the command in another directory",
            name=package,
        )
