"""A walk that stays at its second checkpoint, so that a test can stop it there."""

from tests.support import processes

STAYS_AT_THE_SECOND = """
import time
from checkpoints import load
load_checkpoint, loaded = load.load, []

def load_or_stay(directory):
    if loaded:
        print("at the second", flush=True)
        time.sleep(600)
    loaded.append(directory)
    return load_checkpoint(directory)

load.load = load_or_stay
"""


def start_and_stay_at_the_second(walker, **options):
    """Start a walk that measures its first checkpoint and stays where it loads its second; return it there."""
    process = walker.start(before=STAYS_AT_THE_SECOND, **options)
    processes.wait_for_line(process, "at the second")
    return process
