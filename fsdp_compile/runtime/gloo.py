"""Gloo for collectives that overlap: gathers and reductions as messages from rank to rank."""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
_NUM_TAGS = 1 << 30
TOGETHER = 64 << 10
"""Bytes of a rank's part up to which the parts of one collective are one message: they are copied faster than sent."""


def overlapping_group(group: dist.ProcessGroup, device_type: str) -> dist.ProcessGroup:
    """The group to overlap collectives on: `group`, or, if that is gloo's, a `DirectGloo` of the same ranks.

    Every rank of the group calls this.

    The new group is known by its name only, not to `torch.distributed`: that names groups by how many a rank knows, so
    that ranks which know different numbers of groups never find each other. Private, as of torch 2.11 to 2.13: how a
    `ProcessGroup` is put together, the options of `ProcessGroupGloo`.
    """
    backend: Any = group._get_backend(torch.device(device_type))
    if not dist.is_gloo_available() or not isinstance(backend, distributed_c10d.ProcessGroupGloo):
        return group
    if group not in _groups:
        _groups[group] = _direct(group, backend.options, device_type)
    return _groups[group]


def close(name: Any) -> None:
    """Let go of a group that was made here: where another rank waits for this one in it, that raises."""
    for group, made in list(_groups.items()):
        if made is not group and made.group_name == name:
            torch._C._distributed_c10d._unregister_process_group(name)
            del _groups[group]


def _direct(group: dist.ProcessGroup, options: Any, device_type: str) -> dist.ProcessGroup:
    gloo: Any = distributed_c10d.ProcessGroupGloo
    name: Any = f"{group.group_name}/fsdp_compile"
    store = distributed_c10d.PrefixStore(f"{name}/", distributed_c10d._get_default_store())
    one_thread = gloo._Options()
    one_thread._threads = 1
    one_thread._devices, one_thread._timeout = options._devices, options._timeout
    backend = gloo(store, group.rank(), group.size(), one_thread)
    kind: Any = DirectGloo if device_type == "cpu" else dist.ProcessGroup  # gloo sends messages from the host only
    made = kind(group.rank(), group.size())
    made._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    made._register_backend(torch.device(device_type), dist.ProcessGroup.BackendType.GLOO, backend)
    made._set_group_name(name)
    torch._C._distributed_c10d._register_process_group(name, made)
    return made  # type: ignore[no-any-return]


class DirectGloo(dist.ProcessGroup):
    """A group of gloo whose gathers and reductions send each part straight to where it belongs.

    Gloo's own copy their input and output, keep a thread busy, and its reduce-scatter sends as much as an all-reduce.
    A message from rank to rank is read from and written to the tensors themselves, by the thread that serves gloo's
    sockets; the parts are summed up by whoever waits. Of a call for several tensors the small parts are one message.
    All other collectives are gloo's, on one thread: with two threads each notes, in one string and without a lock, the
    name of the collective that it completed last, and when two complete at the same time, memory is freed twice.

    `torch.distributed` calls a subclass's methods by these names; from torch 2.13 on it prefers those given last.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # declared with a store, which is optional
        self._next_tag = 0

    def allgather_into_tensor_coalesced(
        self, output_lists: list[Tensor], input_list: list[Tensor], opts: Any = None
    ) -> _Messages:
        """Every rank's inputs, one after another in each of the outputs."""
        messages = _Messages()
        parts = [part.reshape(-1) for part in input_list]
        rows = [output.view(self.size(), -1) for output in output_lists]
        alone, together = _large_and_small(parts)
        for index in alone:
            self._gather(messages, rows[index], parts[index])
        if together:
            joined = torch.cat([parts[index] for index in together])
            gathered = joined.new_empty(self.size(), joined.numel())
            self._gather(messages, gathered, joined)
            columns = gathered.split([parts[index].numel() for index in together], 1)
            messages.copies += [(rows[index], column) for index, column in zip(together, columns, strict=True)]
        return messages

    def reduce_scatter_tensor_coalesced(
        self, outputTensors: list[Tensor], inputTensors: list[Tensor], opts: Any = None
    ) -> _Messages:
        """The sums, or means, of all ranks' inputs; this rank's part of each in one of the outputs."""
        messages = _Messages(divisor=self._divisor(opts.reduceOp))
        outputs = [output.view(-1) for output in outputTensors]
        rows = [full.contiguous().view(self.size(), -1) for full in inputTensors]
        alone, together = _large_and_small(outputs)
        for index in alone:
            self._reduce(messages, outputs[index], rows[index])
        if together:
            reduced = torch.cat([outputs[index] for index in together])
            self._reduce(messages, reduced, torch.cat([rows[index] for index in together], 1))
            parts = reduced.split([outputs[index].numel() for index in together])
            messages.copies += [(outputs[index], part) for index, part in zip(together, parts, strict=True)]
        return messages

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]  # one of three forms
        """The sums, or means, of all ranks' tensors, in their place; more than two ranks send less by gloo's ring."""
        if self.size() > 2:
            return self._gloo.allreduce(tensors, opts)
        messages = _Messages(divisor=self._divisor(opts.reduceOp))
        for tensor in tensors:
            received = torch.empty_like(tensor)
            self._exchange(messages, [tensor] * self.size(), [received] * self.size())
            messages.sums.append((tensor, tensor, [received] if self.size() == 2 else []))
        return messages

    @property
    def _gloo(self) -> Any:
        return self._get_backend(torch.device("cpu"))

    def _divisor(self, reduction: Any) -> int:
        if reduction == dist.ReduceOp.AVG:
            return self.size()
        if reduction == dist.ReduceOp.SUM:
            return 1
        raise NotImplementedError("gradients are reduced to sums or averages")

    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _gather(self, messages: _Messages, rows: Tensor, part: Tensor) -> None:
        """Every rank's part in a row each."""
        self._exchange(messages, [part] * self.size(), rows)
        rows[self.rank()].copy_(part)

    def _reduce(self, messages: _Messages, result: Tensor, rows: Tensor) -> None:
        """The sum of all ranks' rows for this rank, which is written over its own."""
        received = list(rows.new_empty(self.size() - 1, rows.shape[1]))
        landing = received[: self.rank()] + [rows[self.rank()]] + received[self.rank() :]
        self._exchange(messages, rows, landing)
        messages.sums.append((result, landing[self.rank()], received))

    def _exchange(self, messages: _Messages, outgoing: Sequence[Tensor] | Tensor, incoming: Any) -> None:
        """Send `outgoing[rank]` to every other rank, and receive what it sends in `incoming[rank]`."""
        gloo = self._gloo
        tag, self._next_tag = self._next_tag, (self._next_tag + 1) % _NUM_TAGS
        others = [(self.rank() + step) % self.size() for step in range(1, self.size())]
        if outgoing[0].numel() == 0:
            return
        messages.pending += [gloo.recv([incoming[other]], other, tag) for other in reversed(others)]
        messages.pending += [gloo.send([outgoing[other]], other, tag) for other in others]
        messages.held += [outgoing, incoming]


def _large_and_small(parts: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Which parts of a collective are a message of their own, and which are one together."""
    small = [index for index, part in enumerate(parts) if 0 < part.nbytes <= TOGETHER]
    together = set(small) if len(small) > 1 else set()
    return [index for index in range(len(parts)) if index not in together], sorted(together)


class _Messages(distributed_c10d.Work):
    """Messages under way, and what is left to do when they are there.

    Attributes:
        sums: (result, own part, the others' parts).
        copies: (target, source), after the sums.
    """

    def __init__(self, divisor: int = 1) -> None:
        super().__init__()
        self.divisor = divisor
        self.pending: list[dist.Work] = []
        self.held: list[object] = []
        self.sums: list[tuple[Tensor, Tensor, list[Tensor]]] = []
        self.copies: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        for message in self.pending:
            message.wait() if timeout is None else message.wait(timeout)
        self.pending = []
        for result, own, others in self.sums:
            first, *rest = others or [torch.zeros_like(own)]
            torch.add(own, first, out=result)
            for part in rest:
                result.add_(part)
            if self.divisor > 1:
                result.div_(self.divisor)
        for target, source in self.copies:
            target.copy_(source)
        self.sums, self.copies, self.held = [], [], []
        return True
