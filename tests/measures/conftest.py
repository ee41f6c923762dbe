"""The Jacobians that measurements form."""

import pytest

from tracker.jacobians.rows import Jacobians


class Formed(list):
    """For each time that Jacobians were formed together, the selections: pairs of a block's call and rows."""

    def each(self) -> list[tuple[int, bool, int, int, int]]:
        """Return layer, whether with the final norm, sample, source and token of every Jacobian."""
        found = []
        for call, rows in (selection for selections in self for selection in selections):
            source = rows.token if rows.source is None else rows.source
            at = zip(rows.sample.tolist(), source.tolist(), rows.token.tolist(), strict=True)
            found.extend((call.layer, call.final_norm is not None, *row) for row in at)
        return found


@pytest.fixture
def formed(monkeypatch) -> Formed:
    """The Jacobians that are formed during a test."""
    found, form = Formed(), Jacobians.__call__

    def noted(self, selections):
        found.append(list(selections))
        return form(self, selections)

    monkeypatch.setattr(Jacobians, "__call__", noted)
    return found
