"""The versions of the distribution, which `pyproject.toml` reads, and of the Dataset: results state both."""

__version__ = "0.2.0"
# Of the Dataset: raised when a variable changes its meaning; stores of another schema are refused
SCHEMA = 4
