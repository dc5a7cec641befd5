"""Chains and plans: what a direction of a step computes and reads, how its items are gathered, what that takes.

A chain is compute in order, with the items that it reads. A plan cuts the items, in order of first use, into
gathers. A gather is one collective. Collectives run one after another; each begins once compute has reached the
position where it is started. Before the first use of a gather's items compute waits for it. Memory is counted by
position, without a clock: what has been started is in memory.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise


@dataclasses.dataclass(frozen=True)
class Item:
    """An item of a chain.

    What is planned as one may be several items that are always sent together.

    Attributes:
        num_bytes: of the full item.
        first, last: the first and the last compute step that reads it.
        num_messages: where it is not packed.
        kind: only items of one kind can be in a gather.
        copied: the last step that a part of it is copied out of a buffer for, where it is packed; not before `first`.
    """

    num_bytes: int
    first: int
    last: int
    num_messages: int = 1
    kind: int = 0
    copied: int = 0


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A collective that is started by the graph, not by the plan, and that the gathers share the channel with.

    Attributes:
        step: the compute step after which it is started.
    """

    seconds: float
    step: int


@dataclasses.dataclass(frozen=True)
class Chain:
    """One direction of a step: compute in order, and what it reads.

    Attributes:
        seconds: of each compute step.
        held: bytes that are in memory anyway during each step.
        items: in order of first use.
        reductions: in order; the chain has ended when they have.
    """

    seconds: Sequence[float]
    held: Sequence[int]
    items: Sequence[Item]
    reductions: Sequence[Reduction] = ()

    def __post_init__(self) -> None:
        assert len(self.seconds) == len(self.held)
        assert all(a.first <= b.first for a, b in pairwise(self.items)), "items are in order of first use"
        assert all(0 <= p.first <= p.last < len(self.seconds) for p in self.items)

    @property
    def reduced(self) -> list[float]:
        """Seconds of the reductions that are started before each position, the end included."""
        seconds = [0.0] * len(self.seconds)
        for reduction in self.reductions:
            seconds[reduction.step] += reduction.seconds
        return [0.0, *accumulate(seconds)]

    @property
    def unpacked(self) -> list[int]:
        """For each item, the last step at which a buffer that ends with it is in memory.

        That is until the next item is used, even where that comes before its own last part.
        """
        nexts = [*(item.first for item in self.items[1:]), len(self.seconds) - 1]
        return [max(item.first, min(item.copied, step)) for item, step in zip(self.items, nexts, strict=False)]

    @property
    def lowest_peak(self) -> int:
        """Bytes that no plan goes below: every item in memory from its first use to its last, nothing else."""
        return max(_in_memory(self, ((p.num_bytes, p.first, p.last) for p in self.items)), default=0)


@dataclasses.dataclass(frozen=True)
class Channel:
    """What collectives cost.

    Attributes:
        start: seconds that every collective takes.
        per_message: seconds more for every message of those that are not packed.
        bandwidth: bytes of full items in a second.
        copy_bandwidth: bytes in a second that compute copies out of a buffer.
    """

    start: float
    per_message: float
    bandwidth: float
    copy_bandwidth: float

    def seconds(self, num_bytes: int, num_messages: int) -> float:
        """Seconds of one collective, `num_messages` 0 if it is packed into one."""
        return self.start + self.per_message * num_messages + num_bytes / self.bandwidth


@dataclasses.dataclass(frozen=True)
class ChainGather:
    """Consecutive items that are gathered by one collective.

    Attributes:
        begin, end: the items, `end` excluded.
        start: the compute step that the collective is started before; at most the first use of item `begin`.
        is_packed: whether they are one message, which compute copies them out of.
    """

    begin: int
    end: int
    start: int
    is_packed: bool


@dataclasses.dataclass(frozen=True)
class ChainPlan:
    """The gathers of a chain, consecutive; their starts do not decrease."""

    gathers: Sequence[ChainGather]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a plan comes to.

    Attributes:
        seconds: of all: compute, copies, what compute stands still for, and reductions after it.
        exposed: seconds that compute stands still.
        peak: most bytes in memory during a step.
    """

    seconds: float
    exposed: float
    peak: int


def evaluate(chain: Chain, plan: ChainPlan, channel: Channel) -> Outcome:
    """What a plan takes.

    At a position compute first starts the collectives that are due, then waits for and copies out one item after
    another, then runs the step. An item sent as a message of its own is in memory from the start of its gather to
    its last use. A packed one is in memory twice: in the buffer, from the start of its gather until the last of the
    gather's items is copied out, and as a copy, from its first use to its last.
    """
    clock = ChainClock(chain, plan, channel)
    peak = max(_in_memory(chain, _lives(chain, plan)), default=0)
    return Outcome(max(clock.reached[-1], clock.free), clock.exposed, peak)


class ChainClock:
    """When a plan does what.

    Attributes:
        reached: seconds at which compute reaches each position, the end included.
        exposed: seconds that compute stands still.
        free: seconds at which the last collective is done.
    """

    def __init__(self, chain: Chain, plan: ChainPlan, channel: Channel) -> None:
        self.reached, self.exposed, self.free = [0.0], 0.0, 0.0
        now = 0.0
        due, reductions, next_item = deque(plan.gathers), deque(chain.reductions), 0
        done: deque[float] = deque()
        gather_of = [gather for gather in plan.gathers for _ in range(gather.begin, gather.end)]
        for step, seconds in enumerate(chain.seconds):
            while due and due[0].start <= step:
                self.free = max(now, self.free) + gather_seconds(chain, due.popleft(), channel)
                done.append(self.free)
            while next_item < len(gather_of) and chain.items[next_item].first == step:
                gather = gather_of[next_item]
                if next_item == gather.begin:
                    arrival = max(now, done.popleft())
                    self.exposed += arrival - now
                    now = arrival
                if gather.is_packed:
                    now += chain.items[next_item].num_bytes / channel.copy_bandwidth
                next_item += 1
            now += seconds
            self.reached.append(now)
            while reductions and reductions[0].step <= step:
                self.free = max(now, self.free) + reductions.popleft().seconds


def gather_seconds(chain: Chain, gather: ChainGather, channel: Channel) -> float:
    items = chain.items[gather.begin : gather.end]
    num_messages = 0 if gather.is_packed else sum(item.num_messages for item in items)
    return channel.seconds(sum(item.num_bytes for item in items), num_messages)


def _lives(chain: Chain, plan: ChainPlan) -> Iterator[tuple[int, int, int]]:
    """Bytes, and the first and last step during which they are in memory."""
    unpacked = chain.unpacked
    for gather in plan.gathers:
        for item in chain.items[gather.begin : gather.end]:
            if gather.is_packed:
                yield item.num_bytes, gather.start, unpacked[gather.end - 1]
                yield item.num_bytes, item.first, item.last
            else:
                yield item.num_bytes, gather.start, item.last


def _in_memory(chain: Chain, lives: Iterable[tuple[int, int, int]]) -> list[int]:
    """Bytes in memory during each step."""
    change = [0] * (len(chain.held) + 1)
    for num_bytes, begin, end in lives:
        change[begin] += num_bytes
        change[end + 1] -= num_bytes
    return [held + live for held, live in zip(chain.held, accumulate(change), strict=False)]


def plain_plan(chain: Chain, ends: Sequence[int], *, depth: int = 1, is_packed: bool = False) -> ChainPlan:
    """One gather per unit, started just before the unit `depth` before it is first used.

    Args:
        ends: for each unit the index after its last item; the last one is the number of items.
    """
    begins = [0, *ends[:-1]]
    starts = [chain.items[begins[max(0, unit - depth)]].first for unit in range(len(begins))]
    return ChainPlan(tuple(ChainGather(*gather, is_packed) for gather in zip(begins, ends, starts, strict=True)))
