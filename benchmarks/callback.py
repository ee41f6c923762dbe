"""Time the callback in a training run: `python -m benchmarks.callback`.

A ViT of `vit` trains on images of noise in runs of `every` steps, with a CouplingCallback that measures after each run on a probe
of 16 images (and before it, which is not counted). The benchmark reports the median share of a run that measuring takes, and the
seconds of one measurement and of one step. The images are on the device from the start, so that loading them hides nothing.
"""

import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tracker.common.command_line import OK, reports_errors


@dataclass
class Run:
    """Time a training run with the callback.

    Args:
        width, depth, heads: sizes of the ViT; its images have 32 x 32 pixels, its patches 4 x 4.
        batch: number of images per step.
        every: number of optimizer steps per measurement.
        probe: number of measured images.
        repeats: number of runs, after one to warm up.
        device: cpu or cuda.
        precision: precision of the training, as in Lightning.
        compile: as in vit.train.
        out: JSON file for the result.
    """

    width: int = 64
    depth: int = 6
    heads: int = 2
    batch: int = 64
    every: int = 100
    probe: int = 16
    repeats: int = 5
    device: str = "cpu"
    precision: str = "32-true"
    compile: bool | None = None
    out: Path | None = None


def time_run(run: Run) -> dict:
    """Return the seconds of each run and measurement, and the share of measuring."""
    import lightning
    import torch

    from benchmarks.machine import environment, now, settings_of, synchronize
    from tracker import CouplingCallback
    from vit.module import Classifier
    from vit.recipe import Recipe

    class Clock(lightning.Callback):
        """Note when the steps begin; wait before a measurement for those that are queued, whose time is not its own."""

        def on_train_epoch_start(self, *_: object) -> None:
            self.started = now(run.device)

        def on_train_batch_end(self, trainer: lightning.Trainer, *_: object) -> None:
            if trainer.global_step == run.every:
                synchronize(run.device)

    lightning.seed_everything(0, verbose=False)
    images = torch.randn(run.batch, 3, 32, 32).to(run.device)
    labels = torch.randint(10, (run.batch,)).to(run.device)
    sizes = {name: getattr(run, name) for name in ("width", "depth", "heads", "compile")}
    stretches, measurements = [], []
    with tempfile.TemporaryDirectory() as directory:
        recipe = Recipe(**sizes, batch_size=run.batch, out=Path(directory))
        module = Classifier(recipe, 10, run.every)
        for repeat in range(run.repeats + 1):
            watch = CouplingCallback(run.every, probe=torch.randn(run.probe, 3, 32, 32))
            trainer = lightning.Trainer(
                max_steps=run.every,
                callbacks=[clock := Clock(), watch],
                accelerator=run.device,
                devices=1,
                precision=run.precision,  # type: ignore[arg-type]
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            loader = torch.utils.data.DataLoader([(images, labels)] * run.every, batch_size=None)  # type: ignore[arg-type]
            trainer.fit(module, loader)
            if repeat:  # the first run warms up
                stretches.append(now(run.device) - clock.started)
                measurements.append(watch.run.overhead.last)
    measurement = median(measurements)
    training = (median(stretches) - measurement) / run.every  # of a step
    return {
        "run": settings_of(run),
        "share": measurement / median(stretches),
        "share_every_1000_steps": measurement / (measurement + training * 1000),
        "milliseconds_of_a_step": 1000 * training,
        "images_per_second": run.batch / training,
        "seconds_of_a_measurement": measurement,
        "seconds_of_a_stretch": stretches,
        "environment": environment(run.device),
    }


@reports_errors()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    from tracker.common.parser import parsed

    run = parsed(Run, "benchmarks.callback", arguments)
    from benchmarks.machine import save
    from tracker.provenance import usable_device

    usable_device(run.device, f"--device {run.device}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = time_run(run)
    print(
        f"one measurement {result['seconds_of_a_measurement']:.2f} s, every {run.every} steps: "
        f"{result['share']:.1%} of the time"
    )
    save(result, run.out)
    return OK


if __name__ == "__main__":
    sys.exit(main())
