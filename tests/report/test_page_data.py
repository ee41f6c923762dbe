"""The data that a page carries for its scripts."""

import json

import numpy as np

from tracker.report import write
from tracker.report.texts import worded


def test_names_can_not_end_the_data_of_the_page():
    data = write._json({"</script>": "<!--<script>"})
    assert "<" not in data and json.loads(data) == {"</script>": "<!--<script>"}


def test_settings_and_attributes_are_words():
    shown = [worded(value) for value in (["all", "noise"], "", "{}", np.int64(1714176), "sdpa")]
    assert shown == ["all, noise", "none", "none", "1,714,176", "sdpa"]
