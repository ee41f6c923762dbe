"""`block-coupling COMMAND`: every subcommand is a module with a `main`, and wrong names list them."""

import importlib

import pytest

from tests.conftest import ROOT
from tracker.commands import COMMANDS, main


@pytest.mark.parametrize("name", COMMANDS)
def test_each_subcommand_prints_its_own_help(name, capsys):
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0 and capsys.readouterr().out.startswith("usage: python -m ")
    assert callable(importlib.import_module(COMMANDS[name][0]).main)


def test_without_a_command_all_are_listed(capsys):
    assert main([]) == main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


def test_an_unknown_command_is_refused(capsys):
    assert main(["wlak"]) == 2
    assert "error: wlak; choose from" in capsys.readouterr().err


def test_the_extras_of_missing_packages_exist():
    import tomllib

    from tracker.common.extras import EXTRAS

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(EXTRAS.values()) <= set(extras)
    for package, extra in EXTRAS.items():
        if extra != "all":
            named = {"sklearn": "scikit-learn"}.get(package, package).replace("_", "-")
            assert any(line.replace("_", "-").startswith(named) for line in extras[extra]), package
