"""The command line of a walk. Nothing heavy is imported here, so that `--help` is quick.

It is what a walk imports first, so a user's file that hides the package `checkpoints` is named here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from tracker.common.errors import require_own
from tracker.common.values import BYTE_SIZE, LOG, PROJECT

require_own("checkpoints")

# The memory budget is taken from the machine, and a store states whether measures were given.
LEFT_OUT = {"memory_budget": None, "measures": None}
DISK_BUDGET = (
    "disk space for downloads, such as 60GB; measured revisions that this program fetched are removed to stay within it. "
    "Default: no limit, nothing is removed."
)
GROUPS = {
    "most used": ("model", "steps", "k", "measures", "out", "wandb"),
    "before a walk": ("dry_run", "on", "config", "print_config"),
    "checkpoints": (
        "files",
        "load",
        "revisions",
        "stage",
        "untrained",
        "allow_suspect",
        "scores",
        "module",
    ),
    "prompts": ("prompts", "suffix", "max_tokens", "tokenizer", "inputs"),
    "measurement": (
        "blocks",
        "tokens",
        "final_norm",
        "svd",
        "dtype",
        "precision",
        "derivative",
        "witness",
        "window",
        "pair_tokens",
        "pair_layers",
    ),
    "machine": ("device", "memory_budget", "disk_budget"),
    "logging": ("log", "project", "debug"),
}


@dataclass
class Walk:
    """Measure block coupling, LSS and expodistance at the training checkpoints of a model.

    Exit status: 0 all measured; 1 some revision failed (listed at the end, the others kept); 2 bad usage.

    Args:
        files: in place of MODEL, a pattern of files or directories that --load loads, such as 'runs/epoch_*.pt', in quotes.
            Their steps are the last whole numbers of their names.
        load: function of yours for --files, as module:function; it takes a path and returns the model.
        model: nano (trained here where it is absent), a Pythia size (14m to 12b, perhaps with -deduped, -seedN,
            -data-seedN or -weight-seedN after it), a Hugging Face repository id, or a directory of checkpoints.
        steps: paper (Fig. 1b), all, log2, scores (those with benchmark results), or numbers such as 128,512. Default:
            paper for Pythia, all for others.
        revisions: a regular expression with a group named step (and perhaps tokens, in billions, and stage), where
            branches or directories are not spelled like step128 or checkpoint-128, or for the names of --files.
        stage: stage of a suite that was trained in several, such as OLMo 2. Default: the first.
        untrained: seed; measure also the model, if it is of transformers, at a random initialisation with this seed, as step 0,
            where none is published.
        allow_suspect: measure also revisions whose weights seem not to be those of their step; their points are marked.
        scores: a CSV file, an lm-evaluation-harness JSON file or a directory of either, with scores by step.
        module: class of Lightning checkpoints, as package.module:Class; MODEL is then a .ckpt file or a directory.
        tokenizer: tokenizer of the prompts, a directory or a repository, in place of each checkpoint's own. --files and
            Lightning checkpoints need one, or --inputs; the model's forward takes its output.
        blocks: the blocks, where an error asks for them or proposes them: the name of the list that holds them, or names or
            boundaries with commas between them; from Python also a list.
        inputs: .pt file with the inputs of the model's forward, instead of prompts; from Python also the inputs themselves.
        prompts: builtin; openllm (1,200 from the leaderboard's six benchmarks) or wikitext (100 paragraphs), fetched once;
            gsm8k (200 of them); easy2hard (200, rated by difficulty); or a file: text with one prompt a line, or JSONL with
            "prompt" and perhaps "difficulty" and "source".
        suffix: text appended to every prompt, such as " Let's think step by step.".
        max_tokens: cut longer prompts to this many tokens; without it a prompt beyond the context is refused.
        out: directory of the results; an existing one is completed, by one walk or several at once. Default:
            results/SUITE, such as results/pythia-12b.
        device: cpu, cuda, cuda:1 and so on. Default: CUDA where present.
        wandb: auto is online where a key is set up, else offline; off logs nothing.
        project: W&B project.
        dry_run: print what would be measured, fetched and kept, and the expected time and memory, and do none of it.
        on: of a dry run, a machine that need not be there: 2cores (of a CPU), a100, h100 or h200. Default: this machine.
        debug: print the traceback of each revision that fails.
        options: measurement options, as `tracker.measure` takes them.
    """

    model: str = ""
    steps: int | str | None = None
    revisions: str | None = None
    stage: str | None = None
    files: str | None = None
    load: str | Callable[[Path], Any] | None = None
    untrained: int | None = None
    allow_suspect: bool = False
    disk_budget: int | None = None
    scores: Path | None = None
    module: str | None = None
    tokenizer: str | None = None
    blocks: str | list[str] | None = None
    inputs: Path | Any | None = None
    prompts: str = "builtin"
    suffix: str = ""
    max_tokens: int | None = None
    out: Path | None = None
    device: str | None = None
    wandb: Literal["auto", "online", "offline", "off"] = "auto"
    project: str = PROJECT
    log: str = LOG
    dry_run: bool = False
    on: str | None = None
    debug: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.blocks, str) and "," in self.blocks:
            self.blocks = self.blocks.split(",")
        if not self.model and not self.files:
            raise ValueError("the following arguments are required: --model, or --files and --load")
        if self.files and (self.model or self.module or not self.load):
            raise ValueError(
                f"--files {self.files!r} takes --load module:function, and neither --model nor --module"
            )
        if self.load and not self.files:
            raise ValueError(
                f"--load loads what --files matches: give a pattern of files in place of --model {self.model}"
            )

    @property
    def own_code(self) -> str:
        """The name of the user's code that loads the checkpoints, or ""."""
        from checkpoints.load import name_of_loader

        return name_of_loader(self.load) if self.load else self.module or ""


def parse(arguments: Sequence[str] | None) -> Walk:
    """Read a command line."""
    from tracker.common.parser import LOG_HELP, Parser, summary
    from tracker.measures.options import add_flags, given_options

    parser = Parser(prog="python -m tracker.pythia", description=summary(Walk))
    parser.add_class_arguments(Walk, as_group=False, skip={"options", "disk_budget", "log"})
    parser.add_argument("--log", type=str, default=LOG, help=LOG_HELP)
    parser.add_argument("--disk_budget", type=BYTE_SIZE, help=DISK_BUDGET)
    add_flags(parser, LEFT_OUT)
    parser.add_argument("--config", action="config", help="a YAML file with any of these settings")
    parser.arrange(GROUPS)
    parser.usage = "%(prog)s (--model MODEL | --files PATTERN --load FUNCTION) [flags]"
    parsed = parser.parse_args(arguments).as_dict()
    walk = {one.name: parsed[one.name] for one in fields(Walk) if one.name != "options"}
    try:
        return Walk(**walk, options=given_options(parsed))
    except ValueError as error:
        parser.error(str(error))
