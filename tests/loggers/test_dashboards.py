"""Logs and workspaces in Weights & Biases, read from offline files and from requests to a local server in place of its API."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import tracker
from tests.support import processes
from tests.support.models import neox, tokens
from tests.support.stores import generated, stored
from tests.support.wandb_runs import of, offline_run, records
from tests.support.wandb_server import KEY, serve
from tracker import dashboards, replay
from tracker.analysis.curves import scalars
from tracker.loggers.protocol import LoggedRun, Row, select_metrics
from tracker.loggers.wandb import AXIS, WandbRun
from tracker.measures.registry import MEAN_OFFDIAG, headline_names
from tracker.store import Store

STEPS = (0, 2, 8)
# Sections for what walks do not log
OF_TRAINING = ("Cost of measuring (training runs)", "The ViT grid")
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


def command(
    module: str, *arguments: str, home: Path, **environment: str
) -> subprocess.CompletedProcess:
    settings = {**os.environ, "HOME": str(home), "NETRC": str(home / "netrc"), **environment}
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        if name not in environment:
            settings.pop(name, None)
    return processes.run(module, *arguments, env=settings)


def copied(store: Store, to: Path) -> Store:
    shutil.copytree(store.path, to)
    return Store(to)


@pytest.fixture(scope="module")
def replayed(store, tmp_path_factory) -> list[dict]:
    """The records of a replayed store."""
    home = tmp_path_factory.mktemp("home")
    results = copied(store, home / "toy run").path
    done = command(
        "tracker.replay",
        str(results),
        "--project",
        "p",
        "--wandb",
        "offline",
        "--log",
        "all",
        home=home,
    )
    assert done.returncode == 0, done.stderr
    assert "W&B offline" in done.stdout and "wandb sync" in done.stdout
    return records(offline_run(results))


class TestReplay:
    @pytest.mark.slow
    def test_every_step_once_with_the_numbers_of_the_store(self, replayed, store):
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
    def test_the_run_says_what_it_is(self, replayed):
        (run,) = of("run", replayed)
        assert (run["project"], run["display_name"]) == ("p", "toy run")
        config = run["config"]["update"]
        assert config["prompts"] == "few" and config["k"] == [2, 4] and config["device"] == "cpu"
        assert config["model"].endswith("GPTNeoXForCausalLM")

    @pytest.mark.slow
    def test_the_automatic_workspace_shows_curves_and_hides_the_rest(self, replayed):
        metrics = {metric["name"]: metric for metric in of("metric", replayed) if "name" in metric}
        logged = set(scalars_logged(replayed))
        assert logged <= metrics.keys()
        assert all(
            metric["step_metric"] == AXIS for name, metric in metrics.items() if name in logged
        )
        shown = {name for name in logged if not metrics[name]["options"].get("hidden")}
        assert shown == {name for name in headline_names(k=2) if name in logged}
        assert {
            MEAN_OFFDIAG,
            "coupling/miscoupling_coupling/k2/mean_offdiag",
            "trajectory/lss/median",
        } <= shown
        assert "tokens/self/offdiag_normalized/k2" in shown
        assert not [name for name in shown if "q25" in name or "vju" in name] and len(shown) < 20

    @pytest.mark.slow
    def test_the_summary_has_the_last_step_and_the_strongest_coupling(self, replayed, store):
        values = [scalars(store.read(step))[MEAN_OFFDIAG] for step in STEPS]
        summary = of("summary", replayed)[-2]["update"]
        assert summary[MEAN_OFFDIAG] == {
            "min": pytest.approx(min(values)),
            "last": pytest.approx(values[-1]),
        }
        assert not any("_q25" in name for name in summary)

    def test_nothing_to_send(self, tmp_path, capsys):
        assert replay.main([str(tmp_path), "--wandb", "offline"]) == 2
        assert "give a walk's --out directory" in capsys.readouterr().err

    def test_online_needs_a_key(self, tmp_path, capsys, monkeypatch):
        without_a_key(monkeypatch, tmp_path)
        assert replay.main([str(generated(tmp_path / "toy", (0,))), "--wandb", "online"]) == 2
        assert "needs a key" in capsys.readouterr().err

    @pytest.mark.slow
    def test_where_no_server_answers_it_is_logged_offline(self, store, tmp_path):
        results = copied(store, tmp_path / "results").path
        done = command(
            "tracker.replay", str(results), "--wandb", "auto", home=tmp_path, **UNREACHABLE
        )
        assert done.returncode == 0, done.stderr
        assert "logging offline" in done.stderr and "Traceback" not in done.stderr
        rows = of("history", records(offline_run(results)))
        assert [row["item"][AXIS] for row in rows] == list(STEPS)


def without_a_key(monkeypatch, home: Path) -> None:
    monkeypatch.setenv("NETRC", str(home / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


def scalars_logged(among: list[dict]) -> list[str]:
    """Return the names of the curve points in the first row."""
    row = of("history", among)[0]["item"]
    return [
        name
        for name in row
        if name.startswith(("coupling/", "miscoupling/", "trajectory/", "tokens/"))
        and "." not in name
    ]


@pytest.mark.slow
def test_a_step_filled_in_late_does_not_end_up_in_the_summary(store, tmp_path):
    """A resumed walk may measure steps between those it has."""
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
    at_end = scalars(store.read(8))
    assert summary["trajectory/lss/median"] == pytest.approx(at_end["trajectory/lss/median"])
    assert summary[MEAN_OFFDIAG]["last"] == pytest.approx(at_end[MEAN_OFFDIAG])


class TestWorkspace:
    @pytest.mark.slow
    def test_every_metric_it_shows_is_one_that_is_logged(self, replayed, store, capsys):
        """Compare with a run of all measures; not scores (a pattern) or the accuracy of the ViT (logged by its training)."""
        assert dashboards.main(["--entity", "e", "--project", "p", "--k", "2,4", "--dry-run"]) == 0
        view = json.loads(capsys.readouterr().out)
        assert (view["entity"], view["project"], view["displayName"]) == (
            "e",
            "p",
            "Block coupling",
        )
        sections = {
            s["name"]: s["panels"] for s in view["spec"]["section"]["panelBankConfig"]["sections"]
        }
        assert list(sections) == [
            "Headline numbers, K = 2", "Mis-coupling", "Trajectory", "Scores", "Heat maps", "Tokens, entropy, noise",
            "Jacobians", "Cost of measuring (training runs)", "The ViT grid"
        ]  # fmt: skip
        logged = {name for row in of("history", replayed) for name in row["item"]}
        media = {name.removesuffix("._type") for name in logged if name.endswith("._type")}
        for panel in (
            panel
            for name, panels in sections.items()
            if name not in OF_TRAINING
            for panel in panels
        ):
            config = panel["config"]
            assert set(config.get("metrics", [])) <= logged, panel
            assert set(config.get("mediaKeys", [])) <= media, panel
            if panel["viewType"] == "Run History Line Plot":
                assert config["xAxis"] == AXIS and config["xLogScale"]
        miscoupling = [panel["config"]["metrics"] for panel in sections["Mis-coupling"]]
        assert [
            "miscoupling/miscoupling/k2/mean_offdiag",
            "miscoupling/miscoupling_null/k2/mean_offdiag",
        ] in miscoupling
        assert len(miscoupling) == 4
        first = [panel["config"]["metrics"] for panel in sections["Headline numbers, K = 2"]]
        assert ["miscoupling/mean_offdiag", "miscoupling/mean_offdiag_null"] in first
        assert {name for metrics in first for name in metrics} == {
            n for n in headline_names(k=2) if n in logged
        }
        drawn = {
            name
            for panels in sections.values()
            for panel in panels
            for name in panel["config"].get("metrics", [])
        }
        by_default = set(select_metrics(Row.from_unit(store.read(8)), "workspace").scalars)
        assert by_default == {
            name for name in drawn if name in logged and not name.startswith("training/")
        }
        across, against, training = sections["The ViT grid"]
        assert [column["accessor"] for column in across["config"]["columns"]] == [
            "config:weight_decay.value", "config:drop_path.value", f"summary:{MEAN_OFFDIAG}.last", "summary:test/accuracy"
        ]  # fmt: skip
        assert training["config"]["xAxis"] == "trainer/global_step"

    @pytest.mark.slow
    def test_what_is_saved_is_what_the_dry_run_prints(self, tmp_path):
        """Send real requests of the client to a server that answers like W&B's GraphQL API."""
        arguments = ["--entity", "e", "--project", "p"]
        printed = command("tracker.dashboards", *arguments, "--dry-run", home=tmp_path)
        with serve() as server:
            keys = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.address}
            saved = command("tracker.dashboards", *arguments, home=tmp_path, **keys)
        assert saved.returncode == 0, saved.stderr
        assert f"workspace: {server.address}/e/p?nw=view" in saved.stdout
        (variables,) = [
            body["variables"] for body in server.bodies if "upsertView" in body.get("query", "")
        ]
        assert (variables["entityName"], variables["projectName"], variables["displayName"]) == (
            "e", "p", "Block coupling"
        )  # fmt: skip
        expected = json.loads(printed.stdout)["spec"]
        assert without_ids(json.loads(variables["spec"])) == without_ids(expected)

    @pytest.mark.parametrize(
        "arguments, message",
        [
            (["--entity", "e"], "saving needs a key"),
            ([], "entity"),
            (["--entity", "e", "--k", "ten"], "--k 'ten'; give whole numbers"),
            (
                ["--entity", "e", "--k", "10,0"],
                "--k 10,0; give numbers of singular vectors, at least 1",
            ),
            (["--entity", "", "--dry-run"], "one is empty"),
        ],
        ids=["no key", "no entity", "k in words", "no vectors", "empty"],
    )
    def test_bad_usage(self, arguments, message, tmp_path, capsys, monkeypatch):
        without_a_key(monkeypatch, tmp_path)
        try:
            status = dashboards.main(arguments)
        except SystemExit as stopped:  # what the command line itself refuses
            status = stopped.code
        assert status == 2 and message in capsys.readouterr().err

    @pytest.mark.slow
    def test_a_server_that_is_not_there(self, tmp_path):
        done = command("tracker.dashboards", "--entity", "e", home=tmp_path, **UNREACHABLE)
        assert done.returncode == 1 and "nothing was saved to e/block-coupling" in done.stderr
        assert "Traceback" not in done.stderr


def without_ids(spec: object) -> object:
    """Remove the panel ids, which the library draws at random."""
    if isinstance(spec, dict):
        return {key: without_ids(value) for key, value in spec.items() if key != "__id__"}
    return [without_ids(value) for value in spec] if isinstance(spec, list) else spec


def test_a_run_that_the_process_has_open_stays_as_it_is(tmp_path, monkeypatch):
    """As in a notebook that replays a store beside a run of its own."""
    import wandb

    monkeypatch.chdir(tmp_path)
    own = wandb.init(
        mode="offline", project="own", dir=tmp_path, settings=wandb.Settings(silent=True)
    )
    own.log({"loss": 1.0})
    store = generated(tmp_path / "store", [0, 8], model_name="toy", device="cpu")
    assert replay.main([str(store), "--wandb", "offline"]) == 0
    assert wandb.run is own
    own.log({"loss": 2.0})
    assert dict(own.summary)["loss"] == 2.0 and "model" not in dict(own.config)
    own.finish()
    steps = [row["item"][AXIS] for row in of("history", records(offline_run(store)))]
    assert steps == [0, 8] and len(of("history", records(offline_run(tmp_path)))) == 2
