"""Every command line turns bad input into one message, and leaves a fault of its own with its traceback."""

import warnings

import pytest

from tracker.common import command_line
from tracker.common.command_line import FAILED, INTERRUPTED, USAGE, CommandFailure, reports_errors


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


@pytest.mark.filterwarnings("default")
def test_a_warning_is_one_line_and_said_once(capsys, monkeypatch):
    """As a walk gives it at every checkpoint, with filters that a library changes in between."""
    shown = []
    monkeypatch.setattr(
        warnings, "showwarning", lambda message, *where, **options: shown.append(str(message))
    )

    @reports_errors()
    def walk() -> int:
        for step in range(3):
            with warnings.catch_warnings():
                warnings.simplefilter("default")
            for text in ("3 prompts are cut", f"step {step} is suspect"):
                warnings.warn_explicit(text, UserWarning, command_line.__file__, 1, registry={})
            warnings.warn_explicit("a library's", UserWarning, "/lib/torch/nn.py", 1, registry={})
        return 0

    assert walk() == 0
    err = capsys.readouterr().err.splitlines()
    assert err == [
        "warning: 3 prompts are cut",
        *(f"warning: step {step} is suspect" for step in range(3)),
    ]
    assert shown == ["a library's"] * 3
    warnings.warn_explicit("after the command", UserWarning, command_line.__file__, 1, registry={})
    assert shown[-1] == "after the command"
