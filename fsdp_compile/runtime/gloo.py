"""Gloo with a single thread, for collectives that overlap."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_BACKEND = "fsdp_gloo"
_serial_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def serial_group(group: dist.ProcessGroup, device_type: str) -> dist.ProcessGroup:
    """The group to overlap collectives on: `group`, or, if that is gloo's, one of the same ranks with one thread.

    A group of gloo has two threads, and each notes, in one string and without a lock, the name of the collective that
    it completed last. `ALLGATHER_COALESCED` is too long to be stored in place: when two gathers complete at the same
    time, memory is freed twice, and some thousand steps later the process aborts. Every rank of the group calls this.

    Private, as of torch 2.11 to 2.13: `_get_backend`, the options of `ProcessGroupGloo`.
    """
    backend: Any = group._get_backend(torch.device(device_type))
    if not dist.is_gloo_available() or not isinstance(backend, distributed_c10d.ProcessGroupGloo):
        return group
    if group not in _serial_groups:
        _register_backend()
        ranks = dist.get_process_group_ranks(group)
        order: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}  # torch 2.11 always sorts
        _serial_groups[group] = dist.new_group(
            ranks,
            backend=_BACKEND,
            pg_options=_one_thread(backend.options),
            use_local_synchronization=True,
            **order,
        )
    return _serial_groups[group]


def _one_thread(options: Any) -> Any:
    gloo: Any = distributed_c10d.ProcessGroupGloo
    copied = gloo._Options()
    copied._threads = 1
    copied._devices, copied._timeout = options._devices, options._timeout
    return copied


@functools.cache
def _register_backend() -> None:
    dist.Backend.register_backend(_BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(arguments: Any, options: Any) -> Any:
    gloo: Any = distributed_c10d.ProcessGroupGloo
    options.global_ranks_in_group, options.group_name = arguments.global_ranks_in_group, arguments.group_id
    return gloo(arguments.store, arguments.group_rank, arguments.group_size, options)
