"""The switches of reduced precision: as wanted inside, as they were outside, whichever way the user set them. Norms."""

from contextlib import contextmanager

import pytest
import torch

from tracker.linalg.precision import _older, float32_products, frobenius, switches

backends = torch.backends


def states() -> list:
    return [
        _older(),
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
    A = torch.randn(2, 2048, 2048, generator=torch.Generator().manual_seed(0))
    expected = torch.linalg.matrix_norm(A.double())
    torch.testing.assert_close(frobenius(A).double(), expected, rtol=1e-6, atol=0)
