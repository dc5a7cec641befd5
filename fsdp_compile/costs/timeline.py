"""Timelines: when each kernel and each collective of the scheduled graphs runs, and what of the communication shows.

Compute runs in the order of the graph. A collective starts once compute has reached it and the collectives before it in
its process group are done; a wait stops compute until its collective is done. What compute stands still for is exposed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch.fx

from ..passes import ops
from ..runtime.groups import ranks_of_group
from . import collectives
from .arithmetic import largest, smallest
from .collectives import Ring
from .hardware import Hardware
from .nodes import full_bytes, num_bytes
from .work import Work

COMPUTE, COPIES = "compute", "copies"


@dataclasses.dataclass(frozen=True)
class Step:
    """What compute comes to: a kernel, the start of a collective or of a copy between devices, or a wait for one.

    Attributes:
        lane: "compute", "copies" of a copy that starts, or the process group of a collective that does.
        seconds: how long it takes if nothing else runs; a wait takes none.
    """

    lane: str
    node: torch.fx.Node
    seconds: float

    @property
    def is_wait(self) -> bool:
        return ops.is_call(self.node, ops.WAIT, ops.COPY_WAIT)


@dataclasses.dataclass(frozen=True)
class Event:
    """One kernel, collective or copy between devices.

    Attributes:
        lane: "compute", "copies", or the process group.
        start, end: seconds since the beginning of the step.
    """

    lane: str
    node: torch.fx.Node
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A step of forward and backward.

    Attributes:
        exposed: seconds that compute stood still, by the wait that it stood at.
        compute: seconds of all kernels, the model's own collectives among them, if nothing else ran.
    """

    events: Sequence[Event]
    exposed: Mapping[torch.fx.Node, float]
    seconds: float
    compute: float

    @property
    def sending(self) -> Mapping[str, float]:
        """Seconds of collectives, by process group, and of copies between devices."""
        lanes = dict.fromkeys(event.lane for event in self.events if event.lane != COMPUTE)
        return {lane: sum(event.end - event.start for event in self.events if event.lane == lane) for lane in lanes}

    @property
    def communication(self) -> Mapping[str, float]:
        """Seconds of the collectives, by process group."""
        return {lane: seconds for lane, seconds in self.sending.items() if lane != COPIES}

    @property
    def lower_bound(self) -> float:
        """Seconds that no order of the same work can go below: of compute, one group's messages, or all copies."""
        return max(self.compute, *self.sending.values(), 0.0)


def simulate(work: Work, hardware: Hardware, rings: Mapping[str, Ring]) -> Timeline:
    """The timeline of the work on this hardware.

    Args:
        rings: of every process group that the graphs name.
    """
    return run(steps_of(work, hardware, rings), hardware)


def run(steps: Sequence[Step], hardware: Hardware) -> Timeline:
    """The timeline of these steps."""
    clock = Clock(hardware.contention)
    clock.run(steps)
    compute = sum(step.seconds for step in steps if step.lane == COMPUTE)
    return Timeline(clock.events, clock.exposed, clock.end, compute)


def steps_of(work: Work, hardware: Hardware, rings: Mapping[str, Ring]) -> list[Step]:
    """What compute comes to in forward and backward, in order; arguments are those of `simulate`."""
    steps = []
    for side in work.sides:
        kernel_at = {kernel.nodes[-1]: kernel for kernel in side.kernels}  # what a kernel reads must all be there
        for node in side.graph.nodes:
            if ops.is_collective(node) or ops.is_call(node, ops.COPY_START):
                steps.append(start_step(node, rings, hardware))
            elif ops.is_call(node, ops.WAIT, ops.COPY_WAIT):
                steps.append(Step(COMPUTE, node, 0.0))
            elif node in kernel_at:
                steps.append(Step(COMPUTE, node, kernel_at[node].seconds(hardware)))
    return steps


def start_step(node: torch.fx.Node, rings: Mapping[str, Ring], hardware: Hardware) -> Step:
    """The start of a collective or of a copy between devices."""
    if ops.is_call(node, ops.COPY_START):
        return Step(COPIES, node, num_bytes(node.meta["val"]) / hardware.host_bandwidth)
    lane = ops.argument(node, "group")
    return Step(lane, node, seconds_of(node, rings[lane], hardware))


class Clock:
    """Runs steps one after another.

    Times are numbers, or expressions in symbols. `let` may give one a name for later ones to be written with; its kind
    is "now" or "done" (when compute, or a collective, is), "exposed" (in a wait), or "contended" (of a kernel).
    """

    def __init__(self, contention: float, let: Callable[[str, Any], Any] = lambda kind, value: value) -> None:
        self.contention, self.let = contention, let
        self.now: Any = 0
        self.free_at: dict[str, Any] = {}
        self.done_at: dict[torch.fx.Node, Any] = {}
        self.events: list[Event] = []
        self.exposed: dict[torch.fx.Node, Any] = {}

    @property
    def end(self) -> Any:
        return largest(self.now, *self.free_at.values())

    def run(self, steps: Iterable[Step]) -> None:
        for step in steps:
            if step.is_wait:
                self._wait(step.node)
            elif step.lane == COMPUTE:
                self._compute(step)
            else:
                self._start(step)

    def _start(self, step: Step) -> None:
        start = largest(self.now, self.free_at.get(step.lane, 0))
        end = self.let("done", start + step.seconds)
        self.free_at[step.lane] = self.done_at[step.node] = end
        self.events.append(Event(step.lane, step.node, start, end))

    def _wait(self, node: torch.fx.Node) -> None:
        done = self.done_at.get(node.all_input_nodes[0], 0)  # what earlier calls have gathered is there
        exposed = largest(0, done - self.now)
        if exposed != 0:
            self.exposed[node] = self.let("exposed", exposed)
            self.now = self.let("now", largest(self.now, done))

    def _compute(self, step: Step) -> None:
        """Compute is slower while collectives run; copies have engines of their own."""
        ends = (free_at for lane, free_at in self.free_at.items() if lane != COPIES)
        busy = largest(0, *(end - self.now for end in ends))
        contended = self.let("contended", smallest(busy, step.seconds * self.contention))
        end = self.let("now", self.now + contended + step.seconds - contended / self.contention)
        self.events.append(Event(COMPUTE, step.node, self.now, end))
        self.now = end


def seconds_of(node: torch.fx.Node, ring: Ring, hardware: Hardware) -> float:
    """Seconds of one collective."""
    if ops.is_call(node, ops.ALL_REDUCE):
        return collectives.all_reduce(full_bytes(node), ring, hardware)
    if ops.is_call(node, ops.ALL_TO_ALL):
        return collectives.all_to_all(full_bytes(node), ring, hardware)
    gathers = ops.is_all_gather(node) or ops.is_call(node, ops.ALL_GATHER_SUMS)
    collective = collectives.all_gather if gathers else collectives.reduce_scatter
    return collective(full_bytes(node), ring, hardware) + (num_messages(node) - 1) * hardware.message_start


def num_messages(node: torch.fx.Node) -> int:
    """Of a gather or a reduction: a grouped one sends every parameter by itself."""
    if ops.is_call(node, ops.ALL_GATHER_GROUPED):
        return max(1, len(ops.parameters_of(node)))
    return len(ops.argument(node, "gradients")) if ops.is_call(node, ops.REDUCE_SCATTER_GROUPED) else 1


def sent_by(node: torch.fx.Node, ring: Ring) -> float:
    """Bytes that a rank sends in one collective; an all-reduce moves everything twice."""
    return collectives.sent(full_bytes(node), ring) * (2 if ops.is_call(node, ops.ALL_REDUCE) else 1)


def rings_of(work: Work, hardware: Hardware) -> dict[str, Ring]:
    """The rings of the groups that the graphs name.

    Where this process does not know their ranks, as of a mesh that is only planned for, neighbouring ranks are sharded
    over together.
    """
    found = [node for side in work.sides for node in side.graph.nodes if ops.is_collective(node)]
    sharding = {ops.argument(node, "group") for node in found if not ops.is_over_replicas(node)}
    size_of_group = {ops.argument(node, "group"): ops.argument(node, "world_size") for node in found}
    num_shards = largest(1, *(size_of_group[group] for group in sharding))
    return {
        group: Ring.of_axis(size, _stride_of(group) or (1 if group in sharding else num_shards), hardware)
        for group, size in size_of_group.items()
    }


def _stride_of(group: str) -> int | None:
    """How far apart neighbouring ranks of a group are; None where that is not known."""
    ranks = ranks_of_group(group)
    return None if ranks is None or len(ranks) == 1 else ranks[1] - ranks[0]
