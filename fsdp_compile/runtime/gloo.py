"""Gloo for collectives that overlap: gathers and reductions as messages from rank to rank.

What gloo receives it takes for what it waits for, if the tags are the same; if there is more of it than expected, the
thread that serves its sockets ends the process. The tag of a message therefore says what it is: where the rank is
(`runtime.places`), how many bytes there are, and all that was sent in this group before. Messages of ranks that have
parted never meet.
"""

from __future__ import annotations

import contextlib
import datetime
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from .places import chained, running_digest

_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
TOGETHER = 64 << 10
"""Bytes of a rank's part up to which the parts of one collective are one message: they are copied faster than sent."""


def overlapping_group(group: dist.ProcessGroup, device_type: str) -> dist.ProcessGroup:
    """The group to overlap collectives on: `group`, or, if that is gloo's, a `DirectGloo` of the same ranks.

    Every rank of the group calls this.

    The new group is known by its name only, not to `torch.distributed`: that names groups by how many a rank knows, so
    that ranks which know different numbers of groups never find each other. Private, as of torch 2.11 to 2.15: how a
    `ProcessGroup` is put together, the options of `ProcessGroupGloo`.
    """
    backend: Any = group._get_backend(torch.device(device_type))
    if not dist.is_gloo_available() or not isinstance(backend, distributed_c10d.ProcessGroupGloo):
        return group
    if group not in _groups:
        _groups[group] = _direct(group, backend.options, device_type)
    return _groups[group]


def name_of_original(name: str) -> str:
    """The name of the group that the group `name` was made of here; `name` itself, if it was not."""
    return next((group.group_name for group, made in _groups.items() if made.group_name == name), name)


def close(name: Any) -> None:
    """Let go of a group that was made here: what waits in it raises, on this rank and on others."""
    for group, made in list(_groups.items()):
        if made is not group and made.group_name == name:
            torch._C._distributed_c10d._unregister_process_group(name)
            del _groups[group]
            _disconnect(made)


def _disconnect(made: dist.ProcessGroup) -> None:
    """Close the connections of a group of gloo, as it does itself when a message has not come within its time limit.

    `abort` does nothing for gloo as of torch 2.11 to 2.15, and what waits in the group keeps it alive.
    """
    backend: Any = made._get_backend(made._device_types[0])
    for tag in range(len(backend.options._devices)):  # a message with this tag goes through this device
        for other in range(made.size()):
            with contextlib.suppress(RuntimeError):  # time is up, or this connection was closed before
                if other != made.rank():
                    backend.recv([torch.empty(1)], other, tag).wait(datetime.timedelta(milliseconds=1))


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


Combine = Callable[..., Tensor]
"""`torch.add` or `torch.maximum`."""


class DirectGloo(dist.ProcessGroup):
    """A group of gloo whose gathers and reductions send each part straight to where it belongs.

    Gloo's own copy their input and output, keep a thread busy, and its reduce-scatter sends as much as an all-reduce.
    A message from rank to rank is read from and written to the tensors themselves, by the thread that serves gloo's
    sockets; the parts are summed up by whoever waits. Of a call for several tensors the small parts are one message.
    All other collectives are gloo's, on one thread: with two threads each notes, in one string and without a lock, the
    name of the collective that it completed last, and when two complete at the same time, memory is freed twice. The
    graphs have none of them.

    `torch.distributed` calls a subclass's methods by these names; from torch 2.13 on it prefers those given last.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # declared with a store, which is optional
        self._chain = 0
        self._thread: ThreadPoolExecutor | None = None

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
        """The sums, means or maxima of all ranks' tensors, in their place; the same bits on all ranks."""
        is_maximum = opts.reduceOp == dist.ReduceOp.MAX
        combine = torch.maximum if is_maximum else torch.add
        messages = _Messages(divisor=1 if is_maximum else self._divisor(opts.reduceOp))
        for tensor in tensors:
            if self.size() <= 2 or tensor.nbytes <= TOGETHER:
                received = [tensor if rank == self.rank() else torch.empty_like(tensor) for rank in range(self.size())]
                self._exchange(messages, [tensor] * self.size(), received)
                messages.reductions.append((tensor, received, combine))
            else:
                self._reduce_and_gather(messages, tensor, combine)
        return messages

    def alltoall_base(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> _Messages:
        """Of the input, the part for each rank; in the output, the part from each rank.

        The numbers of bytes differ from rank to rank, so that no tag has them: the place says what they are.
        """
        messages = _Messages()
        outgoing, incoming = input_tensor.split(input_split_sizes), output_tensor.split(output_split_sizes)
        self._exchange(messages, outgoing, incoming, self._tag(0))
        incoming[self.rank()].copy_(outgoing[self.rank()])
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
    all_to_all_single = alltoall_base  # type: ignore[assignment]  # one of two forms

    def _gather(self, messages: _Messages, rows: Tensor, part: Tensor, tag: int | None = None) -> None:
        """Every rank's part in a row each."""
        self._exchange(messages, [part] * self.size(), rows, tag)
        rows[self.rank()].copy_(part)

    def _reduce(self, messages: _Messages, result: Tensor, rows: Tensor, combine: Combine = torch.add) -> None:
        """The sum (say) of all ranks' rows for this rank, which is written over its own."""
        received = list(rows.new_empty(self.size() - 1, rows.shape[1]))
        landing = received[: self.rank()] + [rows[self.rank()]] + received[self.rank() :]
        self._exchange(messages, rows, landing)
        messages.reductions.append((result, landing, combine))

    def _reduce_and_gather(self, messages: _Messages, tensor: Tensor, combine: Combine) -> None:
        """A part of the result on each rank, then all parts on all ranks: a thread begins with these as it can."""
        part_numel = -(-tensor.numel() // self.size())
        rows = tensor.new_zeros(self.size(), part_numel)
        rows.view(-1)[: tensor.numel()].copy_(tensor.reshape(-1))
        part = rows.new_empty(part_numel)
        reduced, gathered = _Messages(messages.divisor), _Messages()
        self._reduce(reduced, part, rows, combine)
        tag = self._tag(part.nbytes)

        def gather() -> None:
            reduced.wait()
            self._gather(gathered, rows, part, tag)
            gathered.wait()

        self._thread = self._thread or ThreadPoolExecutor(1, "fsdp_compile")
        messages.later.append(self._thread.submit(gather))
        messages.copies.append((tensor, rows.view(-1)[: tensor.numel()].view(tensor.shape)))

    def _tag(self, num_bytes: int) -> int:
        """Of the next messages, of this many bytes each."""
        self._chain = chained(chained(self._chain, running_digest()), num_bytes)
        return self._chain >> 33  # gloo takes 31 bits

    def _exchange(
        self, messages: _Messages, outgoing: Sequence[Tensor] | Tensor, incoming: Any, tag: int | None = None
    ) -> None:
        """Send `outgoing[rank]` to every other rank, and receive what it sends in `incoming[rank]`."""
        gloo = self._gloo
        tag = self._tag(outgoing[0].nbytes) if tag is None else tag
        others = [(self.rank() + step) % self.size() for step in range(1, self.size())]
        messages.pending += [
            gloo.recv([incoming[other]], other, tag) for other in reversed(others) if incoming[other].numel()
        ]
        messages.pending += [gloo.send([outgoing[other]], other, tag) for other in others if outgoing[other].numel()]
        messages.held += [outgoing, incoming]


def _large_and_small(parts: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Which parts of a collective are a message of their own, and which are one together."""
    small = [index for index, part in enumerate(parts) if 0 < part.nbytes <= TOGETHER]
    together = set(small) if len(small) > 1 else set()
    return [index for index in range(len(parts)) if index not in together], sorted(together)


class _Messages(distributed_c10d.Work):
    """Messages under way, and what is left to do when they are there.

    Attributes:
        later: what a thread does meanwhile.
        reductions: (result, the parts of all ranks in their order, how to combine two).
        copies: (target, source), after the reductions.
    """

    def __init__(self, divisor: int = 1) -> None:
        super().__init__()
        self.divisor = divisor
        self.pending: list[dist.Work] = []
        self.held: list[object] = []
        self.later: list[Future[None]] = []
        self.reductions: list[tuple[Tensor, list[Tensor], Combine]] = []
        self.copies: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        for message in self.pending:
            message.wait() if timeout is None else message.wait(timeout)
        for future in self.later:
            future.result(timeout.total_seconds() if timeout else None)  # torch says 0 for no limit of its own
        for reduction in self.reductions:
            self._reduce(*reduction)
        for target, source in self.copies:
            target.copy_(source)
        self.pending, self.later, self.reductions, self.copies, self.held = [], [], [], [], []
        return True

    def _reduce(self, result: Tensor, parts: list[Tensor], combine: Combine) -> None:
        """Into `result`, which may be one of the parts."""
        total = result if len(parts) <= 2 or not any(part is result for part in parts) else torch.empty_like(result)
        total.copy_(parts[0]) if len(parts) == 1 else combine(parts[0], parts[1], out=total)
        for part in parts[2:]:
            combine(total, part, out=total)
        if self.divisor > 1:
            total.div_(self.divisor)
        if total is not result:
            result.copy_(total)
