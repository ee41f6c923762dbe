"""Measure on a GPU in steps: `python -m benchmarks.gpu`, or `make gpu`; docs/gpu.md says how.

Each step is a process of its own with a time limit, and the JSON file is written after each: an error, a crash or a hang ends one
step alone. Only the standard library is imported at first: this process outlives a GPU that hangs and packages that are missing.
"""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tracker.common.files import write_atomic

ROOT = Path(__file__).parents[1]
RESULT, SMALL_RESULT = Path("benchmarks/results/gpu.json"), Path("build/gpu-small.json")
LIMIT = 570.0  # seconds of all steps: a little less than ten minutes
IMPORTS = 150.0  # seconds for the check of packages and device
GRACE = 3.0  # seconds in which a step that is stopped writes its stack
TAIL = 4000  # bytes of a step's output, and characters of a test's error, that are kept
RUNS = 5  # of a product or a copy
NOT_MEASURED = "not measured"

_COUPLING = "benchmarks.coupling --k 10 --published false"
# As in a walk on 80 GB
_12B = f"{_COUPLING} --shape 12b --weights float16 --memory_budget 40000000000"
_160M = "benchmarks.coupling --shape 160m --blocks 2 --repeats 2"
_VIT = "benchmarks.callback --width 192 --depth 12 --heads 3 --batch 512 --every 200 --repeats 2 --precision bf16-mixed"
STEPS = {  # seconds after which it is stopped, and what `python -m` runs, the important ones first
    "machine": (45, "benchmarks.gpu --run machine"),
    "12b-float32": (120, f"{_12B} --repeats 2"),
    "tests": (240, "benchmarks.gpu --run tests"),
    "12b-tf32": (60, f"{_12B} --precision tf32 --repeats 2"),
    "deit-ti": (45, f"{_COUPLING} --shape deit-ti --prompts 64 --repeats 3"),
    "callback": (200, _VIT),
    "callback-uncompiled": (100, f"{_VIT} --compile false"),
    "12b-float32-8": (100, f"{_12B} --prompts 8 --repeats 1"),
    "12b-tf32-8": (70, f"{_12B} --precision tf32 --prompts 8 --repeats 1"),
    "410m": (60, "benchmarks.coupling --shape 410m --blocks 4 --repeats 2"),
    "410m-8": (60, "benchmarks.coupling --shape 410m --blocks 4 --prompts 8 --repeats 2"),
    "synchronizations": (45, "benchmarks.gpu --run synchronizations"),
    "160m-tf32": (45, f"{_160M} --precision tf32"),
    "160m-bfloat16": (45, f"{_160M} --precision bfloat16"),
    "deit-ti-224": (45, f"{_COUPLING} --shape deit-ti-224 --prompts 64 --repeats 3"),
    "12b-tf32-32": (130, f"{_12B} --precision tf32 --prompts 32 --repeats 1"),
}
SMALL = {  # options that make a step small
    "benchmarks.gpu": "--small",
    "benchmarks.coupling": "--shape 14m --blocks 2 --tokens 8 --prompts 2 --k 5 --repeats 1 --memory false",
    "benchmarks.callback": "--width 16 --depth 2 --heads 2 --batch 4 --every 4 --repeats 1 --probe 2 --precision 32-true",
}
CHECK = """
import sys
import lightning, pytest, timm, transformers, xdist, tracker.common.parser, tracker.store
from tracker.provenance import usable_device
usable_device(sys.argv[1], f"--device {sys.argv[1]}")
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0 if the steps are done, 1 if one is not, 2 for bad usage."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").partition("\n")[0]
    )
    names = f"of {', '.join(STEPS)}; default: those that are not in the JSON file yet"
    parser.add_argument("--steps", nargs="+", choices=STEPS, metavar="NAME", help=names)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 and so on, or cpu")
    parser.add_argument(
        "--small", action="store_true", help="small sizes, to test the steps themselves"
    )
    parser.add_argument(
        "--limit", type=float, default=LIMIT, help="seconds for all steps (default: %(default)s)"
    )
    parser.add_argument(
        "--wheels", type=Path, help="directory of wheels of packages that are not installed"
    )
    parser.add_argument(
        "--out", type=Path, help=f"JSON file (default: {RESULT}, in small {SMALL_RESULT})"
    )
    parser.add_argument(
        "--table", action="store_true", help="print the results in --out, and run nothing"
    )
    # A step, in its process
    parser.add_argument("--run", choices=MEASUREMENTS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run:
        return MEASUREMENTS[options.run](options.device, options.small, options.out)
    options.out = options.out or (SMALL_RESULT if options.small else RESULT)
    record = {"device": options.device, "small": options.small, "steps": {}}
    if options.out.exists():
        stored = json.loads(options.out.read_text())
        if not options.table and {**stored, "steps": {}} != record:
            parser.error(
                f"{options.out} holds other results than those of these options; give another --out"
            )
        record = stored
    if options.table:
        print(table(record["steps"]))
        return 0
    deadline = time.monotonic() + options.limit
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        if options.wheels:
            wheels = sorted(options.wheels.glob("*.whl"))
            if not wheels:
                parser.error(f"there are no wheels in --wheels {options.wheels}")
            pip = "-m pip install --quiet --no-index --no-deps --no-compile --disable-pip-version-check"
            target = ["--target", directory / "wheels"]
            subprocess.run([sys.executable, *pip.split(), *target, *wheels], check=True)
        outcome = run_limited(["-c", CHECK, options.device], IMPORTS, directory)
        if outcome["status"] != "ok":
            parser.error(f"{outcome['status']}: {_last_line(outcome)}")
        return _run(options, record, deadline, directory)


def _run(
    options: argparse.Namespace, record: dict[str, Any], deadline: float, directory: Path
) -> int:
    """Run each step for which there is time, and write its outcome."""
    # "" without git
    git = subprocess.run("git rev-parse HEAD", shell=True, cwd=ROOT, capture_output=True, text=True)
    done = True
    for name in options.steps or [name for name in STEPS if name not in record["steps"]]:
        limit, command = STEPS[name]
        if deadline - time.monotonic() < limit:
            print(f"{name}: not run, {limit} s are not left")
            done = False
            continue
        result = directory / f"{name}.json"
        words = command.split()
        words += SMALL[words[0]].split() if options.small else []
        words += ["--device", options.device, "--out", str(result)]
        print(f"{name} ... ", end="", flush=True)
        outcome = run_limited(["-m", *words], limit, directory)
        print(f"{outcome['status']}, {outcome['seconds']:.0f} s", flush=True)
        if outcome["status"] != "ok":
            print(f"    {_last_line(outcome)}")
            done = False
        else:
            del outcome["output"]
        if result.exists():
            outcome["result"] = json.loads(result.read_text())
        record["steps"][name] = {"commit": git.stdout.strip(), "command": command, **outcome}
        write_atomic(options.out, (json.dumps(record, indent=1) + "\n").encode())
    print(f"\n{table(record['steps'])}\n\n{options.out}")
    return 0 if done else 1


def run_limited(arguments: Sequence[str], limit: float, directory: Path) -> dict[str, Any]:
    """Run `python ARGUMENTS` for `limit` seconds at most; return its status, its seconds and the end of its output.

    Packages in `directory`/wheels are found. A process that is stopped writes its Python stack; its children end with it.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    paths = [str(ROOT), str(directory / "wheels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONFAULTHANDLER": "1",
        "HF_HUB_OFFLINE": "1",
    }
    log, started = directory / "output", time.perf_counter()
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**os.environ, **variables, "WANDB_MODE": "offline"},
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        try:
            code = process.wait(limit)
            status = signal.Signals(-code).name if code < 0 else "failed" if code else "ok"
        except subprocess.TimeoutExpired:
            status = "timed out"
            process.send_signal(signal.SIGABRT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # A process that waits in the GPU's driver may not end at once
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
    seconds = round(time.perf_counter() - started, 2)
    text = log.read_bytes()[-TAIL:].decode(errors="replace")
    return {"status": status, "seconds": seconds, "output": text.replace(f"{ROOT}/", "")}


def _last_line(outcome: dict[str, Any]) -> str:
    lines = outcome["output"].strip().splitlines()
    # Of a crash
    return next((line for line in reversed(lines) if not line.startswith("Extension modules")), "")


def machine(device: str, small: bool, out: Path) -> int:
    """Measure matrix products by precision, in TFLOP/s, and copies to the device, in GB/s."""
    import torch

    from benchmarks.machine import environment, save, seconds
    from tracker.linalg.precision import float32_products

    result: dict[str, Any] = {"environment": environment(device), "products": {}, "copies": {}}
    n = 128 if small else 8192
    for precision in ("float32", "tf32", "bfloat16", "float64"):
        dtype = getattr(torch, "float32" if precision == "tf32" else precision)
        A = torch.randn(n, n, device=device, dtype=dtype)
        with float32_products("tf32" if precision == "tf32" else "ieee"):
            taken = seconds(partial(torch.matmul, A, A), device, RUNS)
        result["products"][precision] = 2e-12 * n**3 / taken
    save(result, out)
    host = torch.zeros(1 << (20 if small else 28), dtype=torch.uint8)
    target = torch.empty_like(host, device=device)
    memory = {"pageable": host, "pinned": host if device == "cpu" else host.pin_memory()}
    for name, source in memory.items():
        taken = seconds(partial(target.copy_, source, non_blocking=True), device, RUNS)
        result["copies"][name] = 1e-9 * len(host) / taken
    save(result, out)
    return 0


def tests(device: str, small: bool, out: Path) -> int:
    """Run the tests of a GPU; write the outcome of each as it ends, with the errors that it states."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # PyTorch's deterministic mode asks for it
    # Of each worker: six workers with 16 threads each took 275 s
    os.environ["OMP_NUM_THREADS"] = "1"
    import pytest

    from benchmarks.machine import save

    counts = {"passed": 0, "failed": 0, "skipped": 0}
    result: dict[str, Any] = {"counts": counts, "tests": {}}

    class Outcomes:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when == "call" or report.outcome != "passed":
                counts[report.outcome] += 1
                errors = dict(report.user_properties)
                message = {"message": report.longreprtext[-TAIL:]} if report.failed else {}
                result["tests"][report.nodeid] = {"outcome": report.outcome, **errors, **message}
                save(result, out)

    chosen = ["-k", "values_vectors_and_certificate"] if small else []
    marked = "not gpu" if device == "cpu" else "gpu"
    workers = "0" if device == "cpu" else "12"  # small models leave most of a GPU idle
    options = f"-p no:cacheprovider --tb=short --durations=10 --numprocesses {workers}".split()
    return pytest.main(["tests/gpu", "-m", marked, *options, *chosen], [Outcomes()])


def synchronizations(device: str, small: bool, out: Path) -> int:
    """Count where the host waits for the device in a measurement of a DeiT-Ti, by line of Python."""
    from benchmarks import shapes
    from benchmarks.machine import environment, save
    from tracker import measure

    model = shapes.model("deit-ti", 1 if small else 12, device)
    run = partial(
        measure,
        model,
        shapes.inputs("deit-ti", 65, 2 if small else 64),
        k=10,
        blocks=shapes.blocks(model),
        tokens=[0],
        final_norm="exclude",
        measures="coupling",
        device=device,
    )
    run()  # to warm up
    lines = waits(run, device)
    counts = {"waits": lines.total(), "lines": dict(lines.most_common())}
    save({"environment": environment(device), **counts}, out)
    return 0


def waits(run: Callable[[], Any], device: str) -> Counter[str]:
    """Return how often each line waits for the device while `run` runs: PyTorch warns of it on CUDA."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if device != "cpu":
            torch.cuda.set_sync_debug_mode("warn")
        run()
        if device != "cpu":
            torch.cuda.set_sync_debug_mode("default")
    return Counter(
        f"{warning.filename.removeprefix(f'{ROOT}/')}:{warning.lineno}"
        for warning in caught
        if "synchronizing CUDA operation" in str(warning.message)
    )


MEASUREMENTS = {"machine": machine, "tests": tests, "synchronizations": synchronizations}

_ERRORS = (
    "J {published[errors][jacobian]:.1e}, singular values {published[errors][singular_value]:.1e}, "
    "`miscoupling` {published[errors][miscoupling]:.1e}"
)
_OF_RATE = "{ours[fraction_of_gemm_rate][jacobian]:.0%}"
_STEP = "{milliseconds_of_a_step:.1f} ms, {images_per_second:,.0f} images/s"
_SECONDS, _EACH = "{ours[seconds]:.2f} s", "{ours[seconds_per_prompt]:.2f} s each"
ROWS = (  # what is measured, the target, the step, and the format of its result
    (
        "matrix products",
        "",
        "machine",
        "TFLOP/s: float32 {products[float32]:.3g}, tf32 {products[tf32]:.3g}, "
        "bfloat16 {products[bfloat16]:.3g}, float64 {products[float64]:.3g}",
    ),
    (
        "copies to the device",
        "",
        "machine",
        "GB/s: pageable {copies[pageable]:.1f}, pinned {copies[pinned]:.1f}",
    ),
    (
        "tests",
        "all pass",
        "tests",
        "{counts[passed]} passed, {counts[failed]} failed, {counts[skipped]} skipped",
    ),
    (
        "12b's shape, float16 weights, K = 10, one prompt of 128 tokens, float32",
        "6 s",
        "12b-float32",
        _SECONDS,
    ),
    ("share of the matrix-product rate in its Jacobians", "", "12b-float32", _OF_RATE),
    ("the same in TF32", "2 s", "12b-tf32", _SECONDS),
    ("share of TF32's matrix-product rate in its Jacobians", "", "12b-tf32", _OF_RATE),
    ("eight prompts, float32", "", "12b-float32-8", _EACH),
    ("eight prompts, TF32", "", "12b-tf32-8", _EACH),
    ("32 prompts, TF32", "less than one alone", "12b-tf32-32", _EACH),
    ("DeiT-Ti, 64 images of 65 tokens", "1 s", "deit-ti", _SECONDS),
    ("DeiT-Ti, 64 images of 197 tokens", "", "deit-ti-224", _SECONDS),
    ("host waits of a measurement of a DeiT-Ti, 64 images", "", "synchronizations", "{waits:,}"),
    (
        "the callback's share of a ViT-Ti run, every 1,000 steps",
        "2 %",
        "callback",
        "{share_every_1000_steps:.1%}",
    ),
    ("a step of that run, 512 images, no augmentation", "", "callback", _STEP),
    ("the same without torch.compile", "", "callback-uncompiled", _STEP),
    (
        "published algorithm against this package, 410m's shape, 128 tokens, K = 50",
        "",
        "410m",
        "{published[ratio][whole]:.1f} times",
    ),
    ("the same, eight prompts, for each", "", "410m-8", "{published[ratio][whole]:.1f} times"),
    ("error of TF32 in 160m's shape", "", "160m-tf32", _ERRORS),
    ("error of bfloat16 in 160m's shape", "", "160m-bfloat16", _ERRORS),
)


def table(steps: dict[str, Any]) -> str:
    """Return the rows of the document in Markdown; what has not run, or was stopped before, is "not measured"."""
    lines = ["| what | measured | target | step |", "|---|---|---|---|"]
    for text, target, name, form in ROWS:
        measured = NOT_MEASURED
        with suppress(KeyError):
            measured = form.format(**steps[name]["result"])
        lines.append(f"| {text} | {measured} | {target} | `{name}` |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
