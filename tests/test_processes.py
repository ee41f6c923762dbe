"""A process that the fork server forks behaves as one with an interpreter of its own."""

import os
import signal
import subprocess
import time

import pytest

from tests.support import fork_server, processes


def start(code: str, **options):
    return processes.start("tests.support.statements", code, **options)


def run(code: str, **options) -> subprocess.CompletedProcess:
    return processes.run("tests.support.statements", code, **options)


@pytest.mark.parametrize(
    ("code", "status", "err"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('a reason')", 1, "a reason"),
        ("raise ValueError('planted')", 1, "ValueError: planted"),
        ("import os; os._exit(7)", 7, ""),
        ("import os; os.abort()", -signal.SIGABRT, ""),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
    ],
)
def test_exit_status_and_last_words(code, status, err):
    done = run(code)
    last = done.stderr.strip().splitlines()[-1:]
    assert (done.returncode, done.stdout, last) == (status, "", [err] if err else [])


def test_it_waits_for_threads_and_runs_what_is_registered_for_its_exit():
    code = """
import atexit, sys, threading, time
atexit.register(print, "at exit", file=sys.stderr)
threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
"""
    done = run(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "thread\n", "at exit\n")


def test_it_is_a_program_of_its_own():
    code = "import os, sys; print(sys.argv[1:], sys.modules['__main__'].__spec__.name, os.getcwd(), len(sys.modules) > 2000)"
    done = processes.run("tests.support.statements", code, "two words")
    assert done.stdout == f"{[code, 'two words']} tests.support.statements {processes.ROOT} True\n"


def test_its_environment_is_the_given_one(tmp_path):
    given = {
        "HF_HUB_CACHE": str(tmp_path),
        "HF_ENDPOINT": "http://localhost:9",
        "HF_HUB_OFFLINE": "0",
        "HOME": "/nowhere",
    }
    names = (
        "HF_HUB_CACHE",
        "ENDPOINT",
        "HF_HUB_OFFLINE",
        "HUGGINGFACE_CO_URL_TEMPLATE",
        "HF_TOKEN_PATH",
    )
    code = "import os; from huggingface_hub import constants; print({**os.environ}); print("
    code += ", ".join(f"constants.{name}" for name in names) + ", os.path.expanduser('~'))"
    env = {**os.environ, **given}
    env.pop("WANDB_MODE", None)  # what is absent is absent
    forked, cold = (run(code, env=env, cold=cold).stdout.splitlines() for cold in (False, True))
    assert forked[0] == str({**env, "OMP_NUM_THREADS": "1"})
    assert forked[1] == cold[1] and str(tmp_path) in forked[1] and forked[1].endswith("/nowhere")


def test_variables_that_were_read_on_import_can_not_be_changed():
    with pytest.raises(
        ValueError, match="^HF_HOME: read when modules are imported; .* use cold=True"
    ):
        start("pass", env={**os.environ, "HF_HOME": "/elsewhere"})


def test_standard_streams(tmp_path):
    code = "import sys; print(sys.stdin.read().upper(), end=''); print(sys.stdout.isatty(), file=sys.stderr)"
    process = start(code, stdin=subprocess.PIPE)
    process.stdin.write("a\nb\n")
    assert process.communicate(timeout=300) == ("A\nB\n", "False\n")
    (tmp_path / "in").write_text("from a file")
    with (tmp_path / "in").open() as given, (tmp_path / "out").open("w") as out:
        process = start(code, stdin=given, stdout=out, stderr=subprocess.DEVNULL)
        assert process.stdout is None and process.wait(300) == 0
    assert (tmp_path / "out").read_text() == "FROM A FILE"


def test_a_stream_that_is_not_given_is_the_test_processs(capfd):
    assert start("print('to the terminal')", stdout=None, stderr=None).wait(300) == 0
    assert capfd.readouterr().out == "to the terminal\n"


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 5), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_signals_reach_it(number, status):
    """Also an interrupt, which the test process and the server may ignore."""
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = start(
            "import sys, time\ntry: print('ready', flush=True); time.sleep(600)\nexcept KeyboardInterrupt: sys.exit(5)"
        )
    finally:
        signal.signal(signal.SIGINT, ignored)
    assert process.stdout.readline() == "ready\n" and process.poll() is None
    process.send_signal(number)
    assert process.wait(300) == status == process.poll() == process.returncode
    process.kill()  # it has ended: nothing is sent
    assert process.communicate() == ("", "")


def test_a_group_is_killed_and_its_id_kept_until_the_status_is_read():
    code = (
        "import os, time; os.fork(); os.write(1, f'{os.getpgid(0)}\\n'.encode()); time.sleep(600)"
    )
    process = start(code, start_new_session=True)
    assert [int(process.stdout.readline()) for _ in range(2)] == [process.pid] * 2
    os.killpg(process.pid, signal.SIGKILL)
    assert process.stdout.read() == ""  # neither of the two has it open
    time.sleep(0.05)
    os.kill(process.pid, 0)
    assert process.poll() == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        processes.wait_until(lambda: os.kill(process.pid, 0))


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


def test_a_server_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(processes, "server", processes.cache(processes.server.__wrapped__))
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setattr(processes, "ROOT", "/")
    with pytest.raises(RuntimeError, match="No module named .*tests"):
        start("pass")


def test_modules_that_run_are_not_preloaded():
    """They would not be executed, and runpy would warn."""
    assert not {
        "tracker.pythia",
        "tracker.replay",
        "vit.train",
        "vit.grid",
    } & {*fork_server.PRELOADED}
