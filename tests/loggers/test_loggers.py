"""The protocol of loggers: which metrics they receive."""

import json
import re
import sys
from unittest.mock import MagicMock

import pytest
import torch

import tracker
from tests.support.models import neox, tokens
from tests.support.stores import stored
from tracker import loggers, pythia, replay
from tracker.common.errors import UsageError
from tracker.loggers.protocol import LoggedRun, Row, parse_log, select_metrics
from tracker.loggers.wandb import WandbRun
from tracker.measures.registry import headline_names


def unit(step: int, **options):
    torch.manual_seed(step)
    return tracker.measure(neox(), tokens(2), k=[2, 4], **options).assign_coords(step=step)


@pytest.fixture(scope="module")
def row() -> Row:
    return Row.from_unit(unit(3))


def test_the_choices_of_metrics(row):
    names = {log: set(select_metrics(row, log).scalars) for log in ("headline", "main", "all")}
    assert names["headline"] < names["main"] < names["all"] == set(row.scalars)
    assert names["headline"] == {name for name in headline_names(2) if name in row.scalars}
    assert {"trajectory/lss/q25", "miscoupling/miscoupling_null/k4/mean_offdiag"} <= names[
        "main"
    ] - names["headline"]
    assert "miscoupling/miscoupling/k4/mean_adjacent" not in names["main"]
    assert not [name for name in names["main"] if name.endswith("/mean")]
    assert len(names["main"]) < 40
    few = select_metrics(row, ["trajectory/lss/*", "score/piqa", "diagnostics/undefined"])
    assert (
        set(few.scalars)
        == {f"trajectory/lss/{part}" for part in ("q25", "median", "q75")}
        == {*few.headline}
    )
    with pytest.raises(UsageError, match="no metric is named 'trajectory/lsss/\\*'"):
        select_metrics(row, ["trajectory/lsss/*"])


def test_sections_of_names_say_what_the_numbers_are(row):
    """Coupling is a null level minus a mis-coupling; both of these have a section of their own."""
    assert row.scalars.keys() >= {
        "coupling/miscoupling_coupling/k2/mean",
        "miscoupling/offdiag/k4/mean",
    }
    for name, value in row.scalars.items():
        section, _, rest = name.partition("/")
        assert (section == "coupling") == ("_coupling/" in rest), name
        if section == "coupling":
            null, own = (
                row.scalars[f"mis{name}".replace("_coupling/", part)] for part in ("_null/", "/")
            )
            assert value == null - own, name


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("coupling/mean_offdiag", "miscoupling/mean_offdiag"),
        ("coupling/offdiag_normalized_null/k2/mean", "miscoupling/offdiag_normalized_null/k2/mean"),
        ("coupling/mean_offdiag*", "miscoupling/mean_offdiag"),
        ("coupling/seconds", "cost/seconds"),
        ("coupling/undefined", "diagnostics/undefined"),
    ],
)
def test_a_name_that_is_no_metric_is_answered_with_similar_names(row, old, new):
    with pytest.raises(UsageError, match=f"'{re.escape(old)}'; similar names are {new}, "):
        select_metrics(row, [old], ("cost/seconds",))


@pytest.mark.parametrize(
    "text, log", [("all", "all"), ("headline", "headline"), ("a/b, c/*", ("a/b", "c/*"))]
)
def test_a_choice_on_the_command_line(text, log):
    assert parse_log(text) == log


@pytest.mark.parametrize("text", ["headlines", "", "all,trajectory/*"])
def test_a_choice_that_there_is_not_is_refused_before_a_walk(text, capsys, tmp_path):
    for main, target in (
        (pythia.main, ["--model", "nano", "--out", str(tmp_path)]),
        (replay.main, [str(tmp_path)]),
    ):
        assert main([*target, "--log", text]) == 2
        assert "choose from headline, main, all" in capsys.readouterr().err


def test_no_logger_needs_no_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert loggers.prepare("off") == []


def test_a_row_without_couplings():
    row = Row.from_unit(unit(3, measures="trajectory"))
    assert row.step == 3 and "trajectory/lss/median" in row.scalars and row.heatmaps() == {}


@pytest.mark.parametrize(("log", "continued"), [("all", False), ("main", True)])
def test_a_wandb_run_with_other_metrics_is_not_continued(log, continued, monkeypatch, tmp_path):
    """All units go to a new run."""
    started = MagicMock()
    monkeypatch.setattr("wandb.init", started)
    store = stored(tmp_path / "run", {})
    known = {"id": "before", "logged": [0, 4], "log": log}
    (store.path / "wandb-run.json").write_text(json.dumps(known))
    run = WandbRun("online", LoggedRun(store, "p", "n", {}))
    assert (started.call_args.kwargs["id"], run.logged) == (
        ("before", [0, 4]) if continued else (None, [])
    )
