"""`python -m tracker.figures`."""

import sys

from tracker.figures.write import main

if __name__ == "__main__":
    sys.exit(main())
