"""A walk in a process of its own, of which a file is cut short while it is measured: `python -m tests.walk.cut_short FILE …`."""

import os
import sys

from tracker import pythia
from tracker.walk import unit

if __name__ == "__main__":
    _, file, *arguments = sys.argv
    measure = unit._measure

    def measure_after(*given):
        if os.stat(file).st_size > 5000:
            os.truncate(file, 5000)
        return measure(*given)

    unit._measure = measure_after
    sys.exit(pythia.main(arguments))
