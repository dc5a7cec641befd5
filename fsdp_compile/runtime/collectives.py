"""Collectives that run outside of compiled graphs, one after another."""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives

_c10d = torch.ops._c10d_functional  # private, as of torch 2.11 to 2.13


def gather_chunk(chunk: torch.Tensor, world_size: int, group: str) -> torch.Tensor:
    """All ranks' chunks of a parameter, one after another."""
    gathered: torch.Tensor = _c10d.wait_tensor(_c10d.all_gather_into_tensor(chunk.contiguous(), world_size, group))
    return gathered


def reduce_packed(
    packed: torch.Tensor,
    world_size: int,
    group: str,
    dtype: torch.dtype,
    device: torch.device,
    replicas: int,
    replica_group: str,
    reduction: str,
    divisor: float,
) -> torch.Tensor:
    """The gradient of a shard from a bucket's packed gradients, reduced over both axes in the dtype they have."""
    if world_size > 1:
        packed = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(packed, reduction, world_size, group))
    if replicas > 1:
        packed = _c10d.wait_tensor(_c10d.all_reduce(packed, reduction, replica_group))
    return (packed.to(dtype) / divisor if divisor != 1 else packed.to(dtype)).to(device)
