"""Identity matrices whose rows are recognised after autograd has passed them on: e_c W is row c of W, without arithmetic.

The cotangents of a dense Jacobian are the rows of an identity. The derivative of a residual sum passes them on unchanged to
both terms, so they reach a block's last linear layer unchanged, unless a norm or a scale follows that layer. Rows are
recognised by their memory address, so a copy of them is not.
"""

from weakref import WeakValueDictionary

import torch
from jaxtyping import Float
from torch import Tensor

_identities: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # the matrices in use, by memory address


def identity_matrix(d: int, like: Tensor) -> Float[Tensor, "d d"]:
    """Return an identity matrix whose rows `rows_of_identity` recognises. Do not write to it."""
    matrix = torch.eye(d, dtype=like.dtype, device=like.device)
    _identities[matrix.untyped_storage().data_ptr()] = matrix
    return matrix


def rows_of_identity(x: Tensor) -> slice | None:
    """Return the rows of an identity that x (C, *B, d) consists of, x[c] being the same row for all B; None if it does not."""
    if x.layout != torch.strided or x.dim() < 2 or x._is_zerotensor():
        return None
    found = _identities.get(x.untyped_storage().data_ptr())
    if found is None or x.dtype != found.dtype or x.device != found.device or x.is_neg():
        return None
    if found._version != 0:  # written to
        return None
    C, *B, d = x.shape
    along_C, *over_B, along_d = x.stride()
    repeated = not any(stride for stride, size in zip(over_B, B, strict=True) if size > 1)
    if d != len(found) or along_d != 1 or (C > 1 and along_C != d) or not repeated or x.storage_offset() % d:
        return None
    start = x.storage_offset() // d
    return slice(start, start + C)
