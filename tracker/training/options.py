"""The options of a training run that is measured: each one's name, type, default and documentation, declared once.

`CouplingCallback`, `TransformersCallback` and `Watch` take them as keywords, with those of a measurement. Their signatures and
documentation list every option.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Annotated, Any, Literal, get_args

import xarray as xr

from tracker.loggers.protocol import Log
from tracker.measures.options import KEYWORDS, Keyword, accepts_options
from tracker.measures.settings import Options
from tracker.model.description import Blocks, Named
from tracker.training.probe import Forward
from tracker.training.schedule import Schedule


class RunOptions(Options, total=False):
    """The keywords that all three take, each with its default and documentation."""

    steps: Annotated[Iterable[int] | None, None, "measure at these steps."]
    schedule: Annotated[
        Literal["log2", "pythia"] | Schedule | None,
        None,
        '"log2", "pythia" (the steps of its published checkpoints), or a function step -> bool.',
    ]
    ends: Annotated[
        bool,
        True,
        "measure also before the first step and after the last; a Watch, which knows no last step: at its first call.",
    ]
    tokenizer: Annotated[
        Any,
        None,
        "the tokenizer of a probe of prompts. None: the `processing_class` of transformers' Trainer, if it has one.",
    ]
    forward: Annotated[
        Forward | None, None, "runs a batch, forward(module, batch), for modules whose own forward does not take it."
    ]
    blocks: Annotated[
        Named | Blocks | None, None, "as in `tracker.measure`, with names as in the module that is trained."
    ]
    save_dir: Annotated[
        str | None, None, "directory of the store, for one run: a new run is refused, a resumed one continues."
    ]
    log: Annotated[
        Log,
        "headline",
        'which metrics loggers receive: "headline", the numbers that docs/training.md lists; "workspace", also those that the '
        'saved workspace of W&B draws; "all" curve points; or a list of metrics, with * for any characters.',
    ]
    on_measure: Annotated[
        Callable[[xr.Dataset], None] | None,
        None,
        "called on rank 0 with every unit, a Dataset as from `tracker.measure` with its `step`. If it raises, a warning says so, "
        "and the training continues.",
    ]
    max_overhead: Annotated[
        float | None,
        0.05,
        "the share of the run's time above which a warning states, once, that measuring takes too long. None: never.",
    ]
    thin: Annotated[
        bool,
        False,
        "instead of the warning, skip scheduled steps (never the ends) that would raise the share above `max_overhead`.",
    ]
    name: Annotated[str, "", "prefix of all metrics, to distinguish several of these in one run."]


class TrainerOptions(RunOptions, total=False):
    """The keywords that the callbacks of trainers take: a trainer knows epochs and has data."""

    every_n_epochs: Annotated[int | None, None, "measure at the end of every n-th epoch."]
    max_samples: Annotated[
        int, 8, "how many samples to measure of a batch taken from the run; a given probe is measured whole."
    ]


def _declared(options: Any) -> dict[str, Keyword]:
    return {name: Keyword(*get_args(of)) for name, of in options.__annotations__.items() if name not in KEYWORDS}


OF_TRAINERS = _declared(TrainerOptions)
accepts_run_options = partial(accepts_options, keywords=_declared(RunOptions) | KEYWORDS)
accepts_trainer_options = partial(accepts_options, keywords=OF_TRAINERS | KEYWORDS)


def split(keywords: Mapping[str, Any], accepted: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of a run, by their defaults where they are not given, and the remaining ones that were given.

    Args:
        accepted: the names that the caller takes; another name remains.
    """
    options = {
        name: keywords[name] if name in keywords and name in accepted else keyword.default
        for name, keyword in OF_TRAINERS.items()
    }
    return options, {name: value for name, value in keywords.items() if name not in options or name not in accepted}
