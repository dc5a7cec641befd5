"""Functional collectives that take place as late as they may: when they are waited for.

On a GPU a collective runs beside the compute, at some time between its start and its wait. Here it runs at the wait,
and until then its result is NaN. So a program that reads the result too early, or changes the input while the
collective may read it, computes something else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group  # type: ignore[attr-defined]

_LIBRARY = torch.library.Library("_c10d_functional", "IMPL")
_OPERATORS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

_pending: dict[int, Callable[[], object]] = {}
"""What a wait has left to do, by the address of the result."""


def install(device: str = "CPU") -> None:
    """From here on, tensors of this device are sent like this; the name is that of a dispatch key."""
    for kernel in (
        all_gather_into_tensor,
        all_gather_into_tensor_coalesced,
        all_reduce,
        all_reduce_,
        all_to_all_single,
        reduce_scatter_tensor,
        reduce_scatter_tensor_coalesced,
        wait_tensor,
    ):
        _LIBRARY.impl(kernel.__name__, kernel, device)


def unknown_(tensor: Tensor) -> Tensor:
    """Fill a tensor with what shows in any result that it has a part in."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.fill_(torch.nan)
    return tensor if tensor.dtype == torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).max)


def _group(name: str) -> dist.ProcessGroup:
    return _resolve_process_group(GroupName(name))


def all_gather_into_tensor(shard: Tensor, group_size: int, group_name: str) -> Tensor:
    full = shard.new_empty((shard.shape[0] * group_size, *shard.shape[1:]))
    group = _group(group_name)
    return _started(full, lambda: dist.all_gather_into_tensor(full, shard.contiguous(), group))


def all_gather_into_tensor_coalesced(shards: Sequence[Tensor], group_size: int, group_name: str) -> list[Tensor]:
    return [all_gather_into_tensor(shard, group_size, group_name) for shard in shards]


def reduce_scatter_tensor(full: Tensor, operator: str, group_size: int, group_name: str) -> Tensor:
    part = full.new_empty((full.shape[0] // group_size, *full.shape[1:]))
    group = _group(group_name)
    return _started(part, lambda: dist.reduce_scatter_tensor(part, full.contiguous(), _OPERATORS[operator], group))


def reduce_scatter_tensor_coalesced(
    fulls: Sequence[Tensor], operator: str, group_size: int, group_name: str
) -> list[Tensor]:
    return [reduce_scatter_tensor(full, operator, group_size, group_name) for full in fulls]


def all_to_all_single(packed: Tensor, num_received: Sequence[int], num_sent: Sequence[int], group_name: str) -> Tensor:
    received = packed.new_empty((sum(num_received), *packed.shape[1:]))
    sizes, group = (list(num_received), list(num_sent)), _group(group_name)
    return _started(received, lambda: dist.all_to_all_single(received, packed.contiguous(), *sizes, group))


def all_reduce(tensor: Tensor, operator: str, group_name: str) -> Tensor:
    result = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    group = _group(group_name)
    return _started(result, lambda: dist.all_reduce(result.copy_(tensor), _OPERATORS[operator], group))


def all_reduce_(tensor: Tensor, operator: str, group_name: str) -> Tensor:
    before, group = tensor.clone(), _group(group_name)
    return _started(tensor, lambda: dist.all_reduce(tensor.copy_(before), _OPERATORS[operator], group))


def wait_tensor(tensor: Tensor) -> Tensor:
    """The collectives of a program are waited for in one order on all ranks, so here they take place in that order."""
    run = _pending.pop(tensor.untyped_storage().data_ptr(), None)
    if run is not None:
        run()
    return tensor


def _started(result: Tensor, run: Callable[[], object]) -> Tensor:
    if result.numel():
        _pending[unknown_(result).untyped_storage().data_ptr()] = run
    return result
