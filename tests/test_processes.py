"""A process that the fork server forks behaves as one with an interpreter of its own."""

import os
import signal
import subprocess

import pytest

from tests.support import fork_server, processes


def start(code: str, **options):
    return processes.start("tests.support.statements", code, **options)


def run(code: str, **options) -> subprocess.CompletedProcess:
    return processes.run("tests.support.statements", code, **options)


# Its statements, exit status, output, and the last line of its errors
ENDINGS = [
    ("print('done')", 0, "done\n", ""),
    ("import sys; sys.exit('a reason')", 1, "", "a reason"),
    ("raise ValueError('planted')", 1, "", "ValueError: planted"),
    ("raise KeyboardInterrupt", -signal.SIGINT, "", "KeyboardInterrupt"),
    (
        "import atexit, threading, time; atexit.register(print, 'at exit');"
        "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()",
        0,
        "thread\nat exit\n",
        "",
    ),
]


@pytest.mark.parametrize(("code", "status", "out", "err"), ENDINGS)
def test_exit_status_and_last_words(code, status, out, err):
    done = run(code)
    last = done.stderr.strip().splitlines()[-1:]
    assert (done.returncode, done.stdout, last) == (status, out, [err] if err else [])


def test_it_is_a_program_of_its_own_with_the_given_environment(tmp_path):
    given = {
        "HF_HUB_CACHE": str(tmp_path),
        "HF_ENDPOINT": "http://localhost:9",
        "HF_HUB_OFFLINE": "0",
        "HOME": "/nowhere",
    }
    code = (
        "import os, sys; from huggingface_hub import constants as c; print(len(sys.modules) > 2000);"
        "print(c.HF_HUB_CACHE, c.ENDPOINT, c.HF_HUB_OFFLINE, c.HUGGINGFACE_CO_URL_TEMPLATE, c.HF_TOKEN_PATH);"
        "print(sys.argv, sys.modules['__main__'].__spec__.name, os.getcwd(), {**os.environ})"
    )
    env = {**os.environ, **given, "OMP_NUM_THREADS": "1"}
    env.pop("WANDB_MODE", None)  # what is absent is absent
    forked, cold = (run(code, env=env, cold=cold).stdout.splitlines() for cold in (False, True))
    assert forked[0] == "True" and forked[1:] == cold[1:] and str(tmp_path) in forked[1]


def test_variables_that_were_read_on_import_can_not_be_changed():
    with pytest.raises(
        ValueError, match="^HF_HOME: read when modules are imported; .* use cold=True"
    ):
        start("pass", env={**os.environ, "HF_HOME": "/elsewhere"})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_it(number):
    """Also an interrupt, which the test process and the server may ignore."""
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = start("import time; print('ready', flush=True); time.sleep(600)")
    finally:
        signal.signal(signal.SIGINT, ignored)
    assert process.stdout.readline() == "ready\n" and process.poll() is None
    process.send_signal(number)
    assert process.wait(300) == -number == process.poll() == process.returncode


def test_random_states_are_as_in_fresh_processes():
    code = "import numpy, random, torch; print(numpy.random.rand(), random.random()); print(torch.initial_seed())"
    first, second = (run(code).stdout.splitlines() for _ in range(2))
    assert not set(first[0].split()) & set(second[0].split()) and first[1] == second[1]


@pytest.mark.slow
def test_the_server_ends_with_the_test_process():
    code = """
from tests.support import processes
processes.PRELOADED = ()
processes.run("tests.support.statements", "pass")
print(processes.server()[1].pid)
"""
    server = int(run(code, cold=True).stdout)
    with pytest.raises(ProcessLookupError):
        processes.wait_until(lambda: os.kill(server, 0))


def test_modules_that_run_are_not_preloaded():
    """They would not be executed, and runpy would warn."""
    assert not {
        "tracker.pythia",
        "tracker.replay",
        "vit.train",
        "vit.grid",
    } & {*fork_server.PRELOADED}
