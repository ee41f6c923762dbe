"""`python -m tracker.report`."""

import sys

from tracker.report.write import main

if __name__ == "__main__":
    sys.exit(main())
