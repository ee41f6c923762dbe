"""Tables of the steps' results: for a terminal, and for the documents."""

from collections.abc import Callable
from typing import Any

Result = dict[str, Any]
NOT_MEASURED = "not measured"


def table(content: Result) -> str:
    """Format all steps for a terminal: status, seconds and the main numbers or the last line of the output."""
    lines = []
    for name, outcome in content["steps"].items():
        seconds = f"{outcome['seconds']:7.1f} s" if "seconds" in outcome else f"{'-':>7}  "
        line = f"{name:18}{outcome['status']:18}{seconds}  "
        lines.append((line + headline(outcome)).rstrip())
        for test, found in outcome.get("result", {}).get("tests", {}).items():
            if found["outcome"] not in ("passed", "skipped"):
                message = found.get("message", "").partition("\n")[0]
                lines.append(f"    {found['outcome']}: {test}: {message}")
    return "\n".join(lines)


def headline(outcome: Result) -> str:
    """Return a step's main numbers; where it has none, the last line of its output."""
    result = outcome.get("result")
    output = [
        line for line in outcome.get("output", "").strip().splitlines() if not line.startswith("Extension modules")
    ]
    if not result:
        return output[-1] if output else ""
    kinds: dict[str, Callable[[Result], str]] = {
        "products": _machine,
        "ours": _coupling,
        "counts": _tests,
        "share": lambda r: (
            f"{r['seconds_of_a_measurement']:.2f} s a measurement; {share_of_steps(r):.1%} every 1,000 steps"
        ),
    }
    for key, form in kinds.items():
        if key in result:
            return form(result)
    counts = {name: case for name, case in result.items() if "synchronizations" in case}
    return ", ".join(f"{name}: {case['synchronizations']}" for name, case in counts.items())


def _machine(result: Result) -> str:
    rates = {name: max(by_size.values()) for name, by_size in result["products"].items()}
    return "TFLOP/s: " + ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in rates.items())


def _coupling(result: Result) -> str:
    ours = result["ours"]
    stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in ours["stages"].items())
    ratio = f"; published {result['ratio']['whole']:.0f} times" if "ratio" in result else ""
    return f"{ours['seconds']:.2f} s ({stages}){ratio}"


def share_of_steps(result: Result, steps: int = 1000) -> float:
    """Return the share of the time that measuring takes if it is done once in so many optimizer steps."""
    every = result["run"]["every"]
    runs = sorted(result["seconds_of_a_stretch"]["without"])
    measurement = result["seconds_of_a_measurement"]
    return measurement / (measurement + runs[len(runs) // 2] * steps / every)


def markdown(content: Result) -> str:
    """Return the rows of the documents; what has not run is "not measured"."""
    steps = content.get("steps", {})
    results = {name: outcome["result"] for name, outcome in steps.items() if outcome.get("result")}
    lines = ["| what | measured | target | step |", "|---|---|---|---|"]
    for text, target, name, form in ROWS:
        result = results.get(name)
        measured = form(result) if result is not None else NOT_MEASURED
        lines.append(f"| {text} | {measured} | {target} | `{name}` |")
    return "\n".join(lines)


def _seconds(result: Result) -> str:
    ours = result.get("ours")
    return f"{ours['seconds']:.2f} s" if ours else NOT_MEASURED


def _each(result: Result) -> str:
    ours = result.get("ours")
    return f"{ours['seconds_per_prompt']:.2f} s each" if ours else NOT_MEASURED


def _of_rate(result: Result) -> str:
    ours = result.get("ours")
    return f"{ours['fraction_of_gemm_rate']['jacobian']:.0%}" if ours else NOT_MEASURED


def _published(result: Result) -> str:
    return f"{result['ratio']['whole']:.0f} times" if "ratio" in result else NOT_MEASURED


def _errors(result: Result) -> str:
    errors = result.get("errors", {})
    names = {"jacobian": "J", "singular_value": "singular values", "miscoupling": "`miscoupling`"}
    return ", ".join(f"{text} {errors[name]:.1e}" for name, text in names.items() if name in errors) or NOT_MEASURED


def _tests(result: Result) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in result["counts"].items())


def _copies(result: Result) -> str:
    copies = result.get("copies", {})
    names = ("pageable to device", "pinned to device")
    return ", ".join(f"{name} {copies[name] / 1e9:.1f} GB/s" for name in names if name in copies) or NOT_MEASURED


def _synchronizations(result: Result) -> str:
    found = result.get("deit-ti, 64 images")
    return f"{found['synchronizations']:,}" if found else NOT_MEASURED


ROWS: tuple[tuple[str, str, str, Callable[[Result], str]], ...] = (
    ("matrix products", "", "machine", _machine),
    ("copies", "", "machine", _copies),
    ("tests", "all pass", "tests", _tests),
    ("12b's shape, float16 weights, K = 10, one prompt of 128 tokens, float32", "6 s", "12b-float32", _seconds),
    ("share of the matrix-product rate in its Jacobians", "", "12b-float32", _of_rate),
    ("the same in TF32", "2 s", "12b-tf32", _seconds),
    ("share of TF32's matrix-product rate in its Jacobians", "", "12b-tf32", _of_rate),
    ("eight prompts, float32", "", "12b-float32-8", _each),
    ("eight prompts, TF32", "", "12b-tf32-8", _each),
    ("32 prompts, TF32", "less than one alone", "12b-tf32-32", _each),
    ("DeiT-Ti, 64 images of 65 tokens", "1 s", "deit-ti", _seconds),
    ("DeiT-Ti, 64 images of 197 tokens", "", "deit-ti-224", _seconds),
    ("host waits of a measurement of a DeiT-Ti, 64 images", "", "synchronizations", _synchronizations),
    (
        "the callback's share of a ViT-Ti run, every 1,000 steps",
        "2 %",
        "callback",
        lambda r: f"{share_of_steps(r):.1%}",
    ),
    ("published algorithm against this package, 410m's shape, 128 tokens, K = 50", "", "410m", _published),
    ("error of TF32 in 160m's shape", "", "160m-tf32", _errors),
    ("error of bfloat16 in 160m's shape", "", "160m-bfloat16", _errors),
)
