"""Copies between the CPU's memory and that of a GPU, which run beside what the GPU computes.

Each GPU has a stream for them. A copy waits there for what the stream of the computation was given before: its source
is computed then, and nothing uses the memory any more that it fills. The stream of the computation waits for the copy
in `copy_wait`, and the host for all copies in `copies_done`.

Until its wait, a copy keeps its source and its result alive, also if an error comes between.
"""

from __future__ import annotations

import dataclasses

import torch

from ..passes import ops


@dataclasses.dataclass(frozen=True)
class _Copy:
    source: torch.Tensor
    copied: torch.Tensor
    end: torch.Event


_started: dict[int, _Copy] = {}
"""Copies that nothing has waited for, by the address that they fill."""


_streams: dict[torch.device, torch.Stream] = {}


def _stream_of(gpu: torch.device) -> torch.Stream:
    if gpu not in _streams:
        _streams[gpu] = torch.Stream(gpu)
    return _streams[gpu]


def _copy_start(source: torch.Tensor, device: torch.device, pin_memory: bool) -> torch.Tensor:
    is_offloaded = device.type == "cpu"
    gpu = source.device if is_offloaded else device
    copied = torch.empty(source.shape, dtype=source.dtype, device=device, pin_memory=is_offloaded and pin_memory)
    stream = _stream_of(gpu)
    stream.wait_stream(torch.accelerator.current_stream(gpu))
    with stream:
        copied.copy_(source, non_blocking=True)
    _started[copied.data_ptr()] = _Copy(source, copied, stream.record_event())
    return copied


def _copy_wait(copied: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    copy = _started.pop(copied.data_ptr(), None)
    if copy is not None:  # it was done already, else
        gpu = source.device if copied.device.type == "cpu" else copied.device
        torch.accelerator.current_stream(gpu).wait_event(copy.end)
    return copied.view_as(copied)


def _copies_done(on_cpu: list[torch.Tensor]) -> None:
    for stream in list(_streams.values()):
        stream.synchronize()
    for address, copy in list(_started.items()):  # left over where an error came before the wait
        if copy.end.query():
            _started.pop(address, None)


ops.LIBRARY.impl("copy_start", _copy_start, "CompositeExplicitAutograd")
ops.LIBRARY.impl("copy_wait", _copy_wait, "CompositeExplicitAutograd")
ops.LIBRARY.impl("copies_done", _copies_done, "CompositeExplicitAutograd")
