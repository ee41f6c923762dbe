"""A saved workspace in Weights & Biases: `python -m tracker.dashboards --entity ENTITY --project PROJECT`.

It shows the runs of walks (`tracker.pythia`), of replayed stores (`tracker.replay`) and of training runs
(`CouplingCallback`) over one axis, each curve with its null level. Nothing heavy is imported before the arguments have
been read.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tracker.common.command_line import OK, CommandFailure, reports_errors
from tracker.common.text import capitalised
from tracker.common.values import INTEGERS, PROJECT
from tracker.measures.settings import RELEASE_K

if TYPE_CHECKING:
    from wandb_workspaces.reports.v2 import LinePlot
    from wandb_workspaces.reports.v2.interface import PanelTypes
    from wandb_workspaces.workspaces import Section, Workspace

    from tracker.measures.declaration import Measure


@reports_errors()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    from tracker.common.parser import Parser

    parser = Parser(
        prog="python -m tracker.dashboards",
        description="Save a workspace for the runs of a W&B project: coupling, trajectories, scores, heat maps, the ViT grid.",
    )
    parser.add_argument("--entity", type=str, required=True, help="the W&B user or team")
    parser.add_argument("--project", type=str, default=PROJECT, help="the W&B project")
    parser.add_argument("--name", type=str, default="Block coupling", help="name of the workspace")
    parser.add_argument(
        "--k",
        type=INTEGERS,
        default=list(RELEASE_K),
        help="numbers of singular vectors to show, as measured",
    )
    parser.add_argument(
        "--dry_run",
        action="store_true",
        help="print the workspace; needs no account and no network",
    )
    parsed = parser.parse_args(arguments)
    if not parsed.entity.strip() or not parsed.project.strip():
        raise ValueError("--entity and --project are names; one is empty")
    if min(parsed.k) < 1:
        raise ValueError(
            f"--k {','.join(map(str, parsed.k))}; give numbers of singular vectors, at least 1"
        )
    workspace = build(parsed.entity, parsed.project, parsed.name, parsed.k)
    if parsed.dry_run:
        print(dumped(workspace))
    else:
        _save(workspace)
    return OK


def build(entity: str, project: str, name: str, ks: Sequence[int]) -> "Workspace":
    """Build the workspace without saving it.

    Args:
        ks: the numbers of singular vectors that get panels, as the runs measured them.
    """
    from wandb_workspaces.workspaces import RunsetSettings, Workspace, WorkspaceSettings

    from tracker.loggers.wandb import AXIS
    from tracker.measures.registry import MEAN_OFFDIAG

    return Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[
            _headlines(min(ks)),
            _measures("Mis-coupling", ks, is_open=True),
            _measures("Trajectory", ks, is_open=True),
            _scores(),
            _heatmaps(ks),
            _measures("Tokens, entropy, noise", ks, is_open=False),
            _measures("Jacobians", ks, is_open=False),
            _cost(),
            _grid(),
        ],
        settings=WorkspaceSettings(x_axis=AXIS),
        runset_settings=RunsetSettings(
            pinned_columns=[f"summary:{MEAN_OFFDIAG}.{which}" for which in ("last", "min")]
        ),
    )


def dumped(workspace: "Workspace") -> str:
    """Return the JSON that saving sends; until then the view has neither name nor id."""
    # The library offers no other way.
    return workspace._model.model_dump_json(by_alias=True, exclude_none=True, indent=2)


def _save(workspace: "Workspace") -> None:
    import wandb

    try:
        if not wandb.login(prompt=False):
            raise ValueError(
                "saving needs a key: run `wandb login` or set WANDB_API_KEY; or look at it with --dry_run"
            )
        workspace.save()
    except wandb.Error as error:
        raise CommandFailure(
            f"nothing was saved to {workspace.entity}/{workspace.project}: {error}"
        ) from error
    print(f"workspace: {workspace.url}")


def _headlines(k: int) -> "Section":
    """Return a section with what a training run logs by default; a null level shares the panel of what it belongs to."""
    from tracker.measures.registry import HEADLINES, UNDEFINED_COUNT

    # Title and metrics, by the metric without the null level: it comes first, and its title is that of both.
    panels: dict[str, tuple[str, list[str]]] = {}
    for metric, title in HEADLINES.items():
        if metric == UNDEFINED_COUNT:  # runs without undefined values do not have it
            continue
        panels.setdefault(metric.replace("_null", ""), (title, []))[1].append(metric.format(k=k))
    lines = [
        _lines(capitalised(title) + (", with its null level" if len(metrics) > 1 else ""), metrics)
        for title, metrics in panels.values()
    ]
    return _section(f"Headline numbers, K = {k}", lines, is_open=True)


def _measures(section: str, ks: Sequence[int], is_open: bool) -> "Section":
    """Return a section with the panels of its measures: curves over positions, then curves for each K with their null level."""
    from tracker.measures.registry import MEASURES

    measures = [measure for measure in MEASURES if measure.dashboard == section]
    by_k = [measure for measure in measures if measure.null]
    panels = [_over_positions(measure) for measure in measures if not measure.null]
    return _section(
        section, [*panels, *(_for_k(measure, k) for k in ks for measure in by_k)], is_open
    )


def _over_positions(measure: "Measure") -> "LinePlot":
    from tracker.measures.registry import panel_metrics

    metrics = panel_metrics(measure)
    title = capitalised(measure.label) + ("" if measure.unit == "1" else f", {measure.unit}")
    if measure.curve == "last mean":
        return _lines(title, metrics)
    return _lines(f"{title}: median and quartiles", metrics, measure.axis == "logarithmic")


def _for_k(measure: "Measure", k: int) -> "LinePlot":
    from tracker.measures.registry import panel_metrics

    over = ", l ≠ l'" if measure.curve == "pairs" else ""
    title = capitalised(measure.label)
    return _lines(f"{title}, K = {k}{over}, with its null level", panel_metrics(measure, k))


def _scores() -> "Section":
    from wandb_workspaces.reports.v2 import LinePlot

    from tracker.loggers.wandb import AXIS

    scores = LinePlot(title="Scores", x=AXIS, metric_regex="score/.*", log_x=True)
    return _section(
        "Scores",
        [
            scores,
            _lines("1: suspect, the weights may not be those of the step", ["training/suspect"]),
        ],
    )


def _heatmaps(ks: Sequence[int]) -> "Section":
    from wandb_workspaces.reports.v2 import MediaBrowser

    return _section(
        "Heat maps",
        [
            MediaBrowser(
                title=f"Mis-coupling of layer pairs, K = {k}",
                media_keys=[f"miscoupling/heatmap/k{k}"],
                gallery_axis="step",
            )
            for k in ks
        ],
    )


def _cost() -> "Section":
    return _section(
        "Cost of measuring (training runs)",
        [
            _lines("Seconds that a measurement took", ["cost/seconds"]),
            _lines(
                "Share of the time since the last measurement that measuring took (0.01: 1 %)",
                ["cost/share"],
            ),
        ],
    )


def _grid() -> "Section":
    from wandb_workspaces.reports.v2 import (
        Config,
        LinePlot,
        ParallelCoordinatesPlot,
        ScatterPlot,
        SummaryMetric,
    )
    from wandb_workspaces.reports.v2.interface import ParallelCoordinatesPlotColumn

    from tracker.measures.registry import MEAN_OFFDIAG

    last, accuracy = SummaryMetric(f"{MEAN_OFFDIAG}.last"), SummaryMetric("test/accuracy")
    columns = {
        "weight decay": Config("weight_decay"),
        "stochastic depth": Config("drop_path"),
        "mis-coupling at the end": last,
        "test accuracy": accuracy,
    }
    across = ParallelCoordinatesPlot(
        title="Weight decay, stochastic depth, mis-coupling, accuracy",
        columns=[
            ParallelCoordinatesPlotColumn(metric, display_name=name)
            for name, metric in columns.items()
        ],
    )
    against = ScatterPlot(
        title="Accuracy against mis-coupling at the end", x=last, y=accuracy, regression=True
    )
    training = LinePlot(title="Test accuracy", x="trainer/global_step", y=["test/accuracy"])
    return _section("The ViT grid", [across, against, training])


def _lines(title: str, metrics: list[str], log: bool = False) -> "LinePlot":
    """Return a panel of curves over steps on a logarithmic axis."""
    from wandb_workspaces.reports.v2 import LinePlot

    from tracker.loggers.wandb import AXIS

    return LinePlot(
        title=title, x=AXIS, y=list(metrics), log_x=True, log_y=log or None, title_x="training step"
    )


def _section(name: str, panels: Sequence["PanelTypes"], is_open: bool = False) -> "Section":
    from wandb_workspaces.workspaces import Section

    return Section(name=name, panels=list(panels), is_open=is_open)


if __name__ == "__main__":
    sys.exit(main())
