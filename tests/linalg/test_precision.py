"""The switches of reduced precision: as wanted inside, as they were outside, whichever way the user set them.

Roundings inside of code, errors and norms.
"""

from contextlib import contextmanager

import pytest
import torch

from tests.support.draws import normal
from tests.support.dtypes import EACH_DTYPE
from tracker.linalg.precision import (
    EPSILON,
    FLOOR,
    Roundings,
    _older,
    float32_products,
    frobenius,
    is_finite,
    relative_error,
    switches,
)

backends = torch.backends


def convolutions() -> bool | None:
    """Return the older switch of convolutions; None where it can't be read beside the newer ones."""
    try:
        return backends.cudnn.allow_tf32
    except RuntimeError:
        return None


def states() -> list:
    return [
        _older(),
        convolutions(),
        backends.fp32_precision,
        [switch.fp32_precision for switch in switches()],
    ]


@contextmanager
def set_by_hand(setting):
    """The switches as a user may have set them."""
    before = [switch.fp32_precision for switch in switches()]
    try:
        setting()
        yield
    finally:
        backends.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")
        backends.cudnn.allow_tf32 = True
        for switch, value in zip(switches(), before, strict=True):
            switch.fp32_precision = value


SETTINGS = {
    "untouched": lambda: None,
    "older high": lambda: torch.set_float32_matmul_precision("high"),
    "older medium": lambda: torch.set_float32_matmul_precision("medium"),
    "no cuDNN": lambda: setattr(backends.cudnn, "allow_tf32", False),
    "newer, of products": lambda: setattr(backends.cuda.matmul, "fp32_precision", "tf32"),
    "newer, of all": lambda: setattr(backends, "fp32_precision", "tf32"),
    "newer, of oneDNN": lambda: setattr(backends.mkldnn, "fp32_precision", "bf16"),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_as_wanted_inside_and_as_it_was_outside(setting, precision):
    with set_by_hand(SETTINGS[setting]):
        before = states()
        with pytest.raises(KeyError), float32_products(precision):
            inside = {switch.fp32_precision for switch in switches()}
            assert inside <= ({"ieee", "none"} if precision == "ieee" else {"tf32"})
            # A block's code may read the older switch
            assert convolutions() == (precision == "tf32") or before[1] is None
            raise KeyError
        assert states() == before


def test_what_is_as_wanted_is_left_alone():
    with set_by_hand(lambda: setattr(backends.cudnn, "allow_tf32", False)):
        before = [switch.fp32_precision for switch in switches()]
        # "ieee" where a test of the older switch has run before
        assert set(before) <= {"ieee", "none"}
        with float32_products("ieee"):
            # Not even set to an equal value
            assert [switch.fp32_precision for switch in switches()] == before


def test_the_norm_of_a_wide_float32_matrix_equals_that_in_float64():
    A = normal(2, 2048, 2048, seed=0)
    expected = torch.linalg.matrix_norm(A.double())
    torch.testing.assert_close(frobenius(A).double(), expected, rtol=1e-6, atol=0)


def test_epsilon_is_that_of_the_coarsest_format_of_its_size():
    for size, dtypes in {
        8: [torch.float64],
        4: [torch.float32],
        2: [torch.float16, torch.bfloat16],
    }.items():
        assert EPSILON[size] == max(torch.finfo(dtype).eps for dtype in dtypes)


DOUBLE, SINGLE = torch.ones(3, dtype=torch.float64), torch.ones(3)


def overridable(function):
    """Make a function one operation of what it is given, as those of PyTorch are."""
    return lambda *given: torch.overrides.handle_torch_function(function, given, *given)


two_results = overridable(lambda x: (x, x.float()))
writes_nothing = overridable(lambda x, y: None)
ROUNDINGS = {  # code, and the bytes to which it rounds; None: it does not
    "a cast": (lambda: DOUBLE.float(), 4),
    "two casts": (lambda: (DOUBLE.bfloat16(), DOUBLE.float()), 2),
    "into a wider one": (lambda: SINGLE.double(), None),
    "of integers": (lambda: torch.arange(3).float(), None),
    "a float32 of its own": (lambda: torch.zeros(3), None),
    "written to a coarser one": (lambda: torch.zeros(3).copy_(DOUBLE), 4),
    "written to a coarser one by index": (lambda: torch.zeros(3).__setitem__(0, DOUBLE[0]), 4),
    "in a list": (lambda: torch.stack([DOUBLE, DOUBLE]).split(1)[0].float(), 4),
    "given in a list": (lambda: torch.cat([SINGLE, SINGLE], out=torch.zeros(6).half()), 2),
    "one of two results": (lambda: two_results(DOUBLE), 4),
    "of what another argument holds": (lambda: writes_nothing(DOUBLE, SINGLE), None),
    "by name": (lambda: torch.sum(input=DOUBLE, dim=0, dtype=torch.float32), 4),
}


@pytest.mark.parametrize("what", ROUNDINGS)
def test_roundings_inside_of_code_are_seen(what):
    code, least = ROUNDINGS[what]
    with Roundings() as roundings:
        code()
    assert (roundings.seen, roundings.least) == (least is not None, least or 8)


@EACH_DTYPE
def test_the_error_is_that_of_the_worst_row(dtype):
    reference = torch.tensor([[3.0, 4], [0, 1e-9], [0, 0]], dtype=torch.float64)
    scale = torch.tensor([[1.0, 0], [0, 2], [0, 0]], dtype=torch.float64)
    off = torch.tensor([[0.5, 0], [0, 0], [0, 0]], dtype=torch.float64)
    error = lambda off: float(relative_error(reference + off, reference, scale, dtype))  # noqa: E731
    assert error(0 * off) == 0  # also of rows of zeros
    assert error(off) == pytest.approx(0.1)
    small = torch.tensor([[0.5, 0], [0, FLOOR[dtype]], [0, 0]], dtype=torch.float64)
    assert error(small) == pytest.approx(0.5)  # relative to a part of the scale, 2
    large = torch.full((1, 2), 1e30)  # squares overflow float32
    assert float(relative_error(1.5 * large, large, large, dtype)) == pytest.approx(0.5)


def test_what_is_finite():
    J = torch.zeros(2, 3, 3)
    assert is_finite(J)
    for value in (torch.inf, -torch.inf, torch.nan):
        J[1, 2, 0] = value
        assert not is_finite(J)
