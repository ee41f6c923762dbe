"""The browser that tests of the page drive, and the marks of such tests."""

import os
import shutil

import pytest

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


browser_test = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None and "REQUIRE_BROWSER" not in os.environ,
        reason="no Chromium on the PATH (Debian: apt-get install chromium)",
    ),
]
