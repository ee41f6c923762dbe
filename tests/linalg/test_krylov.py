"""Block iterations for singular triplets: what they report of themselves is true of the vectors that they return."""

import pytest
import torch

from tests.support.spectra import flat, planted
from tracker.linalg import krylov
from tracker.linalg.krylov import block_golub_kahan, block_lanczos

D, K = 320, 6
FALLING = torch.logspace(0, -1.5, D, dtype=torch.float64)


def golub_kahan(J, start, tolerance):
    """Return U, S, V and |J^T u - s v|; here J v = s u."""
    U, S, V = block_golub_kahan(lambda V: J @ V, lambda U: J.mT @ U, start, K, tolerance)
    S = S[:, None, :K]
    torch.testing.assert_close(J @ V, S * U, atol=1e-12, rtol=0)
    return U, S, (J.mT @ U - S * V).norm(dim=-2), 1


def lanczos(J, start, tolerance):
    """Return U, S, V = J^T U / S and |J v - s u| s = |J J^T u - s^2 u|."""
    U, S = block_lanczos(lambda U: J @ (J.mT @ U), start, K, tolerance)
    S = S[:, None, :K]
    return U, S, (J @ (J.mT @ U) - S.square() * U).norm(dim=-2), S[:, 0]


@pytest.mark.parametrize("iteration", [golub_kahan, lanczos])
@pytest.mark.parametrize("spectrum", ["flat", "falling"])
@pytest.mark.parametrize("tolerance", [1e-1, 1e-2, 1e-4, 1e-7])
def test_residuals_of_the_small_problem_are_those_of_the_vectors(
    iteration, spectrum, tolerance, monkeypatch
):
    """Also after restarts, which the lower tolerances need; and all of them are as small as was asked for."""
    estimates, restarted = [], krylov.restarted

    def watched(step, ritz, reached, *rest):
        def noted(values, residual):
            estimates.append(residual)
            return reached(values, residual)

        return restarted(step, ritz, noted, *rest)

    monkeypatch.setattr(krylov, "restarted", watched)
    s = flat(D) if spectrum == "flat" else FALLING
    J = 0.01 * torch.cat([planted(s), 3 * planted(s, 5)])
    U, S, residual, of_square = iteration(J, krylov.start_block(D, J).expand(2, -1, -1), tolerance)
    torch.testing.assert_close(residual, estimates[-1], atol=1e-12, rtol=1e-6)
    assert len(estimates) > (spectrum == "flat" and tolerance < 1e-3)
    assert (residual / of_square <= tolerance * S[:, 0, :1]).all()
    identity = torch.eye(K, dtype=torch.float64).expand(2, -1, -1)
    torch.testing.assert_close(U.mT @ U, identity, atol=1e-12, rtol=0)
