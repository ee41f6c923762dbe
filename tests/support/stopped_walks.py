"""A walk that stays at its second checkpoint, so that a test can stop it there."""

from tests.support import processes

STAYS_AT_THE_SECOND = """
import time
from tracker.walk import units
measure, measured = units.measure_checkpoint, []

def measure_or_stay(plan, checkpoint, directory):
    if measured:
        print("at the second", flush=True)
        time.sleep(600)
    measured.append(checkpoint)
    return measure(plan, checkpoint, directory)

units.measure_checkpoint = measure_or_stay
"""


def start_and_stay_at_the_second(walker):
    """Start a walk that measures its first checkpoint and stays at its second until it is stopped; return it there."""
    process = walker.start(before=STAYS_AT_THE_SECOND)
    processes.wait_for_line(process, "at the second")
    return process
