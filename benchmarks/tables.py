"""Tables of the results of `benchmarks.coupling` for a terminal."""

from typing import Any


def coupling(result: dict[str, Any]) -> str:
    """Format the result of `--what coupling`."""
    mine, theirs = result["ours"], result.get("published", {"stages": {}})
    given = result["settings"]
    lines = [
        f"{given['shape']}: d = {result['width']}, {result['blocks']} blocks, n = {result['tokens']}, K = {given['k']}, "
        f"{given['prompts']} prompt(s), {given['device']}, {result['environment']['threads']} threads",
        f"{'stage':10}{'ours, s':>10}{'published, s':>14}{'ratio':>8}{'of GEMM rate':>14}",
    ]
    for stage in ("whole", *mine["stages"]):
        own = mine["seconds"] if stage == "whole" else mine["stages"][stage]
        other = theirs.get("seconds") if stage == "whole" else theirs["stages"].get(stage)
        ratio, fraction = result.get("ratio", {}).get(stage), mine["fraction_of_gemm_rate"].get(stage)
        lines.append(f"{stage:10}{own:10.3f}{_cell(other, '14.3f')}{_cell(ratio, '8.1f')}{_cell(fraction, '14.1%')}")
    if "peak_bytes" in mine:
        own, other = mine["peak_bytes"] / 1e6, theirs.get("peak_bytes", float("nan")) / 1e6
        lines.append(f"{'peak, MB':10}{own:10.1f}{_cell(other, '14.1f')}{_cell(other / own, '8.1f')}")
    certificate = result["certificate"]
    lines.append(
        f"GEMM {result['gemm']['flops_per_second'] / 1e9:.0f} GFLOP/s; SVD stage {mine['svd_over_jacobian']:.0%} of the "
        f"Jacobian stage; residual {certificate['residual']:.1e}, complete {certificate['complete']}, "
        f"full SVD {certificate['full_svd']:.0%}"
    )
    if mine["products_saved"]:
        lines.append(
            f"Jacobian stage {mine['speedup_over_gemm']:.2f} times as fast as all products of d cotangents; "
            f"{mine['products_saved']:.0%} of their operations are skipped"
        )
    if "errors" in result:
        lines.append("ours - published: " + ", ".join(f"{k} {v:.1e}" for k, v in result["errors"].items()))
    if "beside" in result:
        beside = result["beside"]
        lines.append(
            f"{given['svd']} takes {beside['ratio']:.2f} of the time of {given['beside']} ({beside['seconds']:.3f} s)"
        )
        lines.append("differences: " + ", ".join(f"{k} {v:.1e}" for k, v in beside["differences"].items()))
    if given["prompts"] > 1:
        lines.append("published: one prompt; ratios are per prompt")
    return "\n".join(lines)


def scaling(result: dict[str, Any]) -> str:
    """Format the result of `--what scaling`."""
    stages = list(result["points"][0]["stages"])
    lines = [f"{'n':>6}{'prompts':>9}{'whole, s':>10}" + "".join(f"{stage:>10}" for stage in stages)]
    for point in result["points"]:
        cells = "".join(f"{point['stages'][stage]:10.3f}" for stage in stages)
        lines.append(f"{point['tokens']:6}{point['prompts']:9}{point['seconds']:10.3f}{cells}")
    return "\n".join(lines)


def _cell(value: float | None, form: str) -> str:
    missing = value is None or value != value
    return f"{'-':>{form.split('.')[0]}}" if missing else f"{value:{form}}"
