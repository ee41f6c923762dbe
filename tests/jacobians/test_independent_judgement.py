"""What settles a row that differs from its values, for functions whose derivatives are known."""

import math

import pytest
import torch

from tests.support.models import random
from tracker.jacobians.independent import (
    DETACHED,
    PROBES,
    Disagreement,
    differ_from_values,
    error_of_products,
    judge_rows,
    largest_error,
)
from tracker.jacobians.judge import BOUNDS, judge, step
from tracker.linalg.jacobian import Linearization, linearize
from tracker.linalg.precision import TOLERANCE, Roundings
from tracker.linalg.transfer import standard_normal
from tracker.model.recording import BlockCall

R, D = 3, 12
W = random(R, D, D, seed=4) / D**0.5
X = random(R, D, seed=5)
V = standard_normal(X.shape, X, seed=1)
CALL = object.__new__(BlockCall)
CALL.layer, CALL.name = 1, "a block"
LARGER = torch.tensor([1, 4, 2]).double()  # errors planted in the rows, relative to each other


def products(x):
    return torch.einsum("rij,rj->ri", W.to(x.dtype), x)


def smooth(x):
    return x + products(x).tanh()


def jumping(x):
    """Jumps everywhere, by as much in a small step as in a large one; their derivative is 0 in both modes of autograd."""
    return (1e9 * x.detach()).sin().round() * 1e-2


def judged(f, x=X, off=0.0, tangent=None, no_tangent="none", least=8):
    """Judge f, with J^T u too large by `off` of each row, and a tangent too large by as much."""
    true = linearize(f, x, V.to(x.dtype))
    error = off * torch.ones(R, 1, dtype=x.dtype)
    pullback = lambda u: u + (1 + error) * (true.pullback(u) - u)  # noqa: E731
    if tangent is not None:
        tangent = V + (1 + tangent[:, None]) * (true.tangent - V)
    block = Linearization(true.y, pullback, tangent, no_tangent)
    roundings = Roundings()
    roundings.least, roundings.seen = least, least < 8
    return judge_rows(CALL, f, x, block, True, roundings)


U = standard_normal((PROBES, R, D), X)


def errors_of(J, wrong):
    """Return the error in each row of differences that differ by `wrong` from what reverse mode gives, J without the identity."""
    JTu, Jv = torch.einsum("pri,rij->prj", U, J), (J @ V[..., None])[..., 0]
    off = (torch.einsum("pri,rij->prj", U, wrong) * V).sum(-1).square().mean(0).sqrt()
    size = JTu.square().sum(-1).mean(0).sqrt()
    return off / torch.maximum((Jv + (wrong @ V[..., None])[..., 0]).norm(dim=-1), size)


SLOPE = 1 - products(X).tanh() ** 2
J = SLOPE[..., None] * W  # of `smooth`


def test_the_largest_error_of_all_rows_is_returned():
    for planted in (1e-6 * LARGER, 1e-6 * LARGER.flip(0)):
        found = judged(smooth, off=planted[:, None])
        assert (found.method, found.reason) == ("differences", "")
        expected = errors_of((1 + planted[:, None, None]) * J, planted[:, None, None] * J).max()
        assert found.error == pytest.approx(float(expected), rel=1e-2)


@pytest.mark.parametrize("agrees", [False, True])
@pytest.mark.parametrize("right", range(R))
def test_rows_that_are_wrong_are_refused_with_their_largest_error(right, agrees):
    """Also where forward mode agrees with reverse mode."""
    off = 0.02 * LARGER[:, None, None]
    off[right] = 0
    tangent = off[:, 0, 0] if agrees else None
    errors = errors_of((1 + off) * J, -off * J)
    with pytest.raises(Disagreement, match=f"values by {float(errors.max()):.1e} \\(relative\\)"):
        judged(smooth, off=off[..., 0], tangent=tangent)


def some_jump(x):
    """The first row is smooth, the others jump."""
    return smooth(x) + jumping(x) * torch.tensor([[0], [1], [1]])


def test_where_differences_do_not_converge_forward_mode_has_to_agree():
    errors = TOLERANCE[torch.float64] * torch.tensor([0, 0.1, 0.02]).double()
    found = judged(some_jump, tangent=errors)
    assert (found.method, found.reason) == ("forward mode", "differences do not converge")
    assert 0.02 < found.error / TOLERANCE[torch.float64] < 0.2  # the largest of the rows that jump
    for row, refused in enumerate([False, True, True]):
        errors = torch.zeros(R).double()
        errors[row] = 100 * TOLERANCE[torch.float64]
        if refused:
            with pytest.raises(Disagreement, match="its J v differs from forward mode by"):
                judged(some_jump, tangent=errors)
        else:  # its differences agree
            assert judged(some_jump, tangent=errors).error < 1e-12


def test_without_forward_mode_nothing_is_known():
    found = judged(some_jump, no_tangent="no rule")
    assert found.method == "none" and math.isnan(found.error)
    assert found.reason == "differences do not converge, and there is no forward mode: no rule"


def test_numbers_of_two_bytes_are_compared_with_forward_mode_alone():
    error = torch.full((R,), 0.01).double()
    found = judged(smooth, tangent=error, least=2)
    assert found.method == "forward mode" and 0.005 < found.error < 0.02
    assert found.reason == "it computes in 16 bits, too coarse for differences"
    with pytest.raises(Disagreement, match="from forward mode"):
        judged(smooth, tangent=50 * error, least=2)


def detaching(share):
    return lambda x: x + products(x) + share[:, None] * products(x.detach()).tanh()


def test_what_detach_hides_is_told_with_its_largest_size():
    for share in (0.01 * LARGER, 0.01 * LARGER.flip(0), 0.01 * torch.tensor([0, 0, 1])):
        found = judged(detaching(share))
        expected = float(errors_of(W, share[:, None, None] * J).max())
        assert found.method == DETACHED and found.error == pytest.approx(expected, rel=1e-4)
        assert found.reason == f"its code detaches tensors, which changes J v by {expected:.1e}"


@pytest.mark.parametrize("row", range(R))
def test_a_fault_beside_detach_is_refused(row):
    hidden = torch.zeros(R)
    hidden[row] = 0.1
    f = lambda x: detaching(0.1 * torch.ones(R))(x) + hidden[:, None] * x.data  # noqa: E731
    with pytest.raises(Disagreement, match=r"Its code uses \.data, detach\(\)"):
        judged(f)


def test_steps_of_rows():
    x = torch.stack([torch.zeros(4), torch.ones(4), torch.full((4,), 3.0)])
    torch.testing.assert_close(step(x, 1e-2), 1e-2 * torch.tensor([[4 / 3], [1], [3]]))
    assert step(x[:1], 1e-2) == 1e-2 and step(1e-21 * x, 1.0)[1] > 1e-20


@pytest.mark.parametrize("residual", [True, False])
def test_the_largest_error_of_products(residual):
    u = standard_normal((4, R, D), X)
    JTu = torch.einsum("pri,rij->prj", u, W)
    expected = JTu + residual * u
    assert largest_error(expected, expected, residual, u) == 0
    errors = 1e-3 * LARGER[:, None]
    found = largest_error(expected + errors * JTu, expected, residual, u)
    assert found == pytest.approx(4e-3)
    # Of one that is nearly the identity, at least 1 % of u
    assert largest_error(1.01 * u, u, True, u) == pytest.approx(1)
    off = W * (1 + errors[..., None])
    assert error_of_products(off, X, JTu + residual * u, residual) == pytest.approx(4e-3)


def verdict(f, Jv, x=X, kind=torch.float64):
    """Judge J v of the one row of f."""
    x, Jv = x[:1].to(kind), Jv.double()
    v = V[:1].to(kind)
    size = lambda _: Jv.norm(dim=-1)  # noqa: E731
    error = lambda D: (D.double() - Jv).norm(dim=-1) / Jv.norm(dim=-1)  # noqa: E731
    found = judge(f, x, f(x), v, error, size, x.itemsize)
    return "agree" if found.agree.all() else "refuted" if found.refuted.all() else "unknown"


JV = (J @ V[..., None])[:1, :, 0] + V[:1]
FIRST_ROW = lambda x: x + (x @ W[0].mT.to(x)).tanh()  # noqa: E731
OFF = {8: 1e-4, 4: 2e-2}
SATURATED = lambda x: x + (1e9 * (x - X[:1].to(x)) @ W[0].mT.to(x)).tanh()  # noqa: E731
JUDGED = {  # a function, J v times what, and the verdict
    "right": (FIRST_ROW, lambda off: 1, "agree"),
    "off": (FIRST_ROW, lambda off: 1 + off, "refuted"),
    "far off": (FIRST_ROW, lambda off: 100, "refuted"),
    # Differences fall as 1 / h: they are near to each other beside J v alone
    "every step is too large": (SATURATED, lambda off: 1e4, "unknown"),
    "jumps": (lambda x: FIRST_ROW(x) + jumping(x), lambda off: 1, "unknown"),
    "at a kink": (lambda x: x + (x - X[:1].to(x)).relu(), lambda off: 1, "unknown"),
}


@pytest.mark.parametrize("kind", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", JUDGED)
def test_differences_that_converge_elsewhere_refute(name, kind):
    f, times, expected = JUDGED[name]
    assert verdict(f, times(OFF[kind.itemsize]) * JV, kind=kind) == expected


def kinked(x):
    """`smooth`, and units whose arguments are 0 in the first row and 0.5 in the others."""
    arguments = products(x - X) + 0.5 * torch.tensor([[0], [1], [1]])
    return smooth(x) + arguments.relu() @ W[0].to(x.dtype)


def test_at_a_kink_forward_mode_has_to_agree():
    """There J is the derivative to one side of some units, and to the other side of others."""
    found = judged(kinked, tangent=torch.zeros(R).double())
    assert (found.method, found.reason) == ("forward mode", "differences do not converge")
    assert found.error < 1e-12
    wrong = torch.zeros(R).double()
    wrong[0] = 0.01
    with pytest.raises(Disagreement, match="from forward mode"):
        judged(kinked, tangent=wrong)
    # A fault larger than the kink is refused, and any one in the rows that are not at it
    for row, off in enumerate((10, 0.01, 0.01)):
        planted = torch.zeros(R, 1)
        planted[row] = off
        with pytest.raises(Disagreement, match="from differences of values"):
            judged(kinked, off=planted)


def test_a_difference_to_one_side_is_enough():
    """Of one unit at its kink, J is the derivative to one side: a ReLU's is 0 at 0."""
    one = lambda x: smooth(x) + (x - X)[:, :1].relu()  # noqa: E731
    found = judged(one)
    assert (found.method, found.reason) == ("differences", "") and found.error < BOUNDS[
        8
    ].differences


@pytest.mark.parametrize("residual", [True, False])
def test_the_error_of_differences_from_values(residual):
    """The largest error of a formed J without the identity, by row; differences of a linear function are exact."""
    J = 1e-3 * W
    f = lambda x: residual * x + 1e-3 * products(x)  # noqa: E731
    v = standard_normal(X.shape[-1:], X, seed=1)
    off = J * (1 + 1e-3 * LARGER[:, None, None])
    wrong = (off - J) @ v
    expected = wrong.norm(dim=-1) / (off @ v).norm(dim=-1)
    found = differ_from_values(f, X, off, residual, 1e-4)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("allowed", "evaluations"), [(1e-3, 1), (1e-7, 2)])
def test_one_evaluation_suffices_where_one_sided_differences_agree(allowed, evaluations):
    """Their error is of the first order in the step, that of two-sided ones of the second."""
    points = []

    def f(x):
        points.append(x)
        return smooth(x)

    found = differ_from_values(f, X, J, True, 1e-4, smooth(X), allowed)
    assert len(points) == evaluations
    bounds = (1e-6, 1e-3) if evaluations == 1 else (0, 1e-7)
    assert (found > bounds[0]).all() and (found < bounds[1]).all()
