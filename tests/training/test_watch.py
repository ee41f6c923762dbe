"""`Watch` in a plain training loop: the training is unchanged, it resumes its store, and two ranks share the probe."""

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.demos import Transformer
from torch import nn

import tracker
from tests.support.models import neox, tokens
from tests.support.refused import refused
from tracker.store import Store

K = 2


def test_what_a_call_returns():
    model = neox()
    with tracker.Watch(steps=[4], k=K, probe=tokens()) as watch:
        assert int(watch(0, model).step) == 0, "the first call measures"
        assert watch(np.int64(3), model) is None
        assert int(watch(5, model).step) == 5, "step 4 is due, and was jumped over"
        assert watch(5, model, force=True) is None, "it is measured already"
        assert int(watch(6, model, force=True).step) == 6
        with refused("step 2 after step 6"):
            watch(2, model)


@pytest.mark.slow
@pytest.mark.parametrize("measures", ["coupling", "entropy"])
def test_the_summary_of_the_store_is_printed_at_the_end(tmp_path, capsys, measures):
    """With what can be pasted, and without colours that a name might set."""
    model, path = neox(), f"{tmp_path}/my run\x1b[31m (2)"
    with tracker.Watch(1, probe=tokens(3), k=K, save_dir=path, measures=measures) as watch:
        for step in range(3):
            watch(step, model)
    printed, shown = capsys.readouterr().out, path.replace("\x1b", r"\x1b")
    stored = f"stored in {shown}: tracker.plot('{shown}'), python -m tracker.report '{shown}'\n"
    assert printed == (f"{tracker.summary(path)!r}\n{stored}" if measures == "coupling" else "")


def test_a_store_that_is_damaged_meanwhile_does_not_stop_the_end_of_a_training(tmp_path):
    with pytest.warns(UserWarning, match="step 1 is measured but not summarised .*damaged"):
        with tracker.Watch(1, probe=tokens(1), k=K, save_dir=str(tmp_path)) as watch:
            watch(0, neox())
            watch(1, neox())
            Store(tmp_path).file(0).write_bytes(b"no results")


def test_a_store_is_continued_as_it_was_measured(tmp_path):
    model, store = neox(), Store(tmp_path)
    with tracker.Watch(1, k=K, probe=tokens(), save_dir=str(tmp_path)) as watch:
        unit = watch(0, model)
    assert unit.attrs["final_norm"] == "include"
    store.write(0, unit.assign_attrs(store.read(0).attrs | {"final_norm": "exclude"}))
    with refused("measured other inputs"):
        tracker.Watch(1, k=K, probe=tokens(1), save_dir=str(tmp_path))(1, model)
    again = tracker.Watch(1, k=K, probe=tokens(), save_dir=str(tmp_path))
    assert again(1, model).attrs["final_norm"] == "exclude"


@pytest.mark.parametrize(
    "step, model, message",
    [
        (0.5, neox(), r"the step is 0.5 \(float\); give the number .* whole number from 0 on"),
        (-1, neox(), r"the step is -1 \(int\)"),
        (neox(), 3, r"the step is GPTNeoX.* \(GPTNeoXForCausalLM\).*: watch\(step, model\)"),
    ],
)
def test_what_a_call_refuses(tmp_path, step, model, message):
    with refused(message):
        tracker.Watch(1, probe=tokens(), save_dir=tmp_path)(step, model)
    with refused(message):
        Store(tmp_path).file(step)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"probe": None}, "probe=None; give the samples to measure"),
        ({"probe": ["text"]}, "the probe is prompts; give their tokenizer too"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_arguments(options, message):
    with refused(message):
        tracker.Watch(**options)


DEMO = dict.fromkeys(("inputs", "target"), tokens())


@pytest.mark.parametrize(
    "model, probe, blocks",
    [(neox(), tokens(), None), (Transformer(ninp=16), DEMO, "transformer.decoder.layers")],
)
def test_a_model_that_fabric_has_set_up(model, probe, blocks):
    """Compiled; one is a model that Lightning itself defines, with a forward."""
    wrapped = Fabric(accelerator="cpu", devices=1).setup(torch.compile(model, backend="eager"))
    unit = tracker.Watch(1, k=K, probe=probe, blocks=blocks)(0, wrapped)
    expected = tracker.measure(model, probe, k=K, blocks=blocks)
    np.testing.assert_array_equal(unit.miscoupling, expected.miscoupling)


def test_a_model_without_blocks():
    with refused("blocks"):
        tracker.Watch(probe=torch.randn(2, 3))(0, nn.Sequential(nn.Linear(3, 3)))
