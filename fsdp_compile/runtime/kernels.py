"""Kernels of `fsdp::unshard` and `fsdp::reduce_gradient`, so that a sharded model also runs where nothing is compiled.

They communicate for one parameter at a time: right, not fast. Compiled graphs never reach them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives
import torch.nn.functional as F

from ..passes import ops
from .gradients import note_received

_c10d = torch.ops._c10d_functional


def _unshard(
    shard: torch.Tensor,
    bucket: str,
    parameter: str,
    offset: int,
    shape: list[int],
    world_size: int,
    group: str,
    *_: Any,
) -> torch.Tensor:
    chunk = shard[offset : offset + ops.shard_numel(shape, world_size)]
    if world_size == 1:
        return chunk.clone().view(shape)
    gathered = _c10d.wait_tensor(_c10d.all_gather_into_tensor(chunk.contiguous(), world_size, group))
    rows: torch.Tensor = gathered.view(-1, *shape[1:])
    return rows[: shape[0]].contiguous()


def _reduce_gradient(
    gradients: list[torch.Tensor],
    bucket: str,
    parameters: list[str],
    offsets: list[int],
    numel: int,
    world_size: int,
    group: str,
    replicas: int,
    replica_group: str,
    reduction: str,
) -> torch.Tensor:
    reduced = gradients[0].new_zeros(numel)
    for gradient, offset in zip(gradients, offsets, strict=True):
        missing = ops.shard_numel(gradient.shape, world_size) * world_size - gradient.numel()
        chunk = F.pad(gradient.reshape(-1), (0, missing))
        if world_size > 1:
            chunk = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(chunk, reduction, world_size, group))
        reduced[offset : offset + chunk.numel()] = chunk
    if replicas > 1:
        reduced = _c10d.wait_tensor(_c10d.all_reduce(reduced, reduction, replica_group))
    return reduced


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.shard, ctx.arguments = inputs[0], inputs[1:]


def _unshard_backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    bucket, parameter, offset, _, *axes = ctx.arguments
    note_received(ctx.shard, [offset])
    numel = ctx.shard.numel()
    reduced = torch.ops.fsdp.reduce_gradient([gradient], bucket, [parameter], [offset], numel, *axes)
    return (reduced, *[None] * len(ctx.arguments))


ops.LIBRARY.impl("unshard", _unshard, "CompositeExplicitAutograd")
ops.LIBRARY.impl("store", lambda value: value.view_as(value), "CompositeExplicitAutograd")
ops.LIBRARY.impl("reduce_gradient", _reduce_gradient, "CompositeExplicitAutograd")
torch.library.register_autograd("fsdp::unshard", _unshard_backward, setup_context=_setup_context, lib=ops.LIBRARY)
