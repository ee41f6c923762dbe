"""`python -m tests.support.statements STATEMENTS` runs statements as a program: the smallest module for tests of processes."""

import sys

if __name__ == "__main__":
    exec(sys.argv[1], {"__name__": "__main__"})
