"""Timelines: when each kernel and each collective of the scheduled graphs runs, and what of the communication shows.

Compute runs in the order of the graph. A collective starts once compute has reached it and the collectives before it in
its process group are done; a wait stops compute until its collective is done. What compute stands still for is exposed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch.fx

from ..passes import ops
from . import collectives
from .collectives import Ring
from .hardware import Hardware
from .nodes import full_bytes, num_bytes
from .work import Work, WorkOfGraph

COMPUTE = "compute"


@dataclasses.dataclass(frozen=True)
class Event:
    """One kernel, collective or copy between devices.

    Attributes:
        lane: "compute", or the process group.
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
        compute: seconds of all kernels, if nothing else ran.
    """

    events: Sequence[Event]
    exposed: Mapping[torch.fx.Node, float]
    seconds: float
    compute: float

    @property
    def communication(self) -> Mapping[str, float]:
        """Seconds of the collectives, by process group."""
        lanes = dict.fromkeys(event.lane for event in self.events if event.lane != COMPUTE)
        return {lane: sum(event.end - event.start for event in self.events if event.lane == lane) for lane in lanes}

    @property
    def lower_bound(self) -> float:
        """Seconds that no order of the same work can go below: all of the compute, or all of one group's messages."""
        return max(self.compute, *self.communication.values(), 0.0)


def simulate(work: Work, hardware: Hardware, rings: Mapping[str, Ring]) -> Timeline:
    """The timeline of the work on this hardware.

    Args:
        rings: of every process group that the graphs name.
    """
    clock = _Clock(hardware, rings)
    for side in work.sides:
        clock.run(side)
    end = max([clock.now, *clock.free_at.values()])
    return Timeline(clock.events, clock.exposed, end, clock.compute)


class _Clock:
    """Runs graphs one after another."""

    def __init__(self, hardware: Hardware, rings: Mapping[str, Ring]) -> None:
        self.hardware, self.rings = hardware, rings
        self.now = self.compute = 0.0
        self.free_at: dict[str, float] = {}
        self.done_at: dict[torch.fx.Node, float] = {}
        self.events: list[Event] = []
        self.exposed: dict[torch.fx.Node, float] = {}

    def run(self, side: WorkOfGraph) -> None:
        kernel_at = {kernel.nodes[-1]: kernel for kernel in side.kernels}  # what a kernel reads must all be there
        for node in side.graph.nodes:
            if ops.is_collective(node):
                self._start(node)
            elif ops.is_call(node, ops.WAIT):
                self._wait(node)
            elif ops.is_call(node, ops.MOVE):
                self._compute(node, num_bytes(node.meta["val"]) / self.hardware.host_bandwidth)
            elif node in kernel_at:
                self._compute(node, kernel_at[node].seconds(self.hardware))

    def _start(self, node: torch.fx.Node) -> None:
        lane = ops.argument(node, "group")
        start = max(self.now, self.free_at.get(lane, 0.0))
        end = start + seconds_of(node, self.rings[lane], self.hardware)
        self.free_at[lane] = self.done_at[node] = end
        self.events.append(Event(lane, node, start, end))

    def _wait(self, node: torch.fx.Node) -> None:
        done = self.done_at[node.all_input_nodes[0]]
        if done > self.now:
            self.exposed[node] = done - self.now
            self.now = done

    def _compute(self, node: torch.fx.Node, seconds: float) -> None:
        """Compute is slower while collectives run."""
        busy = max(0.0, max(self.free_at.values(), default=0.0) - self.now)
        overlapped = min(busy, seconds * self.hardware.contention)
        end = self.now + overlapped + seconds - overlapped / self.hardware.contention
        self.events.append(Event(COMPUTE, node, self.now, end))
        self.now, self.compute = end, self.compute + seconds


def seconds_of(node: torch.fx.Node, ring: Ring, hardware: Hardware) -> float:
    """Seconds of one collective."""
    if ops.is_all_gather(node):
        return collectives.all_gather(full_bytes(node), ring, hardware)
    if ops.is_call(node, ops.ALL_REDUCE):
        return collectives.all_reduce(full_bytes(node), ring, hardware)
    return collectives.reduce_scatter(full_bytes(node), ring, hardware)
