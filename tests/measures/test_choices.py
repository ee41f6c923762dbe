"""What "all" means."""

import pytest

import tracker
from tests.support.models import neox, tokens
from tests.support.refused import refused
from tracker.measures.options import settings_from
from tracker.measures.settings import CHOICE_NAMES


def test_all_leaves_out_what_is_expensive():
    alone, added = (
        settings_from({"measures": given}, "test") for given in ("all", ["all", "tokenwise"])
    )
    assert [name for name in CHOICE_NAMES if not alone.includes(name)] == [
        "tokenwise",
        "eigenvalues",
    ]
    assert [name for name in CHOICE_NAMES if not added.includes(name)] == ["eigenvalues"]
    ds = tracker.measure(neox(), tokens(1), k=2, measures="all")
    assert "entropy" in ds and "miscoupling_vju" in ds and "self_miscoupling" not in ds


def test_the_error_and_the_help_say_how_to_add_it():
    with refused(r"all leaves out tokenwise, eigenvalues.*all,tokenwise,eigenvalues adds them"):
        settings_from({"measures": "every"}, "test")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "couplng",
            r"^measures 'couplng' \(did you mean 'coupling'\?\); choose from all, coupling",
        ),
        (
            "lss",
            r"^measures 'lss' \(lss is a variable that 'trajectory' measures\); choose from all",
        ),
        (
            ["coupling", "miscoupling"],
            r"^measures 'coupling, miscoupling' \(miscoupling is a variable that 'coupling' measures\)",
        ),
    ],
)
def test_variables_and_misspelt_names_lead_to_the_choice_that_is_meant(given, message):
    with refused(message):
        settings_from({"measures": given}, "test")
