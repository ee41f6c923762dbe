"""What `python -m tests.size` counts, and that it fails above its limits."""

import subprocess

from tests.size import main

PROGRAM = '''"""A docstring."""

LIMIT = "3"  # a comment


def f(x):
    """Another, of
    two lines."""
    return f"{x + 1} and more"
'''
TABLE = '[\n  {"name": "gpt2", "depth": 2},\n  {"name": "bert", "depth": -3.5}\n]\n'
# LIMIT = "3", def f(x):, return f""; a table counts the same as a program and as data.
PRODUCT, TESTS = 3 + 6 + 2, 2 * 22


def test_a_number_above_its_limit_is_named(tmp_path, capsys):
    files = {"tracker/f.py": PROGRAM, "tracker/data.json": TABLE, "tests/kernel.cpp": TABLE}
    files |= {"tests/table.py": TABLE, "tests/table.json": TABLE, "tests/untracked.py": PROGRAM}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for command in ("init -q", "add tracker tests", "rm -q --cached tests/untracked.py"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    for product, tests in ((PRODUCT, TESTS), (PRODUCT - 1, TESTS), (PRODUCT, TESTS - 1)):
        limits = f"[tool.size]\nproduct = {product}\ntests = {tests}\n"
        (tmp_path / "pyproject.toml").write_text(limits)
        above = [product < PRODUCT, tests < TESTS]
        assert main(tmp_path) == any(above)
        lines = capsys.readouterr().out.splitlines()
        assert f"examples): {PRODUCT} Python tokens of {product} " in lines[0]
        assert f"tests): {TESTS} Python tokens of {tests} " in lines[1]
        assert ["remove what" in line for line in lines] == above
