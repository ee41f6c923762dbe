"""Every command line turns bad input into one message, and leaves a fault of its own with its traceback."""

import pytest

from checkpoints.cli import FAILED, INTERRUPTED, USAGE, CommandFailure, reports_errors


@reports_errors(interrupted="stopped", usage=(KeyError, ValueError))
def command(error: BaseException | None) -> int:
    if error is not None:
        raise error
    return 0


@pytest.mark.parametrize(
    ("error", "status", "printed"),
    [
        (None, 0, ""),
        (ValueError("--k 0; give at least 1"), USAGE, "error: --k 0; give at least 1\n"),
        (CommandFailure("the disk is full"), FAILED, "error: the disk is full\n"),
        (KeyboardInterrupt(), INTERRUPTED, "\nstopped\n"),
    ],
)
def test_an_error_is_one_message_and_a_status(error, status, printed, capsys):
    assert command(error) == status
    assert capsys.readouterr().err == printed


def test_an_unexpected_error_keeps_its_traceback():
    with pytest.raises(TypeError, match="a fault"):
        command(TypeError("a fault"))
