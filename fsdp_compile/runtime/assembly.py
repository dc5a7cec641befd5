"""Assembly: a parameter from its ranks' parts along a dimension that is not the first.

A rank's part of a parameter is contiguous, on whatever dimension that is sharded, so what ranks send lies in memory
part after part. For the first dimension that is the parameter itself; for others the parts are put side by side, by one
copy, for which torch's own operators stand in the graphs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..passes import ops
from ..passes.padding import shard_rows


def _assemble(rows: torch.Tensor, shape: Sequence[int], dim: int, num_ranks: int) -> torch.Tensor:
    length, before, after = shape[dim], shape[:dim], shape[dim + 1 :]
    of_each = shard_rows([length], num_ranks)
    num_whole = length // of_each if of_each else 0
    left = length - num_whole * of_each  # the part of the last rank that has one, without its padding
    whole, last = rows.split([length - left, left]) if left else (rows, None)
    parts = whole.view(num_whole, *before, of_each, *after).movedim(0, dim)
    side_by_side = parts.contiguous().view(*before, length - left, *after)
    return side_by_side if last is None else torch.cat([side_by_side, last.view(*before, left, *after)], dim)


ops.LIBRARY.define("assemble(Tensor(a) rows, int[] shape, int dim, int num_ranks) -> Tensor(a)")
ops.LIBRARY.impl("assemble", _assemble, "CompositeImplicitAutograd")
ASSEMBLE = torch.ops.fsdp.assemble.default
"""One call where Dynamo traces a read; what it consists of, once autograd traces it.

Args:
    rows: as `fsdp::unshard` returns them, or what is gathered otherwise: every rank's part, one after another.
    shape: of the parameter, whose dimension `dim` so many ranks share.
"""
