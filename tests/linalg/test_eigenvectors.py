"""The first eigenvectors against those of `torch.linalg.eigh`."""

import pytest
import torch

from tracker.linalg import eigenvectors
from tracker.linalg.eigenvectors import first_eigenvectors


@pytest.mark.parametrize("threads", [1, 2, eigenvectors.FEW + 1])
@pytest.mark.parametrize("dtype, atol", [(torch.float32, 2e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("count", [1, 5, 24])
def test_they_are_those_of_torch(count, dtype, atol, threads):
    generator = torch.Generator().manual_seed(0)
    M = torch.randn(3, 24, 24, generator=generator, dtype=torch.float64)
    A = (M @ M.mT).to(dtype)
    before, cores = A.clone(), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        values, vectors = first_eigenvectors(A, count)
    finally:
        torch.set_num_threads(cores)
    expected, U = torch.linalg.eigh(A.double())
    expected, U = expected.flip(-1)[:, :count], U.flip(-1)[..., :count]
    size = expected[:, :1]
    torch.testing.assert_close(values.double() / size, expected / size, atol=atol, rtol=0)
    overlap = (U.mT @ vectors.double()).abs()
    torch.testing.assert_close(
        overlap, torch.eye(count).double().expand(3, -1, -1), atol=50 * atol, rtol=0
    )
    assert torch.equal(A, before)


def test_of_a_zero_matrix_they_are_orthonormal():
    values, vectors = first_eigenvectors(torch.zeros(1, 8, 8), 3)
    assert not values.any()
    torch.testing.assert_close(vectors.mT @ vectors, torch.eye(3)[None])


def test_a_failure_of_lapack_is_an_error(monkeypatch):
    def failing(*arguments):
        arguments[-1]._obj.value = 3

    monkeypatch.setattr(eigenvectors, "_routine", lambda name: failing)
    with pytest.raises(RuntimeError, match="info 3"):
        first_eigenvectors(torch.eye(4)[None], 2)
