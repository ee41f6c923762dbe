"""A process that has imported what is slow to import, and forks a child for each request of `tests.support.processes`.

A child differs from `python -m MODULE` in nothing that a test looks at: it's a process of its own, ends by the signal that
kills it, and leaves through the interpreter's ordinary exit. For each child there is a keeper, which reports the exit status.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
from contextlib import suppress

# What walks and trainings import, without the modules that tests run: those are executed anew, as __main__.
PRELOADED = """accelerate netCDF4 lightning matplotlib.pyplot sklearn.datasets timm torch._dynamo torchvision
    tracker.analysis.across_models tracker.loggers.wandb tracker.measurement tracker.report.write tracker.training
    tracker.walk.command transformers transformers.quantizers.auto transformers.models.auto.modeling_auto
    transformers.models.gpt_neox.modeling_gpt_neox vit.training wandb""".split()
MESSAGE = 1 << 20  # bytes, at most


def main():
    # The last thing that a child does before the interpreter frees modules, when nanobind would list all that is frozen below.
    atexit.register(os.dup2, os.open(os.devnull, os.O_WRONLY), 2)
    # Ctrl-C ends the children and the tests, which end this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in sys.argv[2:]:
        importlib.import_module(module)
    threads = [
        open(f"/proc/self/task/{thread}/comm").read().strip()
        for thread in os.listdir("/proc/self/task")
    ]
    if len(threads) > 1:
        raise RuntimeError(
            f"imports have started threads ({', '.join(threads)}), which a forked child would lack"
        )
    gc.collect()
    gc.freeze()  # else a child's first collection copies every page, which takes 2 s
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        request = serve(requests)
    sys.argv[1:] = request["arguments"]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def serve(requests: socket.socket) -> dict:
    """Fork a keeper for each request, until the tests end; return the request in the child that is to run it."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    while True:
        message, files, *_ = socket.recv_fds(requests, MESSAGE, 4)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return keep(json.loads(message), files)
        for file in files:
            os.close(file)


def keep(request: dict, files: list[int]) -> dict:
    """Fork the child, in which this returns; in the keeper, report the child's exit status and end."""
    child = os.fork()
    with socket.socket(fileno=files.pop(0)) as caller:
        if child == 0:
            become(request, files)
            caller.send(str(os.getpid()).encode())
            return request
        for file in files:
            os.close(file)
        _, status = os.waitpid(child, 0)
        with suppress(OSError):  # the caller has ended
            caller.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def become(request: dict, files: list[int]):
    """Give this process what a fresh interpreter would have: signals, standard streams, environment, random state."""
    import huggingface_hub.constants
    import numpy
    from lightning.fabric.utilities import rank_zero
    from wandb.sdk.data_types._private import MEDIA_TMP

    signal.signal(signal.SIGINT, signal.default_int_handler)
    for standard, file in enumerate(files):
        os.dup2(file, standard)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    # It has read HF_HUB_OFFLINE, HF_HUB_CACHE, HF_ENDPOINT and HOME. Its users look its names up when they need them; the
    # one that copies a value, transformers' HF_MODULES_CACHE, is among the variables that `processes.py` does not accept.
    importlib.reload(huggingface_hub.constants)
    tempfile.tempdir = None  # it has read TMPDIR
    rank_zero.rank_zero_only.rank = rank_zero._get_rank() or 0
    # W&B has made a directory for pictures on import, which the first child to exit would remove.
    MEDIA_TMP.name = tempfile.mkdtemp("wandb-media")
    # As torch's and Python's: the first is a constant, the second is renewed by os.fork
    numpy.random.seed()


if __name__ == "__main__":
    main()
