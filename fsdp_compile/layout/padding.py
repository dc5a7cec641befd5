"""Padding: how many elements of a shard a parameter takes. For numbers of ranks, and for sympy's symbols for them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from ..passes import ops

_ALIGNMENT = 16  # bytes; collectives lose much of their bandwidth on unaligned messages (NVIDIA/nccl#413)


def room(shape: Sequence[int], world_size: int, dtypes: Collection[torch.dtype]) -> int:
    """Elements from the offset of a parameter of this shape to that of the next.

    Args:
        dtypes: of the shard, and those that gathers and reductions cast to; messages are aligned in all of them.
    """
    step = max(1, _ALIGNMENT // min(dtype.itemsize for dtype in dtypes))
    taken = ops.shard_numel(shape, world_size) or 1  # an empty parameter too has its own offset
    return -(-taken // step) * step
