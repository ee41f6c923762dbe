"""The options of a training run that is measured: each one's name, type, default and documentation, declared once.

`CouplingCallback`, `TransformersCallback` and `Watch` take them as keywords, with those of a measurement. Their signatures and
documentation list every option.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Annotated, Any

import xarray as xr

from tracker.loggers.protocol import Log
from tracker.measures.options import accepts_options
from tracker.measures.settings import OPTIONS, Options, declared
from tracker.model.description import Blocks, Named
from tracker.training.probe import Forward


class RunOptions(Options, total=False):
    """The keywords that all three take, each with its default and documentation."""

    steps: Annotated[
        Iterable[int] | None,
        None,
        "measure at these steps. As with any schedule, also before the first step and after the last; a Watch, which knows no "
        "last step: at its first call.",
    ]
    tokenizer: Annotated[
        Any,
        None,
        "the tokenizer of a probe of prompts. None: the `processing_class` of transformers' Trainer, if it has one.",
    ]
    forward: Annotated[
        Forward | None,
        None,
        "runs a batch, forward(module, batch), for modules whose own forward does not take it.",
    ]
    blocks: Annotated[
        Named | Blocks | None,
        None,
        "as in `tracker.measure`, with names as in the module that is trained.",
    ]
    save_dir: Annotated[
        str | None,
        None,
        "directory of the store, for one run: a new run is refused, a resumed one continues.",
    ]
    log: Annotated[
        Log,
        "headline",
        'which metrics loggers receive: "headline", the numbers that docs/training.md lists; "main", also every '
        'K with its null level, and quartiles; "all" curve points; or a list of metrics, with * for any characters.',
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
    name: Annotated[str, "", "prefix of all metrics, to distinguish several of these in one run."]


OF_RUN = {name: option for name, option in declared(RunOptions).items() if name not in OPTIONS}
accepts_run_options = partial(accepts_options, options=OF_RUN | OPTIONS)


def split(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of a run, by their defaults where they are not given, and the remaining ones that were given."""
    options = {name: given.get(name, option.default) for name, option in OF_RUN.items()}
    return options, {name: value for name, value in given.items() if name not in options}
