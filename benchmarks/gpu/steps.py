"""The steps, in the order of their importance: the first ones run if time is short."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One measurement in a process of its own.

    Args:
        name: the name in the JSON file and for `--steps`.
        text: what is measured.
        module: what `python -m` runs.
        full: its arguments.
        small: its arguments for `--small`.
        limit: seconds after which it is stopped.
        least: seconds without which it is not started.
        continues: whether it continues an earlier result.
    """

    name: str
    text: str
    module: str
    full: tuple[str, ...] = ()
    small: tuple[str, ...] = ("--small",)
    limit: int = 90
    least: int = 30
    continues: bool = False

    def arguments(self, device: str, small: bool, out: str) -> list[str]:
        """Return the command line after `python`."""
        return ["-m", self.module, *(self.small if small else self.full), "--device", device, "--out", out]


def _coupling(
    name: str, text: str, full: str, small: str = "--shape 14m --blocks 2 --tokens 8", limit: int = 90, least: int = 40
) -> Step:
    quick = f"{small} --k 5 --repeats 1 --memory false"
    if "--published false" in full:
        quick += " --published false"
    if "--precision" in full:
        quick += f" --precision {full.split('--precision ')[1].split()[0]}"
    return Step(name, text, "benchmarks.coupling", tuple(full.split()), tuple(quick.split()), limit, least)


_12B = "--shape 12b --weights float16 --k 10 --published false --memory_budget 40000000000"  # as in a walk on 80 GB
_DEIT = "--k 10 --prompts 64 --repeats 3 --published false"
_SMALL_12B = "--shape 14m --weights float16 --blocks 2 --tokens 8"
_SMALL_DEIT = "--shape deit-ti --blocks 1 --prompts 2"

STEPS = (
    Step("machine", "matrix products, copies and latencies", "benchmarks.gpu.hardware", limit=60, least=20),
    _coupling("12b-float32", "shape of Pythia 12b, one prompt", f"{_12B} --repeats 2", _SMALL_12B, 120, 45),
    Step("tests", "pytest -m gpu", "benchmarks.gpu.suite", limit=200, continues=True),
    _coupling(
        "12b-tf32", "the same in TF32", f"{_12B} --precision tf32 --repeats 2 --memory false", _SMALL_12B, 90, 40
    ),
    _coupling("deit-ti", "DeiT-Ti, 64 images of 65 tokens", f"--shape deit-ti {_DEIT}", _SMALL_DEIT, 60, 30),
    Step(
        "callback",
        "a training run of a ViT-Ti with the callback",
        "benchmarks.callback",
        tuple("--width 192 --depth 12 --heads 3 --batch 512 --every 200 --repeats 2 --precision bf16-mixed".split()),
        tuple("--width 16 --depth 2 --heads 2 --batch 4 --every 4 --repeats 1 --probe 2".split()),
        limit=100,
        least=60,
    ),
    _coupling(
        "12b-float32-8",
        "shape of Pythia 12b, eight prompts",
        f"{_12B} --prompts 8 --repeats 1 --memory false",
        f"{_SMALL_12B} --prompts 2",
        120,
        60,
    ),
    _coupling(
        "12b-tf32-8",
        "the same in TF32",
        f"{_12B} --precision tf32 --prompts 8 --repeats 1 --memory false",
        f"{_SMALL_12B} --prompts 2",
        90,
        45,
    ),
    _coupling(
        "410m",
        "shape of Pythia 410m, 4 blocks, and the published algorithm",
        "--shape 410m --blocks 4 --repeats 2",
        limit=90,
    ),
    Step("synchronizations", "where the host waits for the device", "benchmarks.gpu.synchronizations", limit=60),
    _coupling(
        "160m-tf32",
        "the error of TF32",
        "--shape 160m --blocks 2 --precision tf32 --repeats 2 --memory false",
        limit=60,
        least=25,
    ),
    _coupling(
        "160m-bfloat16",
        "the error of bfloat16",
        "--shape 160m --blocks 2 --precision bfloat16 --repeats 2 --memory false",
        limit=60,
        least=25,
    ),
    _coupling(
        "deit-ti-224",
        "DeiT-Ti, 64 images of 197 tokens",
        f"--shape deit-ti-224 {_DEIT}",
        "--shape deit-ti-224 --blocks 1 --prompts 2",
        60,
    ),
    _coupling(
        "12b-tf32-32",
        "shape of Pythia 12b, 32 prompts in TF32",
        f"{_12B} --precision tf32 --prompts 32 --repeats 1 --memory false",
        f"{_SMALL_12B} --prompts 3",
        180,
        90,
    ),
)
BY_NAME = {step.name: step for step in STEPS}
