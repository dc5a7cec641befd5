"""Padding: how many elements of a shard a parameter takes. For numbers of ranks, and for sympy's symbols for them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch

ALIGNMENT = 16  # bytes; collectives lose much of their bandwidth on unaligned messages (NVIDIA/nccl#413)


def shard_rows(shape: Sequence[int], world_size: int) -> int:
    """Rows of a parameter of this shape that every rank's shard has room for."""
    return -(-shape[0] // world_size) if len(shape) else 1


def shard_numel(shape: Sequence[int], world_size: int) -> int:
    """Elements of a rank's shard that a parameter of this shape takes, padding of its last rows included."""
    return shard_rows(shape, world_size) * math.prod(shape[1:])


def room(shape: Sequence[int], world_size: int, dtypes: Collection[torch.dtype]) -> int:
    """Elements from the offset of a parameter of this shape to that of the next.

    Args:
        dtypes: of the shard, and those that gathers and reductions cast to; messages are aligned in all of them.
    """
    step = max(1, ALIGNMENT // min(dtype.itemsize for dtype in dtypes))
    taken = shard_numel(shape, world_size) or 1  # an empty parameter too has its own offset
    return -(-taken // step) * step
