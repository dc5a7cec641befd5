"""Kernels of the operators that the front end emits, so that a sharded model also runs where nothing is compiled.

They communicate for one parameter at a time: right, not fast. Compiled graphs never reach them.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ..errors import ConfigError
from ..passes import forms, ops
from ..passes.padding import shard_numel
from .agreement import Agreement
from .collectives import gather_chunk, reduce_packed, running_alone, wait
from .gradients import note_gradients, shard_of

_is_capturing = contextvars.ContextVar("fsdp_compile_is_capturing", default=False)


@contextmanager
def capturing() -> Iterator[None]:
    """Gradients may be traced: a compiled backward will say which parameters it has some for."""
    token = _is_capturing.set(True)
    try:
        yield
    finally:
        _is_capturing.reset(token)


def _unshard(
    shard: torch.Tensor,
    accumulated: torch.Tensor | None,
    residual: torch.Tensor | None,
    gradient: str,
    bucket: str,
    parameter: str,
    offset: int,
    shape: list[int],
    world_size: int,
    group: str,
    dtype: torch.dtype | None,
    device: torch.device | None,
    gather_form: str,
    replicas: int,
    replica_group: str,
    reduction: str,
    divisor: float,
    reduce_dtype: torch.dtype | None,
    reduce_form: str,
    all_reduce_form: str,
    gathered: torch.Tensor | None = None,
) -> torch.Tensor:
    if gathered is not None:
        return wait(gathered).view(-1, *shape[1:])[: shape[0]].clone()
    taken, computed_in = shard_numel(shape, world_size), dtype or shard.dtype
    section = shard[offset : offset + taken]
    if world_size == 1:
        chunk = section.to(device=device or shard.device, dtype=computed_in)
        return (chunk.clone() if chunk.data_ptr() == section.data_ptr() else chunk).view(shape)
    region = forms.region_at(0, shape, taken, gather_form, computed_in, taken)
    chunk = torch.cat(forms.into_form(forms.eagerly, section.to(device or shard.device), [], region, shard.dtype))
    with running_alone(f"the gather of {parameter}", _agreement_of(shard), group):
        gathered = gather_chunk(chunk, world_size, group).view(world_size, -1)
    full: torch.Tensor = forms.out_of_form(forms.eagerly, gathered, [world_size], region, computed_in)
    return full.view(-1, *shape[1:])[: shape[0]].contiguous()


def _poison(full: torch.Tensor) -> None:
    holds_nan = full.is_floating_point() or full.is_complex()
    full.fill_(math.nan if holds_nan else 1)


def _pack(
    gradients: list[torch.Tensor],
    accumulated: torch.Tensor | None,
    residual: None,
    bucket: str,
    parameters: list[str],
    offsets: list[int],
    numel: int,
    world_size: int,
    dtype: torch.dtype,
    *_: Any,
) -> torch.Tensor:
    wide = dtype if accumulated is None else accumulated.dtype
    packed = gradients[0].new_zeros(world_size, numel, dtype=wide)
    for gradient, offset in zip(gradients, offsets, strict=True):
        taken = shard_numel(gradient.shape, world_size)
        padded = F.pad(gradient.reshape(-1), (0, taken * world_size - gradient.numel()))
        packed[:, offset : offset + taken] = padded.view(world_size, taken)
    total = packed.view(-1) if accumulated is None else packed.view(-1) + accumulated
    return total.to(dtype)


def _reduce_gradient(
    gradients: list[torch.Tensor],
    accumulated: torch.Tensor | None,
    residual: torch.Tensor | None,
    bucket: str,
    parameters: list[str],
    offsets: list[int],
    numel: int,
    world_size: int,
    group: str,
    dtype: torch.dtype,
    device: torch.device,
    replicas: int,
    replica_group: str,
    reduction: str,
    divisor: float,
    reduce_dtype: torch.dtype | None,
    reduce_form: str,
    all_reduce_form: str,
) -> torch.Tensor:
    sent, shapes = reduce_dtype or gradients[0].dtype, [tuple(gradient.shape) for gradient in gradients]
    asked, is_whole = (reduce_form, all_reduce_form), accumulated is not None
    regions, of_replicas = forms.reduced_regions(offsets, shapes, world_size, asked, sent, numel, is_whole=is_whole)
    packed = _pack(gradients, accumulated, None, bucket, parameters, offsets, numel, world_size, sent)
    axes = world_size, group, dtype, device, replicas, replica_group
    return reduce_packed(packed, *axes, reduction, divisor, regions, residual, of_replicas)


def _agreement_of(data: torch.Tensor) -> Agreement | None:
    """Between the ranks of a shard's mesh; None where code is traced."""
    shard = shard_of(data)
    return None if shard is None else shard.agreement


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.shard, ctx.accumulated, ctx.residual, ctx.gradient, ctx.arguments = *inputs[:4], inputs[4:-1]
    # How `dependence.py` knows a read of a parameter, and whether there is a gradient.
    ctx.fsdp_slot = None if ctx.gradient == "none" else (inputs[4], inputs[6])
    if (shard := shard_of(ctx.shard)) is not None and ctx.gradient != "none":
        shard.awaited += 1


def _unshard_backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    bucket, parameter, offset, _, world_size, group, _, _, _, *reduction = ctx.arguments
    if get_proxy_mode() is not None and not _is_capturing.get():
        raise ConfigError(
            f"the backward of {parameter}, which is sharded, was traced by a compiler that knows nothing of sharding: "
            "the model that fsdp_compile returns is compiled already, and that of shard is compiled by "
            'torch.compile(model, backend="fsdp")'
        )
    if gradient.layout is not torch.strided:
        raise ConfigError(
            f"the gradient of {parameter}, which is sharded, is sparse, and ranks that look up other rows have no sum "
            "that could be sharded: look it up with sparse=False, or freeze it, or pass it in ignored_params"
        )
    of_shard = of_accumulated = None
    slot = bucket, [parameter], [offset], ctx.shard.numel(), world_size
    if ctx.gradient == "keep":
        of_accumulated = torch.ops.fsdp.pack([gradient], None, None, *slot, ctx.accumulated.dtype, *forms.NO_REGIONS)
    elif ctx.gradient == "reduce":
        # Where this runs, each read of a parameter comes by: what is accumulated is added once, when all are done.
        accumulated = ctx.accumulated if shard_of(ctx.shard) is None else None
        result = group, ctx.shard.dtype, ctx.shard.device
        replicas, replica_group, *_ = reduction
        groups = [name for size, name in ((world_size, group), (replicas, replica_group)) if size > 1]
        with running_alone(f"the reduction of the gradient of {parameter}", _agreement_of(ctx.shard), *groups):
            of_shard = torch.ops.fsdp.reduce_gradient([gradient], accumulated, ctx.residual, *slot, *result, *reduction)
    note_gradients(ctx.shard, [offset], is_kept=ctx.gradient == "keep")
    if (shard := shard_of(ctx.shard)) is not None:
        shard.awaited -= shard.awaited > 0
    return (of_shard, of_accumulated, None, None, *[None] * len(ctx.arguments), None)


ops.LIBRARY.impl("unshard", _unshard, "CompositeExplicitAutograd")
ops.LIBRARY.impl("store", lambda value: value.view_as(value), "CompositeExplicitAutograd")
ops.LIBRARY.impl("poison", _poison, "CompositeExplicitAutograd")
ops.LIBRARY.impl("pack", _pack, "CompositeExplicitAutograd")
ops.LIBRARY.impl("reduce_gradient", _reduce_gradient, "CompositeExplicitAutograd")
torch.library.register_autograd("fsdp::unshard", _unshard_backward, setup_context=_setup_context, lib=ops.LIBRARY)
