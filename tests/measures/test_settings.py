"""Every measurement option is declared once, and every caller accepts it."""

import inspect
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

import tracker
from tests.support.models import neox, tokens
from tests.support.refused import refused
from tracker.measures.options import settings_from
from tracker.measures.settings import CHOICE_NAMES, OPTIONS, Settings
from tracker.walk import command
from vit.train import recipe_of

# Not the default, as a keyword and as a flag.
GIVEN = {
    "k": ([2, 3], "2,3"),
    "tokens": ([0, -1], "0,-1"),
    "final_norm": ("exclude", "exclude"),
    "svd": ("full", "full"),
    "dtype": (torch.float64, "float64"),
    "precision": ("bfloat16", "bfloat16"),
    "derivative": ("autograd", "autograd"),
    "witness": ("off", "off"),
    "memory_budget": (3_000_000, "3MB"),
    "measures": (["coupling", "tokenwise"], "tokenwise,coupling"),
    "window": (3, "3"),
    "pair_tokens": ([0, 2], "0,2"),
    "pair_layers": (-1, "-1"),
}
TOGETHER = [name for name in GIVEN if name != "precision"]  # which excludes dtype


def test_every_option_has_an_example():
    assert set(GIVEN) == set(OPTIONS), "add to GIVEN a value that is not the default"
    assert {field.name for field in fields(Settings)} == {*OPTIONS, "keep"}, (
        "add to `Settings` the type of the value"
    )


@pytest.mark.parametrize("function", [tracker.measure, tracker.CouplingCallback])
def test_signature_and_documentation_have_every_option(function):
    parameters = inspect.signature(function).parameters
    for name, option in OPTIONS.items():
        assert (
            parameters[name].default == option.default
            and parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        )
        assert f"\n        {name}: {option.doc[:20]}" in function.__doc__, name
    assert "**options" not in function.__doc__


def test_every_caller_accepts_every_option():
    options = {name: GIVEN[name][0] for name in TOGETHER}
    settings = settings_from(options, "test")
    for name in TOGETHER:
        assert getattr(settings, name) != OPTIONS[name].default, name
    assert tracker.CouplingCallback(**options).run.settings == settings
    flags = [f"--{name}={GIVEN[name][1]}" for name in TOGETHER]
    walk = command.parse(["--model", "nano", *flags])
    assert (
        settings_from(walk.options, "walk")
        == recipe_of(["--data", "digits", *flags]).settings
        == settings
    )


def test_the_precision_of_a_vision_transformer_is_that_of_its_training():
    recipe = recipe_of(["--data", "digits", "--precision", "bf16-mixed"])
    assert recipe.precision == "bf16-mixed" and recipe.settings.precision == "float32"
    measured = replace(recipe, options={"precision": "bfloat16"})
    assert measured.identity == recipe.identity | {"measure_precision": "bfloat16"}


def test_a_configuration_file_is_flat_and_a_flag_overrides_it(tmp_path):
    file = tmp_path / "walk.yaml"
    file.write_text(
        "model: nano\nk: [2, 3]\ntokens: 0,-1\nmemory_budget: 3GB\nmeasures: [coupling]\ndisk_budget: 1GB\n"
    )
    walk = command.parse(["--config", str(file), "--k", "4"])
    assert walk.model == "nano" and walk.disk_budget == 10**9
    settings = settings_from(walk.options, "walk")
    assert settings.k == (4,) and settings.tokens == (0, -1) and settings.memory_budget == 3 * 10**9
    assert settings.measures == ("coupling",)


@pytest.mark.parametrize(
    "function", [lambda **o: tracker.measure(neox(), tokens(), **o), tracker.CouplingCallback]
)
def test_an_unknown_option_is_refused_with_the_allowed_ones(function):
    with pytest.raises(
        TypeError,
        match=r"unexpected option 'ks'.* measurement options are k, tokens, .*pair_layers",
    ):
        function(ks=3)


def test_an_unknown_option_of_the_callback_is_refused_with_the_callbacks_own():
    with pytest.raises(TypeError) as refused:
        tracker.CouplingCallback(every=10)
    assert "'every'; did you mean every_n_steps or every_n_epochs?" in str(refused.value)
    assert (
        "CouplingCallback takes every_n_steps, every_n_epochs, probe, weights, steps, tokenizer"
        in str(refused.value)
    )


@pytest.mark.parametrize(
    "options, message",
    [
        ({"k": "ten"}, "k='ten'"),
        ({"k": True}, "k=True; give whole numbers"),
        ({"tokens": np.array([0.5, 1.0])}, "tokens=array.*give last, cls, all or positions"),
        ({"window": True}, "window=True; give one whole number"),
        ({"memory_budget": True}, "memory_budget=True; give a number with a unit"),
        ({"measures": b"all"}, "choose from all, coupling"),
        ({"measures": [["coupling"]]}, "choose from all, coupling"),
        ({"dtype": torch.bfloat16}, "dtype=torch.bfloat16; choose from float32, float64"),
        ({"dtype": "float64", "precision": "tf32"}, "leave dtype out"),
        ({"memory_budget": "3 gigabytes"}, "give a number with a unit"),
        ({"measures": ["vju"]}, "vju extends 'coupling': add it"),
        ({"window": 4}, "odd number of states"),
        (
            {"pair_layers": [(1, 3), (2, 3)]},
            r"pair_layers=\[\(1, 3\), \(2, 3\)\]; give one whole number",
        ),
        ({"final_norm": "drop"}, "final_norm=drop; choose from auto, include, exclude"),
        ({"pair_tokens": 1}, "at least 2"),
        ({"k": 0}, "k=0; each K must be a whole number from 1 to the model's width$"),
        (
            {"memory_budget": 10},
            r"memory_budget=10, which is in bytes, at least 1000; for 10 GB, .*=10 << 30 ",
        ),
        ({"memory_budget": -1}, "memory_budget=-1; give a number with a unit"),
        ({"measures": []}, "^measures is empty; choose from all, coupling"),
        (
            {"measures": "every"},
            "all leaves out tokenwise, eigenvalues.*all,tokenwise,eigenvalues adds",
        ),
        (
            {"measures": "couplng"},
            r"^measures 'couplng' \(did you mean 'coupling'\?\); choose from all",
        ),
        ({"measures": "lss"}, r"^measures 'lss' \(lss is a variable that 'trajectory' measures\)"),
        (
            {"measures": ["coupling", "offdiag"]},
            r"offdiag' \(offdiag is .* that 'coupling' measures\)",
        ),
    ],
)
def test_values_that_are_not_allowed(options, message):
    with refused(message):
        settings_from(options, "test")


def test_all_leaves_out_what_is_expensive():
    left_out = {"tokenwise", "eigenvalues"}
    for added in ((), ("tokenwise",)):
        found = settings_from({"measures": ["all", *added]}, "test")
        assert {name for name in CHOICE_NAMES if not found.includes(name)} == left_out - {*added}


def test_an_option_is_part_of_an_identity_where_it_is_named_or_not_the_default():
    settings = settings_from({"svd": "full", "memory_budget": 1 << 20, "pair_layers": 0}, "test")
    assert settings.identity(["k"]) == {"k": None, "svd": "full"}, (
        "pair_layers with tokenwise alone, never the budget"
    )
    assert settings_from({"measures": "tokenwise"}, "test").identity([]) == {
        "measures": ["tokenwise"],
        "pair_layers": 1,
    }
