"""Walk a suite of training checkpoints: fetch, measure, store and show each, `python -m tracker.pythia --model 12b`.

One unit of result per revision in OUT/units, written whole or not at all; a second run does only what is missing.
Exit status: 0 all measured; 1 some revision failed, or writing did (what was finished is kept); 2 bad usage; 130
interrupted. Nothing heavy is imported before the arguments have been read.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from checkpoints import nano
from checkpoints.hub import CheckpointError
from checkpoints.integrity import describe_repeat, find_repeats
from checkpoints.suites import join_names
from tracker.walk.plan import Plan, Walk, make_plan
from tracker.walk.prefetch import prefetch
from tracker.walk.progress import progress
from tracker.walk.unit import changed, measure_checkpoint, with_scores

if TYPE_CHECKING:
    import xarray as xr

    from tracker.walk.measured import Measured

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
STOPS = (signal.SIGINT, signal.SIGTERM)
RESUME = "interrupted; finished revisions are kept, and the same command goes on with the rest"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    # What a cluster sends at the end of a job's time is answered like Ctrl-C. While libraries are being imported, an
    # exception could be swallowed by one of them: then the process just leaves, with nothing begun.
    before = {number: signal.signal(number, _leave) for number in STOPS}
    try:
        return _main(arguments)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(*_: object) -> None:
    os.write(2, f"\n{RESUME}\n".encode())
    os._exit(INTERRUPTED)


def _main(arguments: Sequence[str] | None) -> int:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog="python -m tracker.pythia", description=Walk.__doc__ and Walk.__doc__.split("Args:")[0]
    )
    parser.add_class_arguments(Walk, as_group=False)
    parser.add_argument("--config", action="config", help="a YAML file with any of these settings")
    parsed = parser.parse_args(arguments)
    walk = Walk(**{name: value for name, value in parsed.as_dict().items() if name != "config"})
    try:
        return run(walk)
    except BrokenPipeError:  # whoever read the output has gone; finished revisions are kept
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        print(f"\n{RESUME}", file=sys.stderr)
        return INTERRUPTED


def run(walk: Walk) -> int:
    """Walk the checkpoints; returns the exit status."""
    from tracker.errors import UsageError
    from tracker.loggers import opened, prepare
    from tracker.loggers.protocol import LoggedRun
    from tracker.report.write import write_page
    from tracker.walk.measured import Measured

    try:
        plan = make_plan(walk, lambda line: print(line, flush=True))
        openers = prepare(walk.loggers, walk.wandb)
    except (ValueError, CheckpointError, OSError) as error:
        return _usage_error(error)
    # Raised in the wrong place (a destructor, a callback from C), a KeyboardInterrupt is swallowed: it is remembered too.
    stopped: list[int] = []

    def stop(number: int, frame: object) -> None:
        stopped.append(number)
        raise KeyboardInterrupt

    for number in STOPS:
        signal.signal(number, stop)
    measured = Measured(plan.store, with_rows=bool(openers))
    for step in plan.store.steps():
        _read(measured, step)
    missing = [checkpoint for checkpoint in plan.checkpoints if checkpoint.step not in measured.summaries]
    print(
        f"{plan.suite.name}: {len(plan.checkpoints)} checkpoints, {len(plan.checkpoints) - len(missing)} already "
        f"measured; {len(plan.inputs)} prompts; {plan.device}, {walk.dtype}; results in {plan.store.path}",
        flush=True,
    )
    _say_what_is_doubted(plan)
    failed: dict[int, str] = {}
    try:
        if other := changed(plan, measured.summaries):
            raise UsageError(
                f"the weights of step {join_names(other)} of {plan.suite.source} are not those that {plan.store.path} holds "
                "results of: retrained, or published again? Choose another --out, or delete the units of these steps"
            )
        if not plan.checkpoints:
            raise UsageError("every checkpoint that was asked for is doubted; --allow_suspect measures and marks them")
        if walk.model == "nano" and missing and not nano.is_trained(walk.seed):
            nano.train(walk.seed)
        config = {"model": plan.suite.source, "prompts": walk.prompts, "dtype": walk.dtype, "device": str(plan.device)}
        logged = LoggedRun(plan.store, walk.project, plan.suite.name, config)
        with opened(openers, logged) as log, progress(len(missing)) as shown, _beside(walk, plan, len(missing)):
            for step in list(measured.summaries):
                _rescore(plan, measured, step)
                log(measured.row(step))

            def done_elsewhere(step: int) -> None:
                measured.read(step)
                log(measured.row(step))
                shown.advance(f"step {step}: measured by another walk")

            with closing(prefetch(plan, missing, shown, done_elsewhere)) as coming:
                for prefetched in coming:
                    if stopped:
                        raise KeyboardInterrupt
                    checkpoint = prefetched.checkpoint
                    started = time.perf_counter()
                    try:
                        unit = measure_checkpoint(plan, checkpoint, prefetched.directory())
                    # A revision that can't be fetched, loaded, or held in memory; the others may.
                    except (CheckpointError, FloatingPointError, OSError, RuntimeError) as error:
                        failed[checkpoint.step] = f"{type(error).__name__}: {error}"
                        shown.advance(f"step {checkpoint.step}: FAILED, {error}")
                        continue
                    summary = measured.write(checkpoint.step, unit)
                    del unit  # before the next is measured
                    if checkpoint is missing[0]:
                        budget = plan.measure["memory_budget"] / 1e9
                        shown.notify(f"weights are kept {summary.attrs['weights_kept']}; {budget:.3g} GB to work with")
                    log(measured.row(checkpoint.step))
                    shown.advance(
                        f"step {checkpoint.step}: {_headline(summary)}  ({time.perf_counter() - started:.1f} s)"
                    )
        _say_what_repeats(measured.summaries)
        if plan.store.steps():
            with plan.store.alone():
                plan.store.remove_abandoned()  # of steps that were done before their walk was killed
                page = write_page(measured.reader, [plan.store.path], plan.store.path / "report.html")
                print(f"page: {page}", flush=True)
    except UsageError as error:
        return _usage_error(error)
    except BrokenPipeError:
        raise
    except OSError as error:
        where = error.filename or plan.store.path
        print(
            f"error: can't write to {where} ({error.strerror or error}); finished revisions are kept: make room or give "
            "another --out, and run the same command again",
            file=sys.stderr,
        )
        return FAILED
    for step, reason in failed.items():
        print(f"failed: step {step}: {reason}", file=sys.stderr)
    return FAILED if failed else OK


def _say_what_is_doubted(plan: Plan) -> None:
    for notice in plan.notices:
        print(f"note: {notice}", flush=True)
    if plan.offline:
        print(f"note: {plan.offline}; what the cache holds is measured", flush=True)
    for what, doubted in (("left out", plan.excluded), ("measured, and marked as suspect", plan.suspect)):
        if doubted:
            print(f"{len(doubted)} of the revisions asked for are not what their names say; they are {what}:")
            for step, reason in doubted.items():
                print(f"  step {step:>7}  {reason}", flush=True)
    if plan.excluded:
        print("--allow_suspect measures them too", flush=True)


def _say_what_repeats(summaries: "Mapping[int, xr.Dataset]") -> None:
    fingerprints = {
        step: str(summary.coords["fingerprint"].item())
        for step, summary in summaries.items()
        if "fingerprint" in summary.coords
    }
    for step, earlier in find_repeats(fingerprints).items():
        print(f"note: {describe_repeat(step, earlier)}", flush=True)


def _rescore(plan: Plan, measured: "Measured", step: int) -> None:
    """Add the scores that this walk was given to a unit of an earlier one."""
    scored, summarised = plan.scores.get(step, {}), measured.summaries[step]
    if with_scores(summarised, scored).identical(summarised):
        return
    claim = plan.store.wait(step)  # a walk that was given other scores may be adding them
    try:
        measured.write(step, with_scores(plan.store.read(step), scored))
    finally:
        claim.release(remove=True)


def _read(measured: "Measured", step: int) -> None:
    """Read a unit of an earlier walk; if its file is damaged it is removed, with a notice."""
    try:
        measured.read(step)
        return
    except FileNotFoundError:  # another walk has removed it
        return
    except ValueError as error:
        print(f"{error}: it is measured again", file=sys.stderr)
    claim = measured.store.claim(step)
    if claim is None:  # another walk does so
        return
    try:
        measured.read(step)  # it has been measured again meanwhile
    except (FileNotFoundError, ValueError):
        measured.store.file(step).unlink(missing_ok=True)
    finally:
        claim.release(remove=True)


def _headline(summary: "xr.Dataset") -> str:
    said = []
    if "miscoupling" in summary:
        at = {"k": int(summary["k"][0]), "pairs": "mean_offdiag"}
        value, null = float(summary["miscoupling"].sel(at)), float(summary["miscoupling_null"].sel(at))
        said.append(f"miscoupling {value:.3f} (null {null:.3f}, K={at['k']})")
    if "lss" in summary:
        said.append(f"LSS {float(summary['lss'].sel(statistic='median')):.2f}")
    return "  ".join(said) or "measured"


@contextmanager
def _beside(walk: Walk, plan: Plan, missing: int) -> Iterator[None]:
    """The walk's workers, if it has any and there is work for them."""
    if not walk.workers or missing < 2:
        yield
        return
    from tracker import pythia  # this module by its name, which workers can import, also where it is __main__
    from tracker.errors import UsageError
    from tracker.walk.cluster import walkers

    with ExitStack() as stack:
        try:
            stack.enter_context(walkers(pythia.run, replace(walk, out=plan.store.path)))
        except ValueError as error:
            raise UsageError(str(error)) from error
        yield


def _usage_error(error: Exception) -> int:
    print(f"error: {error}", file=sys.stderr)
    return USAGE


if __name__ == "__main__":
    sys.exit(main())
