"""The version of the distribution: `pyproject.toml` reads it, and results state it without an installation."""

__version__ = "0.2.0"
