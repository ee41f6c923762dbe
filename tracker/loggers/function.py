"""A function of the caller as `protocol.Logger`."""

from collections.abc import Callable

from tracker.loggers.protocol import Row

LogTo = Callable[[dict[str, float], int], object]


class FunctionLogger:
    """Passes the scalars of each step to a function, `function(metrics, step)`.

    Args:
        prefix: put before the name of each metric, such as "val/".
    """

    def __init__(self, function: LogTo, prefix: str = ""):
        self.function, self.prefix = function, prefix

    def images(self, row: Row) -> None:
        """Do nothing: a function takes no pictures."""

    def log(self, row: Row) -> None:
        """Pass the scalars on."""
        self.function(
            {self.prefix + name: value for name, value in {**row.scalars, **row.checkpoint}.items()}, row.step
        )

    def finish(self) -> str:
        """Do nothing: the caller closes what the function writes to."""
        return ""
