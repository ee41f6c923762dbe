"""A saved workspace in Weights & Biases: `python -m tracker.dashboards --entity ENTITY --project PROJECT`.

It shows the runs of walks (`tracker.pythia`), of replayed stores (`tracker.replay`) and of training runs
(`CouplingCallback`) over one axis, each curve beside its null level. Nothing heavy is imported before the arguments have
been read.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wandb_workspaces.reports.v2 import LinePlot
    from wandb_workspaces.reports.v2.interface import PanelTypes
    from wandb_workspaces.workspaces import Section, Workspace

OK, FAILED, USAGE = 0, 1, 2
TOKENWISE = {
    "self": "a token's Jacobian in another's basis",
    "fixed_input": "from the first token to each",
    "fixed_output": "from each token to the last",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog="python -m tracker.dashboards",
        description="Save a workspace for the runs of a W&B project: coupling, trajectories, scores, heat maps, the ViT grid.",
    )
    parser.add_argument("--entity", type=str, required=True, help="the W&B user or team")
    parser.add_argument("--project", type=str, default="block-coupling", help="the W&B project")
    parser.add_argument("--name", type=str, default="Block coupling", help="of the workspace")
    parser.add_argument("--k", type=str, default="10,30,50", help="which K to show, as they were measured")
    parser.add_argument("--dry-run", action="store_true", help="print what would be saved; no account, no network")
    parsed = parser.parse_args(arguments)
    from tracker.walk.plan import numbers

    try:
        if not parsed.entity.strip() or not parsed.project.strip():
            raise ValueError("--entity and --project are names; one is empty")
        if min(numbers("--k", parsed.k)) < 1:
            raise ValueError(f"--k {parsed.k}; give numbers of singular vectors, at least 1")
        workspace = build(parsed.entity, parsed.project, parsed.name, numbers("--k", parsed.k))
        if parsed.dry_run:
            print(dumped(workspace))
            return OK
        return _save(workspace)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE


def build(entity: str, project: str, name: str, ks: Sequence[int]) -> "Workspace":
    """The workspace, not saved yet.

    Args:
        ks: the numbers of singular vectors that get panels, as the runs measured them.
    """
    from wandb_workspaces.workspaces import RunsetSettings, Workspace, WorkspaceSettings

    from tracker.analysis.statistics import HEADLINE
    from tracker.loggers.wandb import AXIS

    return Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[_coupling(ks), _trajectory(), _scores(), _heatmaps(ks), _beside(ks), _grid()],
        settings=WorkspaceSettings(x_axis=AXIS),
        runset_settings=RunsetSettings(pinned_columns=[f"summary:{HEADLINE}.{which}" for which in ("last", "min")]),
    )


def dumped(workspace: "Workspace") -> str:
    """What saving sends, as JSON; until then the view has neither name nor id."""
    return workspace._model.model_dump_json(
        by_alias=True, exclude_none=True, indent=2
    )  # the library offers no other way


def _save(workspace: "Workspace") -> int:
    import wandb

    try:
        if not wandb.login(prompt=False):
            raise ValueError("saving needs a key: run `wandb login` or set WANDB_API_KEY; or look at it with --dry-run")
        workspace.save()
    except wandb.Error as error:
        print(f"error: nothing was saved to {workspace.entity}/{workspace.project}: {error}", file=sys.stderr)
        return FAILED
    print(f"workspace: {workspace.url}")
    return OK


def _coupling(ks: Sequence[int]) -> "Section":
    titles = {"miscoupling": "Mis-coupling", "offdiag_normalized": "Off-diagonal share"}
    return _section(
        "Coupling",
        [
            _lines(
                f"{title}, K = {k}, l ≠ l', with its null level",
                [f"coupling/{measure}{null}/k{k}/mean_offdiag" for null in ("", "_null")],
            )
            for k in ks
            for measure, title in titles.items()
        ],
        is_open=True,
    )


def _trajectory() -> "Section":
    shown = {
        "lss": ("Line-shape score", False),
        "expodistance_raw": ("Expodistance, before the final norm", True),
        "expodistance": ("Expodistance", True),
        "alpha_mean_raw": ("Mean growth, before the final norm", False),
        "equidistance_raw": ("Variation of step lengths, before the final norm", False),
    }
    return _section("Trajectory", [_quartiles(name, title, log) for name, (title, log) in shown.items()], is_open=True)


def _scores() -> "Section":
    from wandb_workspaces.reports.v2 import LinePlot

    from tracker.loggers.wandb import AXIS

    scores = LinePlot(title="Scores", x=AXIS, metric_regex="score/.*", log_x=True)
    return _section("Scores", [scores, _lines("1: not what its name says", ["checkpoint/suspect"])])


def _heatmaps(ks: Sequence[int]) -> "Section":
    from wandb_workspaces.reports.v2 import MediaBrowser

    return _section(
        "Heat maps",
        [
            MediaBrowser(
                title=f"Mis-coupling of layer pairs, K = {k}",
                media_keys=[f"coupling/heatmap/k{k}"],
                gallery_axis="step",
            )
            for k in ks
        ],
    )


def _beside(ks: Sequence[int]) -> "Section":
    from tracker.analysis.statistics import noise_label
    from tracker.measures.states import NOISE

    tokens = [
        _lines(
            f"Off-diagonal share, {what}, K = {k}, with its null level",
            [f"tokens/{kind}/offdiag_normalized{null}/k{k}" for null in ("", "_null")],
        )
        for k in ks
        for kind, what in TOKENWISE.items()
    ]
    swapped = [
        _lines(
            f"Mis-coupling, swapped bases, K = {k}, with its null level",
            [f"coupling/miscoupling_{which}/k{k}/mean_offdiag" for which in ("vju", "null")],
        )
        for k in ks
    ]
    before_norm = [
        _lines(
            f"Off-diagonal share, last block before the final norm, K = {k}, with its null level",
            [f"coupling/offdiag_normalized_raw{null}/k{k}/mean_offdiag" for null in ("", "_null")],
        )
        for k in ks
    ]
    entropy = _quartiles("entropy", "Logit entropy, nats", log=False)
    noise = [f"trajectory/noise_similarity/{noise_label(level)}" for level in NOISE]
    return _section(
        "Tokens, entropy, noise",
        [entropy, _lines("Cosine to the states without noise", noise), *tokens, *swapped, *before_norm],
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

    from tracker.analysis.statistics import HEADLINE

    last, accuracy = SummaryMetric(f"{HEADLINE}.last"), SummaryMetric("test/accuracy")
    columns = {
        "weight decay": Config("weight_decay"),
        "stochastic depth": Config("drop_path"),
        "mis-coupling at the end": last,
        "test accuracy": accuracy,
    }
    across = ParallelCoordinatesPlot(
        title="Weight decay, stochastic depth, mis-coupling, accuracy",
        columns=[ParallelCoordinatesPlotColumn(metric, display_name=name) for name, metric in columns.items()],
    )
    against = ScatterPlot(title="Accuracy against mis-coupling at the end", x=last, y=accuracy, regression=True)
    training = LinePlot(title="Test accuracy", x="trainer/global_step", y=["test/accuracy"])
    return _section("The ViT grid", [across, against, training])


def _quartiles(name: str, title: str, log: bool) -> "LinePlot":
    metrics = [f"trajectory/{name}/{statistic}" for statistic in ("median", "q25", "q75")]
    return _lines(f"{title}: median and quartiles", metrics, log)


def _lines(title: str, metrics: list[str], log: bool = False) -> "LinePlot":
    """Curves over steps on a logarithmic axis."""
    from wandb_workspaces.reports.v2 import LinePlot

    from tracker.loggers.wandb import AXIS

    return LinePlot(title=title, x=AXIS, y=list(metrics), log_x=True, log_y=log or None, title_x="training step")


def _section(name: str, panels: Sequence["PanelTypes"], is_open: bool = False) -> "Section":
    from wandb_workspaces.workspaces import Section

    return Section(name=name, panels=list(panels), is_open=is_open)


if __name__ == "__main__":
    sys.exit(main())
