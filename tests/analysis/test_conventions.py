import numpy as np
import pytest
import xarray as xr

from tests.support.refused import refused
from tracker.analysis.across_models import compare_models
from tracker.analysis.doubts import CONVENTIONS, describe_differences

ALIKE = {
    "final_norm": "include",
    "dtype": "float32",
    "precision": "float32",
    "tokens": "last",
    "inputs_sha256": "ab",
}


def result(**attributes):
    return xr.Dataset(attrs=ALIKE | attributes)


def test_results_of_one_convention_do_not_differ():
    assert describe_differences({"a": result(), "b": result(model_class="another")}) == []


@pytest.mark.parametrize("key", CONVENTIONS)
def test_results_of_different_conventions_differ(key):
    several = {"a": result(), "b": result(**{key: "other"})}
    words = {"final_norm": "final norm", "inputs_sha256": "inputs"}.get(key, key)
    assert describe_differences(several) == [f"{words} (a: {ALIKE[key]}; b: other)"]
    assert describe_differences(several, ["blocks"]) == []


@pytest.mark.parametrize(("ids", "same"), [("12", True), ("34", False)])
def test_inputs_of_the_same_token_ids(ids, same):
    several = {
        "a": result(token_ids_sha256="12"),
        "b": result(inputs_sha256="cd", token_ids_sha256=ids),
    }
    (said,) = describe_differences(several)
    words = "; of the same token ids, but in another form, or with other masks or images"
    assert said == f"inputs (a: ab; b: cd{words * same})"


def test_values_along_step():
    changed = xr.Dataset(
        coords={"step": [0, 1], "final_norm": ("step", np.array(["include", "exclude"], object))}
    )
    (said,) = describe_differences({"a": result(), "b": changed}, ["final_norm"])
    assert said == "final norm (a: include; b: include, exclude)"


def test_models_of_different_conventions_are_not_compared():
    """`compare_models` fits no line through results with and without the final norm."""
    scored = {"score": ("step", [0.5]), "blocks": ("layer", [1.0, 2.0])}
    results = {f"m{i}": result().assign(scored) for i in range(4)}
    results["m3"] = results["m3"].assign_attrs(final_norm="exclude")
    with refused("not measured alike: they differ in final norm .*m3: exclude"):
        compare_models(results)
