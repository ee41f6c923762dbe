"""What settles a row that differs from its values, for functions whose derivatives are known."""

import math

import pytest
import torch

from tests.jacobians.measured import recorded
from tests.models import build
from tracker.jacobians import independent
from tracker.jacobians.independent import (
    ALLOWED,
    DETACHED,
    PROBES,
    STEPS,
    Differences,
    Disagreement,
    _amplified_rounding,
    _converge,
    _error_of_products,
    _judge,
    _largest_error,
    _step,
    differ_from_values,
    settle,
    settle_full_sequence,
)
from tracker.jacobians.row_attention import by_formula
from tracker.jacobians.slicing import NotSliceable, Rows
from tracker.linalg.jacobian import Linearization, linearize
from tracker.linalg.precision import TOLERANCE, Roundings
from tracker.linalg.transfer import standard_normal

R, D = 3, 12
W = torch.randn(R, D, D, generator=torch.Generator().manual_seed(4), dtype=torch.float64) / D**0.5
X = torch.randn(R, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
V = standard_normal(X.shape, X, seed=1)
LARGER = torch.tensor([1, 4, 2]).double()  # errors planted in the rows, relative to each other


def products(x):
    return torch.einsum("rij,rj->ri", W.to(x.dtype), x)


def smooth(x):
    return x + products(x).tanh()


def jumping(x):
    """Jumps everywhere, by as much in a small step as in a large one; their derivative is 0 in both modes of autograd."""
    return (1e9 * x.detach()).sin().round() * 1e-2


@pytest.fixture(scope="module")
def call():
    _, ((call, *_),) = recorded(build("gpt_neox")[0], [build("gpt_neox")[1]])
    return call


def judged(call, f, x=X, off=0.0, tangent=None, no_tangent="none", least=8):
    """Judge f, with J^T u too large by `off` of each row, and a tangent too large by as much."""
    true = linearize(f, x, V.to(x.dtype))
    error = off * torch.ones(R, 1, dtype=x.dtype)
    pullback = lambda u: u + (1 + error) * (true.pullback(u) - u)  # noqa: E731
    if tangent is not None:
        tangent = V + (1 + tangent[:, None]) * (true.tangent - V)
    block = Linearization(true.y, pullback, tangent, no_tangent)
    roundings = Roundings()
    roundings.least, roundings.seen = least, least < 8
    return _judge(call, f, x, block, True, roundings)


U = standard_normal((PROBES, R, D), X)


def errors_of(J, wrong):
    """Return the error in each row of differences that differ by `wrong` from what reverse mode gives, J without the identity."""
    JTu, Jv = torch.einsum("pri,rij->prj", U, J), (J @ V[..., None])[..., 0]
    off = (torch.einsum("pri,rij->prj", U, wrong) * V).sum(-1).square().mean(0).sqrt()
    size = JTu.square().sum(-1).mean(0).sqrt()
    return off / torch.maximum((Jv + (wrong @ V[..., None])[..., 0]).norm(dim=-1), size)


SLOPE = 1 - products(X).tanh() ** 2
J = SLOPE[..., None] * W  # of `smooth`


def test_the_largest_error_of_all_rows_is_returned(call):
    for planted in (1e-6 * LARGER, 1e-6 * LARGER.flip(0)):
        found = judged(call, smooth, off=planted[:, None])
        assert (found.method, found.reason) == ("differences", "")
        expected = errors_of((1 + planted[:, None, None]) * J, planted[:, None, None] * J).max()
        assert found.error == pytest.approx(float(expected), rel=1e-2)


@pytest.mark.parametrize("right", range(R))
def test_rows_that_are_wrong_are_refused_with_their_largest_error(call, right):
    off = 0.02 * LARGER[:, None, None]
    off[right] = 0
    errors = errors_of((1 + off) * J, -off * J)
    with pytest.raises(Disagreement, match=f"values by {float(errors.max()):.1e} \\(relative\\)"):
        judged(call, smooth, off=off[..., 0])


def test_a_wrong_forward_mode_is_named_with_the_error_of_rows_that_are_wrong(call):
    off, error = torch.zeros(R, 1), torch.zeros(R).double()
    off[1], error[1], error[2] = 0.02, 0.1, 0.2
    of_values = errors_of((1 + off[..., None]) * J, -off[..., None] * J)[1]
    of_forward = errors_of((1 + off[..., None]) * J, 0.08 * J)[1]
    named = (
        f"from forward mode by {of_forward:.1e} and from differences of values by {of_values:.1e}"
    )
    with pytest.raises(Disagreement, match=named):
        judged(call, smooth, off=off, tangent=error)


def some_jump(x):
    """The first row is smooth, the others jump."""
    return smooth(x) + jumping(x) * torch.tensor([[0], [1], [1]])


def test_where_differences_do_not_converge_forward_mode_has_to_agree(call):
    errors = TOLERANCE[torch.float64] * torch.tensor([0, 0.1, 0.02]).double()
    found = judged(call, some_jump, tangent=errors)
    assert (found.method, found.reason) == ("forward mode", "differences do not converge")
    assert 0.02 < found.error / TOLERANCE[torch.float64] < 0.2  # the largest of the rows that jump
    for row, refused in enumerate([False, True, True]):
        errors = torch.zeros(R).double()
        errors[row] = 100 * TOLERANCE[torch.float64]
        if refused:
            with pytest.raises(Disagreement, match="its J v differs from forward mode by"):
                judged(call, some_jump, tangent=errors)
        else:  # its differences agree
            assert judged(call, some_jump, tangent=errors).error < 1e-12


def test_without_forward_mode_nothing_is_known(call):
    found = judged(call, some_jump, no_tangent="no rule")
    assert found.method == "none" and math.isnan(found.error)
    assert found.reason == "differences do not converge, and there is no forward mode: no rule"


def test_numbers_of_two_bytes_are_compared_with_forward_mode_alone(call):
    error = torch.full((R,), 0.01).double()
    found = judged(call, smooth, tangent=error, least=2)
    assert found.method == "forward mode" and 0.005 < found.error < 0.02
    assert found.reason == "it computes in 16 bits, too coarse for differences"
    with pytest.raises(Disagreement, match="from forward mode"):
        judged(call, smooth, tangent=50 * error, least=2)


def detaching(share):
    return lambda x: x + products(x) + share[:, None] * products(x.detach()).tanh()


def test_what_detach_hides_is_told_with_its_largest_size(call):
    for share in (0.01 * LARGER, 0.01 * LARGER.flip(0), 0.01 * torch.tensor([0, 0, 1])):
        found = judged(call, detaching(share))
        expected = float(errors_of(W, share[:, None, None] * J).max())
        assert found.method == DETACHED and found.error == pytest.approx(expected, rel=1e-4)
        assert found.reason == f"its code detaches tensors, which changes J v by {expected:.1e}"


@pytest.mark.parametrize("row", range(R))
def test_a_fault_beside_detach_is_refused(call, row):
    hidden = torch.zeros(R)
    hidden[row] = 0.1
    f = lambda x: detaching(0.1 * torch.ones(R))(x) + hidden[:, None] * x.data  # noqa: E731
    with pytest.raises(Disagreement, match=r"Its code uses \.data, detach\(\)"):
        judged(call, f)


def test_steps_of_rows():
    x = torch.stack([torch.zeros(4), torch.ones(4), torch.full((4,), 3.0)])
    expected = 1e-2 * torch.tensor([[4 / 3], [1], [3]])
    torch.testing.assert_close(_step(x, 1e-2), expected)
    torch.testing.assert_close(_step(x[:1], 1e-2), torch.tensor([[1e-2]]))
    tiny = _step(torch.full((1, 4), 1e-21), 1.0)
    torch.testing.assert_close(tiny, torch.tensor([[torch.finfo(torch.float32).tiny ** 0.5]]))


@pytest.mark.parametrize("residual", [True, False])
def test_the_largest_error_of_products(residual):
    u = standard_normal((4, R, D), X)
    JTu = torch.einsum("pri,rij->prj", u, W)
    expected = JTu + residual * u
    assert _largest_error(expected, expected, residual, u) == 0
    errors = 1e-3 * LARGER[:, None]
    found = _largest_error(expected + errors * JTu, expected, residual, u)
    assert found == pytest.approx(4e-3)
    # Of one that is nearly the identity, at least 1 % of u
    nearly = residual * u + 1e-6 * JTu
    size = (0.01 * u[:, 1].norm(dim=-1)).square().sum().sqrt()
    wrong = torch.zeros_like(u)
    wrong[:, 1] = 1e-3 * u[:, 0]
    expected = wrong[:, 1].norm() / size
    assert _largest_error(nearly + wrong, nearly, residual, u) == pytest.approx(float(expected))
    block = Linearization(smooth(X), lambda u: JTu + residual * u)
    off = W * (1 + errors[..., None])
    assert _error_of_products(off, X, block, residual) == pytest.approx(4e-3)


@pytest.mark.parametrize(("apart", "converged"), [(0.09, True), (0.2, False)])
def test_differences_converge_if_they_are_ten_times_closer_to_each_other(apart, converged):
    """In float64: the second and third steps; the first is as far from the second as from J."""
    errors = [torch.full((R,), error).double() for error in (0.5, 0.2, 0.1)]
    size = V.norm(dim=-1, keepdim=True)
    direction = V.flip(0)
    direction = 0.1 * size * direction / direction.norm(dim=-1, keepdim=True)
    steps = [torch.full((R, 1), h).double() for h in STEPS[8]]

    def converge(differences, errors=errors, y=X, v=V, kink=0.0):
        both = [Differences(h, D, D) for h, D in zip(steps, differences, strict=True)]
        return _converge(both, errors, [kink * torch.ones(R)] * 3, y, v, 8)

    found = converge([V + 5 * direction, V + apart * direction, V])
    assert found.tolist() == [converged] * R
    # Where rounding is as large as the error, equal differences prove nothing
    assert not converge([V, V, V], y=1e9 * X).any()
    assert converge([V, V, V]).all()
    assert not converge([V, V, V], [0 * error for error in errors]).any()
    # At a kink they are the mean of two derivatives, which are further apart than J is from it, by 0.2 in the second step
    assert not converge([V, V, V], kink=0.21).any()
    assert converge([V, V, V], kink=0.19).all()
    # Small differences are compared with a part of v, which a step of |x| cannot resolve
    tiny = [1e-8 * (1 + share) * 100 * V for share in (5, apart, 0)]
    assert converge(tiny, v=100 * V).all()


def kinked(x):
    """`smooth`, and units whose arguments are 0 in the first row and 0.5 in the others."""
    arguments = products(x - X) + 0.5 * torch.tensor([[0], [1], [1]])
    return smooth(x) + arguments.relu() @ W[0].to(x.dtype)


def test_at_a_kink_forward_mode_has_to_agree(call):
    """There J is the derivative to one side of some units, and to the other side of others."""
    found = judged(call, kinked, tangent=torch.zeros(R).double())
    assert (found.method, found.reason) == ("forward mode", "differences do not converge")
    assert found.error < 1e-12
    wrong = torch.zeros(R).double()
    wrong[0] = 0.01
    with pytest.raises(Disagreement, match="from forward mode"):
        judged(call, kinked, tangent=wrong)
    # A fault larger than the kink is refused, and any one in the rows that are not at it
    for row, off in enumerate((10, 0.01, 0.01)):
        planted = torch.zeros(R, 1)
        planted[row] = off
        with pytest.raises(Disagreement, match="from differences of values"):
            judged(call, kinked, off=planted)


def test_a_difference_to_one_side_is_enough(call):
    """Of one unit at its kink, J is the derivative to one side: a ReLU's is 0 at 0."""
    one = lambda x: smooth(x) + (x - X)[:, :1].relu()  # noqa: E731
    found = judged(call, one)
    assert (found.method, found.reason) == ("differences", "") and found.error < ALLOWED[8]


def test_the_error_of_differences_from_values():
    """The largest error of a formed J, by row; differences of a linear function are exact."""
    f = lambda x: x + products(x)  # noqa: E731
    v = standard_normal(X.shape[-1:], X, seed=1)
    off = W * (1 + 1e-3 * LARGER[:, None, None])
    wrong = (off - W) @ v
    expected = wrong.norm(dim=-1) / (off @ v).norm(dim=-1)
    found = differ_from_values(f, X, off, True, 1e-4)
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


@pytest.fixture(scope="module")
def at_rows(call):
    """Return the rows of a call, and their Jacobians."""
    rows = Rows(torch.tensor([0, 1]), torch.tensor([3, 6]))
    with call.replica.materialize(call.block):
        function = independent._in_full_sequence(call, rows, False)
        block = linearize(function.f, rows.select(call.x))
        J = torch.stack(
            [block.pullback(one.expand_as(block.y)[None])[0] for one in torch.eye(32).double()], 1
        )
    return rows, J - torch.eye(32)


@pytest.mark.parametrize("row_attention", [None, by_formula])
def test_formed_jacobians_are_settled(call, at_rows, row_attention):
    rows, J = at_rows
    found = settle(call, rows, J, ALLOWED[8], row_attention)
    assert found.method == "differences" and found.error < 1e-7
    for row in range(2):
        off = J.clone()
        off[row] *= 1.2
        with pytest.raises((Disagreement, NotSliceable), match="from reverse mode|at single rows"):
            settle(call, rows, off, ALLOWED[8], row_attention)
    assert settle_full_sequence(call, rows).method == "differences"


def test_a_rounding_of_the_state_changes_products_little(call, at_rows):
    rows, _ = at_rows
    function_of = lambda call: independent._in_full_sequence(call, rows, False)  # noqa: E731
    found = _amplified_rounding(call, rows, function_of)
    assert 1e-17 < found < 1e-13
