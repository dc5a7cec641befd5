"""Late starts: a plan that takes as long with each gather started as late as costs nothing, which lowers the peak."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import accumulate
from operator import sub
from typing import NamedTuple

from .chains import Chain, ChainClock, ChainPlan, Channel, gather_seconds

_NEGLIGIBLE = 1e-11
"""What rounding may do to a sum of seconds, relative to it."""


def delayed(chain: Chain, plan: ChainPlan, channel: Channel) -> ChainPlan:
    """The plan with every start as late as costs nothing.

    One sweep from the end: `deadline` is when compute has to be at a position for the plan to take no longer than it
    does. What comes before a position is as in the plan until it is moved, and once it is, the deadline has been told
    of all the starts after it. Times on the channel leave reductions out, as in `search.py`.
    """
    clock, reduced = ChainClock(chain, plan, channel), chain.reduced
    arrivals = _Arrivals.of(chain, plan, channel, clock.reached)
    deadline = max(clock.free, clock.reached[-1]) * (1 - _NEGLIGIBLE)
    begins = free = deadline - reduced[-1]  # of the channel: for the next gather, and for the next reduction
    launches = [math.inf] * len(reduced)  # the same for the gathers started at a position
    gathers, start = list(plan.gathers), len(chain.seconds)
    index, item = len(gathers) - 1, len(chain.items) - 1
    for step in reversed(range(len(chain.seconds))):
        free = min(free, launches[step + 1])
        if reduced[step] < reduced[step + 1]:
            deadline = min(deadline, free + reduced[step])
        deadline -= chain.seconds[step]
        while item >= 0 and chain.items[item].first == step:
            if gathers[index].is_packed:
                deadline -= chain.items[item].num_bytes / channel.copy_bandwidth
            if item == gathers[index].begin:
                start = arrivals.latest_start(index, min(step, start), deadline, begins)
                gathers[index] = dataclasses.replace(gathers[index], start=start)
                begins = min(deadline - reduced[start], begins) - arrivals.gathers[index]
                launches[start] = min(launches[start], begins)
                index -= 1
            item -= 1
        deadline = min(deadline, launches[step] + reduced[step])
    return ChainPlan(tuple(gathers))


class _Arrivals(NamedTuple):
    """When a plan's collectives are done, in time on the channel.

    Attributes:
        starts, gathers: of its gathers, the positions and the seconds.
        done: done[i] is when the gathers before the i-th are.
        reached: when compute is at a position.
        clear: when the reductions before a position are done, and compute is there.
        reduced: seconds of those reductions.
    """

    starts: Sequence[int]
    gathers: Sequence[float]
    done: Sequence[float]
    reached: Sequence[float]
    clear: Sequence[float]
    reduced: Sequence[float]

    @classmethod
    def of(cls, chain: Chain, plan: ChainPlan, channel: Channel, reached: Sequence[float]) -> _Arrivals:
        starts = [gather.start for gather in plan.gathers]
        gathers = [gather_seconds(chain, gather, channel) for gather in plan.gathers]
        reduced = chain.reduced
        clear = list(accumulate(map(sub, reached, [0.0, *reduced]), max))
        done = accumulate(zip(starts, gathers, strict=True), lambda d, b: max(d, clear[b[0]]) + b[1], initial=0.0)
        return cls(starts, gathers, list(done), list(map(sub, reached, reduced)), clear, reduced)

    def latest_start(self, index: int, start: int, deadline: float, begins: float) -> int:
        """The last position up to `start` at which a gather could start, and be there when compute and channel go on.

        Reductions that it is moved past are then before it on the channel, as are the gathers before it.
        """
        first = self.starts[index]
        while start > first:
            is_moved_past = self.reduced[start] > self.reduced[first]
            begin = max(self.done[index], self.clear[start]) if is_moved_past else self.reached[start]
            if begin <= min(deadline - self.reduced[start], begins) - self.gathers[index]:
                break
            start -= 1
        return start
