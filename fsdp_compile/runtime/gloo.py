"""Gloo with a single thread, for collectives that overlap."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_serial_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def serial_group(group: dist.ProcessGroup, device_type: str) -> dist.ProcessGroup:
    """The group to overlap collectives on: `group`, or, if that is gloo's, one of the same ranks with one thread.

    A group of gloo has two threads, and each notes, in one string and without a lock, the name of the collective that
    it completed last. `ALLGATHER_COALESCED` is too long to be stored in place: when two gathers complete at the same
    time, memory is freed twice, and some thousand steps later the process aborts. Every rank of the group calls this.

    The new group is known by its name only, not to `torch.distributed`: that names groups by how many a rank knows, so
    that ranks which know different numbers of groups never find each other. Private, as of torch 2.11 to 2.13: how a
    `ProcessGroup` is put together, the options of `ProcessGroupGloo`.
    """
    backend: Any = group._get_backend(torch.device(device_type))
    if not dist.is_gloo_available() or not isinstance(backend, distributed_c10d.ProcessGroupGloo):
        return group
    if group not in _serial_groups:
        _serial_groups[group] = _with_one_thread(group, backend.options, device_type)
    return _serial_groups[group]


def _with_one_thread(group: dist.ProcessGroup, options: Any, device_type: str) -> dist.ProcessGroup:
    gloo: Any = distributed_c10d.ProcessGroupGloo
    name: Any = f"{group.group_name}/fsdp_compile"
    store = distributed_c10d.PrefixStore(f"{name}/", distributed_c10d._get_default_store())
    one_thread = gloo._Options()
    one_thread._threads = 1
    one_thread._devices, one_thread._timeout = options._devices, options._timeout
    made: Any = dist.ProcessGroup(store, group.rank(), group.size())
    made._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    backend = gloo(store, group.rank(), group.size(), one_thread)
    made._register_backend(torch.device(device_type), dist.ProcessGroup.BackendType.GLOO, backend)
    made._set_group_name(name)
    torch._C._distributed_c10d._register_process_group(name, made)
    return made  # type: ignore[no-any-return]
