"""The data that a page carries for its scripts."""

import json

from tracker.report import write


def test_names_can_not_end_the_data_of_the_page():
    data = write._json({"</script>": "<!--<script>"})
    assert "<" not in data and json.loads(data) == {"</script>": "<!--<script>"}
