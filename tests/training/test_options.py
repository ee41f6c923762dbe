"""The options of a training run are declared once, and the callbacks and Watch take the same."""

import inspect
import re

import pytest

import tracker
from tracker.measures.settings import OPTIONS
from tracker.training.options import OF_RUN

OWN = {
    tracker.CouplingCallback: {"every_n_epochs", "probe", "weights"},
    tracker.TransformersCallback: {"every_n_epochs", "probe", "trainer"},
    tracker.Watch: {"probe", "log_to"},
}


def documented(kind) -> dict[str, str]:
    """Return the entries under Args, which begin at the same indent."""
    arguments = re.search(r"Args:\n(.*?)\n\n", kind.__doc__, re.DOTALL)
    assert arguments
    return {
        name: " ".join(text.split())
        for name, text in re.findall(
            r"^ {8}(\w+): (.*?)(?=^ {8}\w|\Z)", arguments[1], re.MULTILINE | re.DOTALL
        )
    }


@pytest.mark.parametrize("kind", OWN)
def test_all_three_have_the_same_options(kind):
    first, parameters = (
        inspect.signature(of).parameters for of in (tracker.CouplingCallback, kind)
    )
    shared = [name for name in parameters if name not in OWN[kind]]
    expected = [name for name in first if name not in OWN[tracker.CouplingCallback]]
    assert shared == expected
    assert [parameters[name] for name in shared] == [first[name] for name in shared]
    assert set(shared) == {"every_n_steps"} | OF_RUN.keys() | OPTIONS.keys()
    assert all(
        parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in [*parameters][1:]
    )
    texts = documented(kind)
    assert list(texts) == list(parameters)
    assert {name: texts[name] for name in shared} == {
        name: documented(tracker.CouplingCallback)[name] for name in shared
    }


def test_a_watch_refuses_the_options_of_trainers():
    with pytest.raises(
        TypeError,
        match=r"Watch\(\) got an unexpected option 'every_n_epochs'.*Watch takes every_n_steps, probe,",
    ):
        tracker.Watch(probe=["a"], every_n_epochs=3)  # type: ignore[call-arg]
