"""The options of one training run, and their validation before data or models are loaded.

This module imports nothing heavy: the command lines read it to print their help.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tracker.common.values import INTEGERS, ValueTypeError, as_path
from tracker.measures.options import given_options, settings_from
from tracker.measures.settings import OPTIONS, Settings

RECIPES = Path(__file__).parent / "recipes"
# --precision is Lightning's. The default positions are the class token's, on which the model's answer rests, and the last
# patch's, which the authors' code measures.
FLAGS = tuple(name for name in OPTIONS if name != "precision")
DEFAULTS = {"tokens": (0, -1)}
SETTINGS = ("weight_decay", "drop_path", "seed")  # that a grid varies
# Settings that affect no number beyond rounding: a run may be resumed with other values of these.
INCIDENTAL = (
    "data_dir", "out", "accelerator", "compile", "devices", "threads", "keep_checkpoint", "test_every", "wandb", "project",
    "options",
)  # fmt: skip


@dataclass
class Recipe:
    """Train a DeiT-style vision transformer and measure block coupling during training.

    Results go to OUT: result.json at the end, history.json after each epoch, coupling/ (for tracker.open_results) and
    last.ckpt (to resume). The same command resumes an interrupted run and leaves a finished one as it is. Exit status: 0
    trained; 1 diverged or failed; 2 bad usage; 130 interrupted.

    Args:
        data: cifar10 (downloaded on first use), digits (scikit-learn's 1,797 images, part of the package), or
            folder:PATH with PATH/train/CLASS/* and PATH/test/CLASS/* or PATH/val/CLASS/*.
        data_dir: directory of CIFAR10; missing files are downloaded to it. Default: the user's cache directory.
        train_size: number of training images, balanced over classes, the same for every seed. Default: all.
        test_unused: test on the training images that train_size leaves out, too.
        image_size: side of the input images in pixels; images of another size are resized.
        patch_size: side of a patch in pixels; it has to divide image_size.
        width: embedding dimension; a multiple of heads.
        depth: number of blocks.
        heads: number of attention heads.
        drop_path: stochastic depth rate of the last block, rising linearly from 0 at the first; in [0, 1).
        weight_decay: AdamW's weight decay; norms, biases, position embeddings and the class token are exempt.
        epochs: number of passes over the training images.
        batch_size: images per step, over all devices.
        lr: learning rate per 512 images of batch_size.
        warmup_lr: learning rate at the start of the warm-up.
        min_lr: learning rate at the end of the cosine schedule.
        warmup_epochs: number of epochs of linear warm-up.
        clip: maximum gradient norm. Default: no clipping.
        label_smoothing: amount of label smoothing, in [0, 1).
        mixup: alpha of mixup; 0 disables it.
        cutmix: alpha of cutmix; 0 disables it.
        rand_augment: RandAugment in timm's notation, or off.
        erasing: probability of random erasing.
        repeats: number of differently augmented copies of each image in a batch (repeated augmentation).
        crop_padding: random crops of the image padded by this many pixels.
        flip: probability of a horizontal flip.
        seed: random seed of initial weights, order of images, augmentation and stochastic depth.
        precision: Lightning's precision of training, such as 32-true, bf16-mixed or 16-mixed. Default: bf16-mixed on a GPU,
            32-true elsewhere.
        accelerator: Lightning's accelerator: auto, cpu, gpu, cuda or mps.
        compile: whether torch.compile makes graphs of the model in training, on one device. Default: on a CUDA GPU.
        devices: number of devices.
        threads: number of CPU threads; results are reproducible for the same number. Default: torch's choice.
        measure_at: steps at which coupling is measured: log2 (1, 2, 4, ...), numbers such as 100,1000, or off.
            Unless off, coupling is measured before the first step and after the last too.
        probe_size: number of test images on which coupling is measured, the same in every run.
        test_every: number of epochs between tests, a divisor of epochs; 0 tests after the last epoch only.
        out: directory of the results. Default: results/vit/DATA/CELL, where CELL states weight decay, stochastic depth and seed.
        keep_checkpoint: keep last.ckpt after training.
        wandb: W&B mode; auto is online if an API key is configured, else offline.
        project: the W&B project.
        options: measurement options, as `tracker.measure` takes them.
    """

    data: str = "cifar10"
    data_dir: Path | None = None
    train_size: int | None = None
    test_unused: bool = False
    image_size: int = 32
    patch_size: int = 4
    width: int = 192
    depth: int = 12
    heads: int = 3
    drop_path: float = 0.1
    weight_decay: float = 0.05
    epochs: int = 300
    batch_size: int = 512
    lr: float = 5e-4
    warmup_lr: float = 1e-6
    min_lr: float = 1e-5
    warmup_epochs: int = 5
    clip: float | None = None
    label_smoothing: float = 0.1
    mixup: float = 0.8
    cutmix: float = 1.0
    rand_augment: str = "rand-m9-mstd0.5-inc1"
    erasing: float = 0.25
    repeats: int = 3
    crop_padding: int = 4
    flip: float = 0.5
    seed: int = 0
    precision: str | None = None
    accelerator: str = "auto"
    compile: bool | None = None
    devices: int = 1
    threads: int | None = None
    measure_at: int | str = "log2"
    probe_size: int = 32
    test_every: int = 1
    out: Path | None = None
    keep_checkpoint: bool = True
    wandb: Literal["auto", "online", "offline", "off"] = "auto"
    project: str = "block-coupling-vit"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Take directories as text, too."""
        self.data_dir, self.out = as_path("data_dir", self.data_dir), as_path("out", self.out)

    @property
    def data_name(self) -> str:
        """Name of the data set, for directories and W&B."""
        kind, _, path = self.data.partition(":")
        return Path(path or kind).name

    @property
    def cell(self) -> str:
        """Name of this cell of a grid, and of its directory."""
        return f"wd{self.weight_decay:g}_sd{self.drop_path:g}_seed{self.seed}"

    @property
    def directory(self) -> Path:
        """Directory of the results."""
        return self.out or Path("results") / "vit" / self.data_name / self.cell

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that affect the numbers, as JSON-serializable values."""
        recipe = {name: value for name, value in asdict(self).items() if name not in INCIDENTAL}
        options = self.settings.identity(("k", "tokens"))
        options |= {name: _text(options[name]) for name in ("k", "tokens")}
        return recipe | {
            name if name in FLAGS else f"measure_{name}": value for name, value in options.items()
        }

    @property
    def settings(self) -> Settings:
        """The measurement options."""
        return settings_from(DEFAULTS | self.options, "Recipe")

    def steps_per_epoch(self, images: int) -> int:
        """Return the number of optimizer steps per epoch; an incomplete batch is dropped."""
        return images // self.batch_size

    def measured_steps(self, last: int) -> list[int] | None:
        """Return the steps of a training of `last` steps at which coupling is measured; None if it is not."""
        text = str(self.measure_at)
        if text == "off":
            return None
        chosen = (
            [2**power for power in range(last.bit_length())] if text == "log2" else _steps(text)
        )
        return sorted({0, last, *(step for step in chosen if step < last)})


RULES = (
    (
        "image_size patch_size width depth heads epochs batch_size repeats devices probe_size train_size threads",
        lambda value: value is None or value >= 1,
        "it must be at least 1",
    ),
    (
        "weight_decay lr warmup_lr min_lr warmup_epochs mixup cutmix crop_padding seed test_every",
        lambda value: value >= 0,
        "it must not be negative",
    ),
    (
        "drop_path label_smoothing",
        lambda value: 0 <= value < 1,
        "it must be at least 0 and below 1",
    ),
    (
        "erasing flip",
        lambda value: 0 <= value <= 1,
        "it is a probability: give a value from 0 to 1",
    ),
    (
        "clip",
        lambda value: value is None or value > 0,
        "it must be above 0; leave it out for no limit",
    ),
)


def check(recipe: Recipe) -> None:
    """Validate the settings before data or models are loaded.

    Raises:
        ValueError: stating the option, its value and the allowed values.
    """

    def refuse(option: str, allowed: str) -> None:
        raise ValueError(f"--{option} {getattr(recipe, option)}; {allowed}")

    kind, _, path = recipe.data.partition(":")
    if recipe.data not in ("cifar10", "digits") and not (kind == "folder" and path):
        refuse("data", "choose cifar10, digits or folder:PATH")
    for options, allows, allowed in RULES:
        for option in options.split():
            if not allows(getattr(recipe, option)):
                refuse(option, allowed)
    if recipe.test_unused and recipe.train_size is None:
        refuse("test_unused", "no image is unused; give --train_size too")
    if recipe.image_size % recipe.patch_size:
        divisors = [p for p in range(2, recipe.image_size + 1) if recipe.image_size % p == 0]
        refuse(
            "patch_size",
            f"it has to divide --image_size {recipe.image_size}: {', '.join(map(str, divisors))}",
        )
    if recipe.width % recipe.heads:
        refuse("width", f"it has to be a multiple of --heads {recipe.heads}")
    if recipe.warmup_epochs >= recipe.epochs:
        refuse("warmup_epochs", f"it has to be below --epochs {recipe.epochs}")
    if recipe.test_every and recipe.epochs % recipe.test_every:
        refuse(
            "test_every",
            f"it has to divide --epochs {recipe.epochs}, so that the last epoch is tested; or give 0",
        )
    devices = recipe.devices
    if recipe.batch_size % devices:
        refuse("batch_size", f"it is split over {devices} devices: give a multiple of {devices}")
    if recipe.compile and devices > 1:
        refuse("compile", f"--devices {devices} takes --compile false")
    if (recipe.mixup or recipe.cutmix) and recipe.batch_size // devices % 2:
        refuse(
            "batch_size",
            "mixup and cutmix pair images, so each device needs an even number; or --mixup 0 --cutmix 0",
        )
    ks = recipe.settings.k
    if ks and max(ks) > recipe.width:
        raise ValueError(f"--k {_text(ks)}; each K must lie between 1 and --width {recipe.width}")
    recipe.measured_steps(1)  # refuses an invalid choice


def recipe_file(name: str) -> str:
    """Return the path of a recipe that is shipped with the package, by its name; return any other text as given."""
    file = RECIPES / f"{name}.yaml"
    return str(file) if file.is_file() else name


def from_dict(settings: dict[str, Any]) -> Recipe:
    """Return the Recipe of the values that a parser read."""
    values: dict[str, Any] = {
        name: settings[name] for name in Recipe.__dataclass_fields__ if name in settings
    }
    return Recipe(**values, options=given_options(settings, FLAGS))


def _steps(text: str) -> list[int]:
    try:
        steps = INTEGERS(text)
    except ValueTypeError as error:
        raise ValueError(f"--measure_at {error}") from error
    if min(steps) < 0:
        raise ValueError(f"--measure_at {text}; steps must not be negative")
    return steps


def _text(value: Any) -> Any:
    """Return a value in its command-line form, in which the identities of existing runs are stored."""
    if not isinstance(value, (list, tuple)):
        return value
    return value[0] if len(value) == 1 else ",".join(map(str, value))
