"""dropout: a mask that depends on (key, global position) alone, never on the layout.

A generator that is advanced call by call gives other masks on other shardings. Here element `c` of global row
`r` is kept iff hash(key, r * width + c) is in the upper part of its range; any rank can compute any part of
the mask. The hash is the output function of splitmix64 (Steele, Lea and Flood 2014, variant 13 of Stafford's
mixers) over counter * golden ratio + key: a bijection of the counter whose bits pass BigCrush.
"""

import hashlib

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB


def dropout_key(seed: int, step: int, site: int) -> int:
    """A 64-bit key (as a signed integer) for one dropout site in one optimizer step."""
    digest = hashlib.blake2b(f"{seed} {step} {site}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def keep_mask(rows: Tensor, width: int, p: float, key: int) -> Tensor:
    """True where an element is kept: [..., width] for `rows` [...] int64, the global numbers of the rows."""
    columns = torch.arange(width, device=rows.device)
    x = (rows.unsqueeze(-1) * width + columns).mul_(_GOLDEN).add_(key)
    x.bitwise_xor_((x >> 30) & ((1 << 34) - 1)).mul_(_MIX1)
    x.bitwise_xor_((x >> 27) & ((1 << 37) - 1)).mul_(_MIX2)
    x.bitwise_xor_((x >> 31) & ((1 << 33) - 1))
    threshold = round(p * 2.0**64) - 2**63  # the hash, read as int64, is uniform in [-2^63, 2^63)
    return x >= threshold


def dropout(x: Tensor, p: float, rows: Tensor, key: int) -> Tensor:
    """x with each element zeroed with probability p, the rest scaled by 1 / (1 - p).

    x: [..., C], any float dtype; rows: [...] int64, the number each row of x has in the unsharded tensor of
    the whole batch; key: from `dropout_key`. Raises ValueError for p outside [0, 1).
    """
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout p = {p}: expected 0 <= p < 1")
    if p == 0.0:
        return x
    return x * (keep_mask(rows, x.shape[-1], p, key).to(x.dtype) / (1.0 - p))
