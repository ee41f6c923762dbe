"""Logs in Weights & Biases, read from offline files."""

import os
import shutil
from pathlib import Path

import pytest
import torch
import wandb

import tracker
from tests.support import processes
from tests.support.models import neox, tokens
from tests.support.stores import generated, stored
from tests.support.wandb_runs import of, offline_run, records
from tests.support.wandb_server import KEY
from tracker import replay
from tracker.analysis.curves import scalars
from tracker.loggers.protocol import LoggedRun, Row
from tracker.loggers.wandb import AXIS, WandbRun
from tracker.measures.registry import MEAN_OFFDIAG, headline_names
from tracker.store import Store

STEPS = (0, 2, 8)
UNREACHABLE = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": "http://127.0.0.1:9"}


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    """A store of two steps of a random model with every measure, and a step between them that repeats the first."""
    units = {}
    for step in (0, 8):
        torch.manual_seed(step)
        units[step] = tracker.measure(
            neox(), tokens(3), k=[2, 4], measures="all,tokenwise,eigenvalues"
        )
    units[2] = units[0]
    units = {
        step: unit.assign_coords(suspect="repeats step 0" if step == 2 else "")
        for step, unit in units.items()
    }
    return stored(tmp_path_factory.mktemp("results") / "toy run", units, prompts="few", k=[2, 4])


def copied(store: Store, to: Path) -> Store:
    shutil.copytree(store.path, to)
    return Store(to)


@pytest.fixture(scope="module")
def replayed(store, tmp_path_factory) -> list[dict]:
    """The records of a replayed store."""
    results = str(copied(store, tmp_path_factory.mktemp("home") / "toy run").path)
    assert replay.main([results, "--project", "p", "--wandb", "offline", "--log", "all"]) == 0
    return records(offline_run(Path(results)))


@pytest.mark.slow
def test_every_step_once_with_the_numbers_of_the_store(replayed, store):
    rows = [row["item"] for row in of("history", replayed)]
    assert [row[AXIS] for row in rows] == list(STEPS)
    for row in rows:
        points = scalars(store.read(row[AXIS]))
        assert len(points) > 100
        for name, value in points.items():
            assert row[name] == pytest.approx(value, rel=1e-12, nan_ok=True), name
        assert row["miscoupling/heatmap/k2._type"] == "image-file"
    assert [row["training/suspect"] for row in rows] == [0, 1, 0]


@pytest.mark.slow
def test_the_run_says_what_it_is(replayed):
    (run,) = of("run", replayed)
    assert (run["project"], run["display_name"]) == ("p", "toy run")
    config = run["config"]["update"]
    assert config["prompts"] == "few" and config["k"] == [2, 4] and config["device"] == "cpu"
    assert config["model"].endswith("GPTNeoXForCausalLM")


@pytest.mark.slow
def test_the_automatic_workspace_shows_curves_and_hides_the_rest(replayed, store):
    metrics = {metric["name"]: metric for metric in of("metric", replayed) if "name" in metric}
    logged = scalars(store.read(0)).keys()
    assert {metrics[name]["step_metric"] for name in logged} == {AXIS}
    shown = {name for name in logged if not metrics[name]["options"].get("hidden")}
    assert shown == {name for name in headline_names(k=2) if name in logged}
    assert {MEAN_OFFDIAG, "trajectory/lss/median", "tokens/self/offdiag_normalized/k2"} <= shown
    assert not [name for name in shown if "q25" in name or "vju" in name] and len(shown) < 20


def test_nothing_to_send(tmp_path, capsys):
    assert replay.main([str(tmp_path), "--wandb", "offline"]) == 2
    assert "give a walk's --out directory" in capsys.readouterr().err


@pytest.mark.slow
def test_where_no_server_answers_it_is_logged_offline(store, tmp_path):
    results, own = copied(store, tmp_path / "results").path, str(tmp_path)
    environment = os.environ | UNREACHABLE | {"HOME": own, "NETRC": f"{own}/netrc"}
    environment.pop("WANDB_MODE", None)
    done = processes.run("tracker.replay", results, "--wandb", "auto", env=environment)
    assert done.returncode == 0, done.stderr
    assert "logging offline" in done.stderr and "Traceback" not in done.stderr
    rows = of("history", records(offline_run(results)))
    assert [row["item"][AXIS] for row in rows] == list(STEPS)


@pytest.mark.slow
def test_a_step_filled_in_late_does_not_end_up_in_the_summary(store, tmp_path):
    """A resumed walk may measure steps between those it has. The summary has the last step and the strongest coupling."""
    copy = copied(store, tmp_path / "late")
    run = WandbRun("offline", LoggedRun(copy, "p", "late", {}))
    for step in (0, 8, 2, 8):
        row = Row.from_unit(copy.read(step))
        run.images(row)
        run.log(row)
    run.finish()
    found = records(offline_run(copy.path))
    assert [row["item"][AXIS] for row in of("history", found)] == [0, 8, 2]
    summary = of("summary", found)[-2]["update"]
    values = [scalars(store.read(step)) for step in STEPS]
    assert summary["trajectory/lss/median"] == pytest.approx(values[-1]["trajectory/lss/median"])
    strongest = min(at[MEAN_OFFDIAG] for at in values)
    last = values[-1][MEAN_OFFDIAG]
    assert summary[MEAN_OFFDIAG] == pytest.approx({"min": strongest, "last": last})
    assert not any("_q25" in name for name in summary)


def test_a_run_that_the_process_has_open_stays_as_it_is(tmp_path, monkeypatch):
    """As in a notebook that replays a store beside a run of its own."""
    monkeypatch.chdir(tmp_path)
    own = wandb.init(mode="offline", dir=tmp_path)
    store = generated(tmp_path / "store", [0, 8], model_name="toy", device="cpu")
    assert replay.main([str(store), "--wandb", "offline"]) == 0
    assert wandb.run is own
    own.log({"loss": 2.0})
    assert dict(own.summary)["loss"] == 2.0 and "model" not in dict(own.config)
    own.finish()
    steps = [row["item"][AXIS] for row in of("history", records(offline_run(store)))]
    assert steps == [0, 8] and len(of("history", records(offline_run(tmp_path)))) == 1
