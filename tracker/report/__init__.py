"""Write the interactive page of one store of results or of several.

In: stores of results. Out: one self-contained HTML file (`python -m tracker.report`).
"""

from tracker.report.write import write_report

__all__ = ["write_report"]
