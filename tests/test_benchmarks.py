"""The benchmarks' commands on the smallest shape: their output, and the agreement of both algorithms."""

import json
import multiprocessing
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import callback, coupling, machine, shapes, stores, timing
from tests.support.rounding import of_vectors, rounding
from tests.support.stores import generated
from tracker.measures.registry import MISCOUPLINGS

QUICK = "--shape 14m --tokens 6 --blocks 2 --k 5 --repeats 1 --memory false".split()


def run(directory, *arguments: str) -> dict:
    file = directory / "new" / f"{len(list(directory.rglob('*.json')))}.json"
    assert coupling.main([*QUICK, *arguments, "--out", str(file)]) == 0
    return json.loads(file.read_text())


@pytest.fixture(scope="module", autouse=True)
def imported_once():
    """Fork the processes in which memory is measured from one that has imported what they need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["checkpoints.load", "tracker.measurement", "benchmarks.shapes", "transformers"]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda method: context)
        yield


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def compared(directory) -> dict:
    return run(directory, "--by_hand", "true")


def test_ours_and_the_published_algorithm_agree(compared):
    single = rounding(torch.float32)
    of_couplings = of_vectors(
        torch.float32, compared["width"], compared["certificate"]["smallest_gap"]
    )
    for name in ("published", "by_hand"):
        errors = compared[name]["errors"]
        assert max(errors["jacobian"], errors["singular_value"]) < single
        assert max(errors[name] for name in MISCOUPLINGS if name in errors) < of_couplings
        assert {"miscoupling", "offdiag_normalized"} <= set(errors)
    assert compared["certificate"]["complete"] and compared["certificate"]["sliced"] == 1
    for name in ("published", "by_hand"):
        seconds = compared[name]["seconds"]
        assert compared[name]["ratio"]["whole"] == seconds / compared["ours"]["seconds"]


def test_the_result_records_settings_and_environment(compared):
    assert (compared["width"], compared["blocks"], compared["tokens"]) == (128, 2, 6)
    assert compared["settings"]["k"] == 5
    assert compared["environment"]["torch"]
    assert compared["gemm"]["layers"] == [[384, 128], [128, 128], [512, 128], [128, 512]]
    assert compared["ours"]["products_saved"] == pytest.approx(5 / 12)
    stages = {
        "ours": "forward jacobian checks svd pairs",
        "published": "forward jacobian svd pairs",
    }
    for algorithm, names in stages.items():
        of = compared[algorithm]
        assert [*of["stages"]] == names.split() and 0 < sum(of["stages"].values()) <= of["seconds"]
    printed = coupling.table(compared)
    seconds = [compared[one]["seconds"] for one in ("ours", "published", "by_hand")]
    ratio = compared["published"]["ratio"]["whole"]
    for row in (["seconds", *seconds], ["ratio.whole", np.nan, ratio]):
        cells = " +".join(f"{cell:.4g}" if cell == cell else "NaN" for cell in row[1:])
        assert re.search(f"^{row[0]} +{cells}", printed, re.MULTILINE), row


@pytest.mark.slow
def test_images_agree_and_cost_is_per_image(directory):
    result = run(directory, "--shape", "deit-ti", "--blocks", "1", "--prompts", "2")
    assert (result["width"], result["blocks"], result["tokens"]) == (192, 1, 65)
    assert result["published"]["errors"]["jacobian"] < rounding(torch.float32)
    assert result["ours"]["products_saved"] == pytest.approx(1 / 3)
    assert result["ours"]["seconds_per_prompt"] == result["ours"]["seconds"] / 2
    published, per_prompt = result["published"], result["ours"]["seconds_per_prompt"]
    assert published["ratio"]["whole"] == published["seconds"] / per_prompt


@pytest.mark.parametrize(
    "precision, dtype, switch",
    [
        ("float32", torch.float32, "ieee"),
        ("tf32", torch.float32, "tf32"),
        ("bfloat16", torch.bfloat16, "ieee"),
    ],
)
def test_plain_products_have_the_precision_they_are_compared_in(
    monkeypatch, precision, dtype, switch
):
    seen, linear = set(), torch.nn.functional.linear

    def noted(x, weight):
        allowed = torch.backends.cuda.matmul.fp32_precision
        seen.add((x.dtype, weight.dtype, "tf32" if allowed == "tf32" else "ieee"))
        return linear(x, weight)

    monkeypatch.setattr("torch.nn.functional.linear", noted)
    assert machine.gemm_seconds([(8, 4)], 4, "cpu", precision) > 0
    assert seen == {(dtype, dtype, switch)}


def test_weights_in_float16_are_measured(directory, capsys):
    result = run(directory, "--weights", "float16", "--published", "false")
    assert result["settings"]["weights"] == "float16" and result["certificate"]["complete"]
    assert "published" not in result and "published" not in coupling.table(result)
    model = shapes.model("14m", 1, "cpu", weights="float16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
    assert torch.get_default_dtype() == torch.float32
    assert coupling.main([*QUICK, "--weights", "float16"]) == 2
    assert "add --published false" in capsys.readouterr().err


def test_an_interrupted_benchmark_leaves_the_repeats_so_far(tmp_path, monkeypatch):
    calls, timed = [], timing.timed

    def twice(*arguments):
        calls.append(arguments)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return timed(*arguments)

    monkeypatch.setattr(timing, "timed", twice)
    file = tmp_path / "result.json"
    assert (
        coupling.main([*QUICK, "--published", "false", "--repeats", "3", "--out", str(file)]) == 130
    )
    result = json.loads(file.read_text())
    assert len(result["ours"]["runs"]) == 2 and result["ours"]["seconds"] > 0


@pytest.mark.slow  # two fresh processes that import everything
def test_memory_is_measured_in_fresh_processes(directory):
    result = run(directory, "--shape", "70m", "--tokens", "64", "--blocks", "1", "--memory", "true")
    ours, published = (result[algorithm]["peak_bytes"] for algorithm in ("ours", "published"))
    assert published > 32 * 64 * 4 * 512 * 4  # one chunk of cotangents of the widest layer
    assert ours > 512 * 512 * 4  # one Jacobian


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--k", "129"], "k=129.*width d = 128"),
        (["--tokens", "0"], "--tokens 0; give at least 1"),
        (["--device", "cuda:99"], "--device cuda:99 can't be used"),
    ],
)
def test_bad_settings_are_one_message(arguments, message, capsys):
    assert coupling.main([*QUICK, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and re.search(message, error)


def test_the_clock_waits_for_the_device(pretend):
    clock = machine.Clock(pretend.device)
    torch.ones(1, device=pretend.device)  # a device that was never used has no work to wait for
    with pretend.count() as counts:
        machine.now(pretend.device)
    assert counts.syncs == 1
    with pretend.count() as counts, clock("stage"):
        pass
    assert counts.syncs == 2
    machine.synchronize("cpu")


def test_environment_without_the_files_of_linux(monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert "cpu" in machine.environment("cpu")


def test_callback_is_timed_from_an_idle_device_to_an_idle_device(tmp_path, monkeypatch, capsys):
    waits = []
    monkeypatch.setattr(machine, "synchronize", waits.append)
    small = "--width 16 --depth 2 --batch 4 --every 4 --probe 2".split()
    out = tmp_path / "new" / "callback.json"
    assert callback.main([*small, "--repeats", "1", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    # Of the run that warms up and the timed one: the start, the measurement, the end of the timed run.
    assert waits == ["cpu"] * (2 * (1 + 1) + 1)
    (seconds,) = result["seconds_of_a_stretch"]
    assert 0 < result["seconds_of_a_measurement"] < seconds and 0 < result["share"] < 1
    # Runs of 1,000 steps would be 250 times as long, apart from the measurement.
    measuring = result["seconds_of_a_measurement"]
    share = measuring / (measuring + 250 * (seconds - measuring))
    assert result["share_every_1000_steps"] == pytest.approx(share)
    assert "one measurement" in capsys.readouterr().out
    assert callback.main(["--device", "cuda:99"]) == 2
    assert "--device cuda:99 can't be used" in capsys.readouterr().err


@pytest.mark.parametrize("name", stores.WORK)
def test_all_that_reads_a_store_is_timed(name, tmp_path):
    store = generated(tmp_path / "store", [0, 1000], model_name="generated", device="cpu")
    seconds, growth = stores.run(name, str(store))
    assert seconds > 0 and growth >= 0


@pytest.mark.slow
def test_stores_are_timed_in_processes_of_their_own(capsys):
    assert stores.main(["--units", "2,4", "--work", "open"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for count, line in zip((2, 4), lines, strict=True):
        assert re.fullmatch(rf"{count} units, open: [\d.]+ s, [\d,]+ MB", line)
