"""The examples of the site's reference, run as doctests."""

import doctest
from pathlib import Path

import pytest

from tests.conftest import ROOT

PAGES = sorted((ROOT / "website" / "content" / "reference").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_of_the_reference(page: Path):
    results = doctest.testfile(str(page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0
    assert results.attempted or page.stem not in ("measuring", "training")
