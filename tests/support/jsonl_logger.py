"""A logger of one file and one entry in `tracker.loggers.LOGGERS`: what it takes to add one."""

import json

from tracker.loggers.protocol import LoggedRun, Opener, Row


class JsonLines:
    """Writes a line for each step: its scalars, and the sizes of its pictures."""

    def __init__(self, run: LoggedRun):
        self.file = (run.store.path / "curves.jsonl").open("a")
        self.file.write(json.dumps({"name": run.name, **run.config}) + "\n")
        self.pictures = {}

    def images(self, row: Row):
        self.pictures = {name: picture.shape for name, picture in row.heatmaps().items()}

    def log(self, row: Row):
        self.file.write(
            json.dumps({"step": row.step, **row.scalars, **row.checkpoint, **self.pictures}) + "\n"
        )
        self.pictures = {}

    def finish(self) -> str:
        self.file.close()
        return f"curves: {self.file.name}"


def prepare(wandb_mode: str) -> Opener:
    return Opener(JsonLines, lambda run: f"curves will be in {run.store.path}")
