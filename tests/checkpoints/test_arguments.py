"""All command lines: their flags, and their errors, each of which is one message; a fault of their own has its traceback."""

import re
import warnings
from dataclasses import fields, replace

import pytest

from tests.conftest import ROOT
from tracker.common import command_line
from tracker.common.command_line import FAILED, INTERRUPTED, USAGE, CommandFailure, reports_errors
from tracker.common.parser import Parser
from tracker.measures.options import settings_from
from tracker.measures.settings import OPTIONS
from tracker.walk.command import Walk, parse
from vit.train import recipe_of


def test_the_help_of_a_walk_begins_with_what_most_people_need(capsys):
    with pytest.raises(SystemExit, match="0"):
        parse(["--help"])
    usage, _, text = capsys.readouterr().out.partition("\n\n")
    first = ["--model", "--steps", "--k", "--measures", "--out", "--wandb"]
    assert (
        usage
        == "usage: python -m tracker.pythia (--model MODEL | --files PATTERN --load FUNCTION) [flags]"
    )
    groups = re.split(r"^(\w[\w ]*):\n", text, flags=re.MULTILINE)[1:]
    names = (re.findall(r"^  (?:-h, )?(--\w+)", body, re.MULTILINE) for body in groups[1::2])
    flags = dict(zip(groups[::2], names, strict=True))
    assert flags["most used"] == first and flags["others"] == ["--help"]
    every = {f"--{field.name}" for field in fields(Walk) if field.name != "options"} | {
        f"--{name}" for name in OPTIONS
    }
    assert sorted(sum(flags.values(), [])) == sorted(
        every | {"--config", "--print_config", "--help"}
    )


def test_a_command_line_has_the_defaults_of_python():
    """Each is declared once: what a flag leaves open is what a keyword leaves open."""
    walk = parse(["--model", "nano"])
    assert replace(walk, options={}) == Walk("nano")
    assert settings_from(walk.options, "walk") == settings_from({}, "walk")


@pytest.mark.parametrize("flag", ["--memory-budget", "--memory_budget"])
def test_hyphens_and_underscores(flag):
    assert parse(["--model", "nano", flag, "3GB"]).options["memory_budget"] == 3_000_000_000
    assert parse(["--model", "nano", f"{flag}=3GB"]).options["memory_budget"] == 3_000_000_000
    assert recipe_of([flag, "3GB", "--drop-path=0.1"]).drop_path == 0.1


def test_values_keep_their_hyphens():
    walk = parse(
        ["--model=70m-deduped", "--suffix= --step-by-step", "--out", "my-run", "--max-tokens", "5"]
    )
    assert (walk.model, walk.suffix, str(walk.out), walk.max_tokens) == (
        "70m-deduped",
        " --step-by-step",
        "my-run",
        5,
    )
    parser = Parser()
    parser.add_argument("names", nargs="*", type=str)
    assert parser.parse_args(["--", "--a-b"]).names == ["--a-b"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], False),
        (["--allow_suspect"], True),
        (["--allow-suspect"], True),
        (["--allow-suspect=true"], True),
        (["--allow_suspect", "false"], False),
        (["--allow_suspect", "--device", "cpu"], True),
    ],
)
def test_a_boolean_flag_needs_no_value(given, expected):
    assert parse(["--model", "nano", *given]).allow_suspect is expected


def test_a_boolean_that_is_true_by_default_is_switched_off_by_its_value():
    assert recipe_of(["--keep_checkpoint", "false"]).keep_checkpoint is False
    assert recipe_of(["--keep-checkpoint"]).keep_checkpoint is True


ERRORS = [
    (
        parse,
        ["--model", "nano", "--allow_suspect", "perhaps"],
        "--allow_suspect perhaps; choose from true, false",
    ),
    (parse, ["--model", "nano", "--k", "ten"], "--k 'ten'; give whole numbers"),
    (recipe_of, ["--train_size", "a"], "--train_size a; give a whole number\n("),
    (recipe_of, ["--clip", "a"], "--clip a; give a number\n("),
    (parse, [], "the following arguments are required: --model, or --files and --load\n"),
    (
        parse,
        ["--files", "a_*.pt"],
        "--files 'a_*.pt' takes --load module:function, and neither --model nor --module\n",
    ),
    (
        parse,
        ["--model", "nano", "--load", "a:b"],
        "--load loads what --files matches: give a pattern of files in place of",
    ),
    (
        parse,
        ["--files", "a.py", str(ROOT / "README.md")],
        f"unrecognized arguments: {ROOT / 'README.md'}; a pattern of files",
    ),
    (
        parse,
        ["--model", "nano", "--tokenzer", "x"],
        "unrecognized arguments: --tokenzer x; did you mean --tokenizer?",
    ),
    (
        parse,
        ["--model", "nano", "--dry-rum"],
        "unrecognized arguments: --dry_rum; did you mean --dry_run?",
    ),
]


@pytest.mark.parametrize(("command", "given", "message"), ERRORS)
def test_an_error_of_usage_is_one_message(command, given, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        command(given)
    err = capsys.readouterr().err
    assert stopped.value.code == 2 and err.startswith(f"error: {message}") and "usage:" not in err


def test_every_command_line_uses_this_parser():
    """Only the command for a bare GPU machine, which may lack jsonargparse, has argparse's."""
    for package in ("checkpoints", "tracker", "vit", "benchmarks"):
        for file in (ROOT / package).rglob("*.py"):
            if file.name not in ("gpu.py", "parser.py"):
                assert not re.search(r"\bArgumentParser\b", file.read_text()), file


# How it ends.


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
