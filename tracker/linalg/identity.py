"""Identity matrices whose rows are known again wherever autograd hands them on unchanged: products with them need no
arithmetic.

A dense Jacobian's cotangents are the rows of an identity. A residual sum hands them on as they are to what was added, so
they reach a block's last linear layer unchanged, unless a norm or a scale follows it; and there e_c W is row c of W.
"""

from weakref import WeakValueDictionary

import torch
from jaxtyping import Float
from torch import Tensor

_made: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # those in use, by their address


def identity_matrix(d: int, like: Tensor) -> Float[Tensor, "d d"]:
    """An identity whose rows `rows_of_identity` knows; not to be written to."""
    made = torch.eye(d, dtype=like.dtype, device=like.device)
    _made[made.untyped_storage().data_ptr()] = made
    return made


def rows_of_identity(x: Tensor) -> slice | None:
    """Which rows of such an identity x consists of, x[c] being one of them all over B; None if it is not known to be any."""
    if x.layout != torch.strided or x.dim() < 2 or x._is_zerotensor():
        return None
    found = _made.get(x.untyped_storage().data_ptr())
    if found is None or x.dtype != found.dtype or x.device != found.device or x.is_neg():
        return None
    if found._version != 0:  # written to after all
        return None
    C, *B, d = x.shape
    along_C, *over_B, along_d = x.stride()
    repeated = not any(stride for stride, size in zip(over_B, B, strict=True) if size > 1)
    if d != len(found) or along_d != 1 or (C > 1 and along_C != d) or not repeated or x.storage_offset() % d:
        return None
    start = x.storage_offset() // d
    return slice(start, start + C)
