"""The examples of the site's reference, run as doctests."""

import doctest
from pathlib import Path

import pytest

from tests.conftest import ROOT

PAGES = [
    page
    for page in sorted((ROOT / "website" / "content" / "reference").glob("*.md"))
    if ">>> " in page.read_text()
]


def test_pages_with_examples_are_found():
    assert [page.stem for page in PAGES] == ["measuring", "training"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_of_the_reference(page: Path):
    results = doctest.testfile(
        str(page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert results.failed == 0 and results.attempted
