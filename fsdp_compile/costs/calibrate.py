"""Calibration: the profile of the machines that the ranks run on, measured in a few seconds.

Every rank takes part, and every rank gets rank 0's profile, whose digest is compared. Compute is measured while all
ranks compute, as in a step.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ..errors import ConfigError
from ..progress import phase
from ..runtime.gloo import TOGETHER, overlapping_group
from ..runtime.groups import backend_of
from ..runtime.inductor import onednn_is_faster, onednn_mm
from .hardware import Hardware, Link

_SIZES = (1 << 16, 1 << 20, 1 << 22, 1 << 24)  # bytes of messages
_REPEATS = 15  # of a call, unless that takes longer than
_SECONDS = 0.12
_FEWEST = 3
_NUM_ACTIVATIONS = 16
_NUM_GATHERS = 3  # that run while contention is measured
_NUM_OVERLAPS = 5
_LONG = 0.02  # seconds of a message that is long enough
_ALIKE = 1.25  # bandwidths within this factor are the same
_MOST_LOST = 0.95  # of compute, while a collective runs
_NEVER = 1e15  # bytes/s of a link that there is none of

_Send = Callable[[int, dist.ProcessGroup, torch.device], Callable[[], torch.Tensor]]
"""(bytes in full, group, device) to a function that starts the collective."""


def calibrate(device: torch.device, *, name: str = "measured", ranks_per_node: int = 1) -> Hardware:
    """The profile of this machine, or of the cluster if a process group is initialised; every rank calls it."""
    with phase("measuring the hardware"), _as_by_default(device):
        hardware = _compute(device, name, ranks_per_node)
        if dist.is_initialized() and dist.get_world_size() > 1:
            hardware = _of_first_rank(_communication(device, hardware), device)
        return hardware


def calibrate_network(device: torch.device, hardware: Hardware) -> Hardware:
    """The profile with what is between the ranks measured anew; every rank calls it, with the same profile.

    A network that is as fast as it was, by a first look, is left as it was: plans, and what is compiled, stay the same.
    """
    with phase("measuring the network"), _as_by_default(device):
        world = dist.group.WORLD
        assert world is not None
        found = _bandwidth(_line(_gather, world, device), world.size()) / hardware.ranks_per_node
        if 1 / _ALIKE < found / hardware.between_nodes.bandwidth < _ALIKE:
            return hardware
        return _of_first_rank(_communication(device, hardware), device)


@contextmanager
def _as_by_default(device: torch.device) -> Iterator[None]:
    """Inside, nothing that a user has entered or set changes what tensors are made and computed with."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_default_dtype(dtype)


def _of_first_rank(hardware: Hardware, device: torch.device) -> Hardware:
    profiles = [hardware]
    dist.broadcast_object_list(profiles, device=device)
    check_same(profiles[0])
    return profiles[0]


def check_same(hardware: Hardware, group: dist.ProcessGroup | None = None) -> None:
    """Raise ConfigError unless all ranks of the group (None: all ranks) have this hardware; every one of them calls it.

    Ranks that plan with different figures may decide differently, and then wait for each other's collectives forever.
    """
    found: list[tuple[str, str]] = [("", "")] * dist.get_world_size(group)
    dist.all_gather_object(found, (hardware.name, hardware.digest), group=group)
    if len(set(found)) > 1:
        rank_of_one = {described: found.index(described) for described in dict.fromkeys(found)}
        listed = ", ".join(f"{name} (digest {digest}) on rank {rank}" for (name, digest), rank in rank_of_one.items())
        raise ConfigError(
            f"the ranks have different descriptions of the hardware: {listed}; give all of them one, of the same file"
        )


def _compute(device: torch.device, name: str, ranks_per_node: int) -> Hardware:
    flops_of_dtype = {dtype: _matmul_flops(dtype, device) for dtype in _dtypes(device)}
    main = torch.float32 if device.type == "cpu" else torch.bfloat16
    small = torch.ones(1, device=device)
    nothing = Link(_NEVER, 0.0)
    return Hardware(
        name=name,
        flops={str(dtype).removeprefix("torch."): flops for dtype, flops in flops_of_dtype.items()},
        efficiency=1.0,  # the figures are of matmuls, not of data sheets
        memory_bandwidth=_memory_bandwidth(device),
        memory=_memory(device) // (ranks_per_node if device.type == "cpu" else 1),
        ranks_per_node=ranks_per_node,
        within_node=nothing,
        between_nodes=nothing,
        host_bandwidth=_host_bandwidth(device),
        collective_start=0.0,
        kernel_start=_seconds(lambda: small.add_(1), device),
        contention=1.0,
        attention_factor=_attention_factor(flops_of_dtype[main], main, device),
    )


def _dtypes(device: torch.device) -> list[torch.dtype]:
    return [torch.float32] if device.type == "cpu" else [torch.float32, torch.bfloat16, torch.float16]


def _matmul_flops(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of the three matmuls of a linear layer: its output, and the gradients of its input and its weight."""
    rows, width, out = (1024, 512, 2048) if device.type == "cpu" else (8192, 8192, 8192)
    shapes = (rows, width), (out, width), (rows, out)
    x, weight, gradient = (torch.ones(shape, dtype=dtype, device=device) for shape in shapes)
    matmul = _matmul(dtype, device)
    calls = (
        lambda: matmul(x, weight.t()),
        lambda: matmul(gradient, weight),
        lambda: matmul(gradient.t(), x),
    )
    return len(calls) * 2 * rows * width * out / sum(_seconds(call, device) for call in calls)


def _attention_factor(flops: float, dtype: torch.dtype, device: torch.device) -> float:
    """How many times longer attention takes, forward and backward, than matmuls of its 14 BHSSD FLOPs."""
    batch, heads, length, dim = (4, 8, 128, 64) if device.type == "cpu" else (4, 16, 4096, 128)
    shape = (3, batch, heads, length, dim)
    query, key, value = torch.ones(shape, dtype=dtype, device=device, requires_grad=True).unbind()

    def call() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        torch.autograd.grad(out, (query, key, value), out)

    return _seconds(call, device) * flops / (14 * batch * heads * length**2 * dim)


def _matmul(dtype: torch.dtype, device: torch.device) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """What generated code multiplies matrices with."""
    is_onednn = device.type == "cpu" and dtype == torch.float32 and onednn_is_faster()
    return onednn_mm if is_onednn else torch.mm


def _memory_bandwidth(device: torch.device) -> float:
    """Bytes/s of kernels over one activation after another: what they read and write has left the caches meanwhile.

    They write to memory that is there, as the kernels of a step do from its second run on: what the system takes to
    hand out pages differs from call to call by more than the kernels.
    """
    numel = 1 << 21 if device.type == "cpu" else 1 << 24
    activations = [torch.ones(numel, device=device) for _ in range(_NUM_ACTIVATIONS)]
    outs = [torch.ones_like(activation) for activation in activations]

    def call() -> None:
        for activation, out in zip(activations, outs, strict=True):
            torch.ops.aten.gelu.out(activation, out=out)

    return 2 * sum(activation.nbytes for activation in activations) / _seconds(call, device)


def _host_bandwidth(device: torch.device) -> float:
    if device.type == "cpu":
        return _NEVER
    host = torch.ones(1 << 24, pin_memory=True)  # as offloaded shards are
    target = torch.empty_like(host, device=device)
    return host.nbytes / _seconds(lambda: target.copy_(host), device)


def _memory(device: torch.device) -> int:
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return torch.cuda.get_device_properties(device).total_memory


@dataclasses.dataclass(frozen=True)
class _Line:
    """Seconds of a message: `start`, and `each` for every byte of the full tensor."""

    start: float
    each: float

    @classmethod
    def through(cls, sizes: Sequence[int], seconds: Sequence[float]) -> _Line:
        """Fitted to the relative errors of all points, so that small messages count as much as large ones."""
        weights = [1 / value**2 for value in seconds]
        total = sum(weights)
        mean_size = sum(w * size for w, size in zip(weights, sizes, strict=True)) / total
        mean_time = sum(w * value for w, value in zip(weights, seconds, strict=True)) / total
        spread = sum(w * (size - mean_size) ** 2 for w, size in zip(weights, sizes, strict=True))
        both = sum(
            w * (size - mean_size) * (value - mean_time) for w, size, value in zip(weights, sizes, seconds, strict=True)
        )
        each = max(both / spread, 1 / _NEVER)
        return cls(max(0.0, mean_time - each * mean_size), each)


def _communication(device: torch.device, hardware: Hardware) -> Hardware:
    world = dist.group.WORLD
    assert world is not None
    gather, reduce, all_reduce = (_line(send, world, device) for send in (_gather, _reduce, _all_reduce))
    within, hop = gather, 0.0
    is_gloo = backend_of(world, device.type) == "gloo"
    num_nodes = world.size() // hardware.ranks_per_node
    bandwidth = _bandwidth(gather, world.size())
    between = _NEVER
    if num_nodes > 1:
        local, _ = dist.new_subgroups(hardware.ranks_per_node)
        within = _line(_gather, local, device) if hardware.ranks_per_node > 1 else _Line(gather.start, 1 / _NEVER)
        hop = max(0.0, gather.start - within.start) / (num_nodes - 1)
        between = bandwidth / hardware.ranks_per_node
        bandwidth = _bandwidth(within, hardware.ranks_per_node) if hardware.ranks_per_node > 1 else _NEVER
    return dataclasses.replace(
        hardware,
        within_node=Link(bandwidth, 0.0),
        between_nodes=Link(between, hop),
        collective_start=within.start,
        contention=_contention(world, device, gather),
        reduce_scatter_factor=reduce.each / gather.each,
        all_reduce_factor=all_reduce.each / gather.each,
        message_start=_message_start(world, device, gather),
        reduction_workspace=1 - 1 / world.size() if is_gloo else 0.0,  # parts to sum up
    )


def _bandwidth(line: _Line, size: int) -> float:
    return (size - 1) / size / line.each


def _line(send: _Send, group: dist.ProcessGroup, device: torch.device) -> _Line:
    seconds = []
    for size in _SIZES:
        call = send(size, group, device)
        dist.barrier(group)
        seconds.append(_seconds(lambda call=call: _wait(call()), device))  # type: ignore[misc]
        if seconds[-1] > _LONG / 2 and len(seconds) > 1:  # the same on every rank
            break
    return _Line.through(_SIZES[: len(seconds)], seconds)


def _gather(num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> Callable[[], torch.Tensor]:
    shard = torch.ones(num_bytes // 4 // group.size(), device=device)
    name = overlapping_group(group, device.type).group_name
    return lambda: torch.ops._c10d_functional.all_gather_into_tensor(shard, group.size(), name)


def _reduce(num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> Callable[[], torch.Tensor]:
    full = torch.ones(num_bytes // 4 // group.size() * group.size(), device=device)
    name = overlapping_group(group, device.type).group_name
    return lambda: torch.ops._c10d_functional.reduce_scatter_tensor(full, "sum", group.size(), name)


def _all_reduce(num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> Callable[[], torch.Tensor]:
    full = torch.ones(num_bytes // 4, device=device)
    name = overlapping_group(group, device.type).group_name
    return lambda: torch.ops._c10d_functional.all_reduce(full, "sum", name)


def _message_start(group: dist.ProcessGroup, device: torch.device, gather: _Line) -> float:
    """Seconds that a message of a grouped gather takes besides its bytes, the first one aside."""
    shard, number = torch.ones(TOGETHER // 2, device=device), 16  # large enough to be a message of its own
    name = overlapping_group(group, device.type).group_name

    def seconds(count: int) -> float:
        def call() -> None:
            shards = [shard] * count
            gathered = torch.ops._c10d_functional.all_gather_into_tensor_coalesced(shards, group.size(), name)
            for each in gathered:
                _wait(each)

        dist.barrier(group)
        return _seconds(call, device)

    of_message = (seconds(number) - seconds(1)) / (number - 1)
    return max(0.0, of_message - gather.each * shard.nbytes * group.size())


def _wait(pending: torch.Tensor) -> object:
    return torch.ops._c10d_functional.wait_tensor(pending)


def _contention(group: dist.ProcessGroup, device: torch.device, line: _Line) -> float:
    """How many times longer compute takes while a collective runs.

    Matmuls that take longer than the gathers that run meanwhile are `lost` seconds later done than without, for each
    second that the gathers take by themselves: of that second compute had the use of 1 - lost.
    """
    shape = (512, 512) if device.type == "cpu" else (4096, 4096)
    a, b = (torch.ones(shape, device=device) for _ in range(2))
    matmul = _matmul(torch.float32, device)
    gather = _gather(min(group.size() << 23, max(_SIZES[1], int(_LONG / line.each))), group, device)
    seconds = _NUM_GATHERS * _seconds(lambda: _wait(gather()), device)
    counts = [max(1, int(2 * seconds / _seconds(lambda: matmul(a, b), device)))]
    dist.broadcast_object_list(counts, device=device)

    def elapsed() -> float:
        begin = time.perf_counter()
        for _ in range(counts[0]):
            matmul(a, b)
        _synchronize_compute(device)
        return time.perf_counter() - begin

    lost = []
    for _ in range(_NUM_OVERLAPS):
        dist.barrier(group)
        alone = elapsed()
        dist.barrier(group)
        pending = [gather() for _ in range(_NUM_GATHERS)]
        lost.append((elapsed() - alone) / seconds)
        for each in pending:
            _wait(each)
    return 1 / (1 - min(max(statistics.median(lost), 0.0), _MOST_LOST))


def _synchronize_compute(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """The mean of a few calls, after one that does not count; short calls are timed in batches.

    A step takes as long as all of its kernels and messages, slow ones too, and ranks wait for each other in it. So what
    counts is the mean, and of every call the slowest rank's seconds.
    """
    call()
    begin = time.perf_counter()
    call()
    _synchronize(device)
    once = max(time.perf_counter() - begin, 1e-7)
    count = max(1, min(100, int(2e-3 / once)))
    repeats = max(_FEWEST, min(_REPEATS, int(_SECONDS / (count * once))))
    if dist.is_initialized():
        counts = [count, repeats]
        dist.broadcast_object_list(counts, device=device)  # collectives need the same number of calls everywhere
        count, repeats = counts
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(count):
            call()
        _synchronize(device)
        found.append((time.perf_counter() - begin) / count)
    slowest = torch.tensor(found, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return statistics.fmean(slowest.tolist())


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
