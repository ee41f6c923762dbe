"""Plant small faults (mutants) in one file, and show which of them the fast tests that reach their lines let through.

    python -m tests.mutants tracker/linalg/svd.py --count 40

The sample depends on `--seed` and on each mutant's text alone, so that a change elsewhere in the file leaves it as it is. A
mutant is killed by a failing test, an error at import, a crash, or a test that takes ten times as long as the longest of its
file. This process imports torch and transformers, a child for each mutant the product, anew, and its children run one file of
tests each; they start what tests start with `tests.support.processes`, so that the mutant is there, too.

To know which tests reach a line, they are run once with coverage. All fast tests take minutes; those of the file come first,
then those of its package, and the others are run for the mutants that these let through.
"""

import argparse
import atexit
import hashlib
import json
import multiprocessing
import os
import re
import resource
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from importlib import import_module
from importlib.machinery import SourceFileLoader
from multiprocessing.connection import wait
from pathlib import Path

import coverage
import pytest

from tests.mutants.known import FILES, KNOWN, PRODUCT
from tests.mutants.made import mutants
from tests.support import fork_server, processes

# Tests of what is not mutated, or of thousands of models
LEFT_OUT = {"gpu", "pretend_device", "sweep", "test_golden.py", "test_mutants.py", "test_size.py"}
PROCESSES = re.compile(r"\bprocesses\.|\bwalker\b")  # in tests that start some
STORE = Path("build/mutants")  # which tests reach a line
SLOWER, IMPORTS = 10, 60  # limits of CPU time: times that of the longest test; s of imports
MEMORY = 8 << 30  # bytes of a child: a mutant may ask for more than the machine has
KILLED = 10  # exit status


class Tests:
    """A pytest plugin: run the chosen tests in their order within a limit, or note what all take and reach."""

    def __init__(self, chosen: list[str], limit: float, reached: coverage.Coverage | None):
        self.chosen, self.limit, self.reached = chosen, limit, reached
        self.seconds = {}
        self.failed = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        found = {item.nodeid: item for item in items}
        items[:] = [found[name] for name in self.chosen or found]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        set_limit(self.limit)
        if self.reached:
            self.reached.switch_context(item.nodeid)
        start = time.process_time()
        result = yield
        self.seconds[item.nodeid] = time.process_time() - start
        return result

    def pytest_runtest_logreport(self, report):
        self.failed = self.failed or (report.nodeid if report.failed else "")


def set_limit(seconds: float):
    """Let a signal end this process after so many seconds of CPU time, or if it waits ten times as long; 0: never."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 10 * seconds)


def run_tests(file: str, chosen: list[str], limit: float, reached=None) -> Tests:
    """Run tests of one file; exit with KILLED after the first that fails."""
    plugin = Tests(chosen, limit, reached)
    plain = ["-x", "-o", "addopts=", "-p", "no:terminal", "-p", "no:cacheprovider"]
    set_limit(IMPORTS)
    status = pytest.main([*plain, "-m", "not slow and not alone", file], plugins=[plugin])
    set_limit(0)
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise Killed(plugin.failed or f"{file}::import")
    return plugin


class Killed(Exception):
    """A test has failed; the argument names it."""


def reach(file: str, store: Path):
    """Run the fast tests of a file; store the seconds of each, and which reach each line."""
    product = [f"{package}/*" for package in PRODUCT]
    reached = coverage.Coverage(f"{store}.lines", config_file=False, include=product)
    reached.start()
    seconds = run_tests(file, [], 0, reached).seconds
    reached.stop()
    reached.save()
    store.write_text(json.dumps(seconds))


def try_mutant(code: object, module: str, tests: dict[str, list[str]], limits, killers):
    """Run the tests of a mutant, a child for each file, those that killed most mutants first."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    original = SourceFileLoader.get_code
    SourceFileLoader.get_code = lambda self, name: code if name == module else original(self, name)
    set_limit(IMPORTS)
    try:
        for name in fork_server.PRELOADED if len(tests) > 1 else ():
            import_module(name)
    except Exception as error:  # of any type, as the mutant decides
        raise Killed(f"import: {error!r}") from error
    set_limit(0)
    files = sorted(tests, key=lambda name: -killers[name])
    for _, _, by in fork_each({f: partial(run_tests, f, tests[f], limits[f]) for f in files}, 1):
        if by:
            raise Killed(by)


def fork_each(tasks: dict[str, Callable], jobs: int) -> Iterator[tuple[str, float, str]]:
    """Run each task in a child, some at a time; yield its name, its seconds, and what killed it."""
    context, running, waiting = multiprocessing.get_context("fork"), {}, list(tasks)
    while running or waiting:
        while waiting and len(running) < jobs:
            name, (receiver, sender) = waiting.pop(0), context.Pipe(duplex=False)
            child = context.Process(target=in_child, args=(tasks[name], sender))
            child.start()
            running[child.sentinel] = name, child, time.perf_counter(), receiver
        for sentinel in wait(list(running)):
            name, child, start, receiver = running.pop(sentinel)
            child.join()
            if child.exitcode == 1:
                raise RuntimeError(f"{name}: an error of this program, printed above")
            by = f"exit status {child.exitcode}" if child.exitcode else ""
            by = receiver.recv() if child.exitcode == KILLED else by
            yield name, time.perf_counter() - start, by


def in_child(task: Callable, sender):
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        requests.close()
        serve_processes(theirs)
        return
    processes.server = lambda: (requests, None, dict(os.environ))
    try:
        task()
    except Killed as killed:
        sender.send(killed.args[0])
        sys.exit(KILLED)


def serve_processes(requests: socket.socket):
    """Start the processes that tests ask for, in which a mutant is, too, if they ask for one."""
    if not requests.recv(1, socket.MSG_PEEK):
        return
    resource.setrlimit(resource.RLIMIT_CPU, (IMPORTS, IMPORTS))  # of each, such as an endless walk
    sys.argv = ["", str(requests.detach()), *fork_server.PRELOADED]
    try:
        fork_server.main()
    finally:
        atexit._run_exitfuncs()  # which a forked child of multiprocessing leaves out


def stages(file: str) -> dict[str, list[Path]]:
    """Return the files of tests: those named after a file, those of its package, and all others."""
    package, *inside, name = Path(file).with_suffix("").parts
    directory = Path("tests", *(inside if package == "tracker" else [package]))
    found = {"its own": [], "its package's": [], "other": []}
    for path in sorted(Path("tests").rglob("test_*.py")):
        own, near = path.name.startswith(f"test_{name}"), path.parent == directory
        if not LEFT_OUT & {*path.parts}:
            found["its own" if own else "its package's" if near else "other"].append(path)
    return found


def reached_by_tests(
    paths: list[Path], jobs: int
) -> dict[str, tuple[dict[str, float], coverage.CoverageData]]:
    """Return for each file of tests the seconds of its fast ones and what they reach, kept in `build`."""
    sources = [one for name in (*PRODUCT, "tests") for one in Path(name).rglob("*.py")]
    common = [
        one for one in sorted(sources) if not {"mutants", "test_"} & {*one.parts, one.name[:5]}
    ]
    stamp = hashlib.sha256(b"".join(one.read_bytes() for one in common))
    files, tasks = {}, {}
    STORE.mkdir(parents=True, exist_ok=True)
    for path in paths:
        of_file = stamp.copy()
        of_file.update(path.read_bytes())
        files[str(path)] = store = STORE / f"{path.stem}-{of_file.hexdigest()[:16]}"
        if not store.exists():
            tasks[str(path)] = partial(reach, str(path), store)
    for name, seconds, by in fork_each(tasks, jobs):
        if by:
            print(f"{name} is left out, since without a mutant it ends with: {by}")
            del files[name]
        print(f"{name}: {seconds:.1f} s", flush=True)
    reached = {}
    for name, store in files.items():
        reached[name] = json.loads(store.read_text()), coverage.CoverageData(f"{store}.lines")
        reached[name][1].read()
    return reached


def choose_tests(
    file: str, lines: set[int], most: float, whose: str, reached
) -> dict[str, list[str]]:
    """Return the quickest tests that reach lines, at most so many seconds of them.

    Where tests share what a fixture or a cache of their file holds, the others of the file count as those that reach. So do those
    named after the file, which may read what it defines without reaching a line, and of its package those that may reach it
    in a process that they start.
    """
    found = []
    for path, (seconds, data) in reached.items():
        by_line = data.contexts_by_lineno(os.path.abspath(file))
        covering = {test for line in lines for test in by_line.get(line, ())} & {*seconds}
        text = Path(path).read_text()
        shared = covering and ("@cache" in text or 'scope="module"' in text)
        shared = shared or whose == "its own"
        shared = shared or (whose == "its package's" and PROCESSES.search(text))
        found += [
            (test not in covering, seconds[test], path, test)
            for test in (seconds if shared else covering)
        ]
    chosen = {}
    for _, seconds, path, test in sorted(found):
        most -= seconds
        if most > 0 or not chosen:
            chosen.setdefault(path, []).append(test)
    return chosen


def main():
    parser = argparse.ArgumentParser(description="Plant mutants in a file.")
    parser.add_argument("file", choices=["day", *FILES], metavar="FILE", help="or day: one a day")
    parser.add_argument("--count", type=int, default=40, help="mutants in the sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60, help="of tests for each mutant")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--only", help="known survivors too, whose text contains this")
    given = parser.parse_args()
    file = given.file
    if file == "day":
        file = FILES[date.today().toordinal() % len(FILES)]
    # Hypothesis draws the same examples each time, and pyarrow starts no thread.
    os.environ |= {"CI": "true", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
    os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}  # read on import, as in conftest
    for module in fork_server.PRELOADED:
        if not module.startswith(PRODUCT):
            import_module(module)
    made = mutants(file)
    order = {text: hashlib.sha256(f"{given.seed}{text}".encode()).digest() for text in made}
    sample = sorted((text for text in made if (given.only or "") in text), key=order.get)
    sample = sample[: given.count]
    known = {} if given.only else KNOWN.get(file, {})
    left = [text for text in sample if text not in known]
    print(f"{file}: {len(sample)} of {len(made)} mutants, {len(sample) - len(left)} are known")
    module = file.removesuffix(".py").replace("/", ".")
    for whose, paths in stages(file).items():
        reached = reached_by_tests(paths if left else [], given.jobs)
        limits = {name: SLOWER * max([2, *of.values()]) for name, (of, _) in reached.items()}
        tasks, killers, survivors = {}, Counter(), []
        for text in left:
            _, lines, compiled = made[text]
            tests = choose_tests(file, lines, given.seconds, whose, reached)
            tasks[text] = partial(try_mutant, compiled(), module, tests, limits, killers)
        for text, seconds, by in fork_each(tasks, given.jobs):
            survivors += [text] if not by else []
            killers[by.partition("::")[0]] += 1
            by = by or f"not by {whose} tests"
            print(f"{by}, {seconds:.0f} s: line {made[text][0]}, {text}", flush=True)
        left = survivors
    for text in left:
        print(f"SURVIVED: line {made[text][0]}, {text}")
    print(f"{file}: {len(sample)} mutants, {len(left)} survived")
    sys.exit(bool(left))


if __name__ == "__main__":
    main()
