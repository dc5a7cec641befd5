"""The search: the fastest way to gather the items of a chain within a limit of bytes.

A boundary lies before each item, and one behind the last. A state is one way to gather everything before a boundary,
reduced to what later gathers can notice: when compute is there, and when the next gather could begin, for each number
of items that it may have. The search goes from boundary to boundary, extends every state by every gather that can
begin there, and drops a state if one that was found before it is no worse in anything.

Two facts make that exact:

* What is started by a step is a prefix of the items. A limit is therefore a bound on that prefix, step by step,
  and how early a gather can start depends on where it ends, not on when the others start. Nothing is done sooner when
  a collective starts later, so every gather starts as early as it fits.
* What remains, where to cut and how to send, is dynamic programming over the boundaries. Whatever follows a state can
  follow one that is no worse, and then ends no later; so nothing is lost with a state that is dropped.

Reductions change neither. Compute does not wait for them, and the channel is never idle while something is due: it is
done with the same collectives at the same time, in whatever order they come. An earlier start delays reductions, but no
later gather. Times on the channel are written without the reductions before them; how many seconds those are depends
on the position alone (`Chain.reduced`), and they are added where compute waits.

Then each start moves back as far as costs nothing, which lowers the peak (`late_starts.py`).

An example, which `tests/test_planning.py` computes: items of 2, 3 and 5 bytes, which the steps 0, 1 and 2 of 4 seconds
each use first and last. A collective takes 1 second, and 1 more for each byte. There is room for 8 bytes; nothing is
packed.

Room, for all items from the first on, is 8 bytes in step 0, 10 in step 1 (item 0 is no longer needed), and 13 in step
2. A gather that ends with item 0 or 1 can start at position 0, where 5 bytes are the most that it leads to; one that
ends with item 2 leads to 10, and starts at position 1.

    boundary   gathers so far      compute there     the next gather can begin at, by its number of items
    0          none                 0 s              0 s, 0 s; three items do not fit
    1          [0]                  3 + 4 = 7 s      3 s: the channel is free; 7 s: compute is at position 1
    2          [0 1]                6 + 8 = 14 s     10 s: compute is at position 1
    2          [0] [1]              7 + 4 = 11 s     7 s
    3          [0] [1 2]           16 + 8 = 24 s
    3          [0 1] [2]           16 + 4 = 20 s
    3          [0] [1] [2]         13 + 4 = 17 s

`[0]` is there after 3 seconds, and compute runs step 0 until 7. `[1]` begins at 3 and is there at 7, just in time.
`[2]` begins at 7 and is there at 13; compute has run step 1 by 11, waits for 2 seconds, and is done at 17. The starts
are 0, 0 and 1, and the peak is 8 bytes.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from operator import add, itemgetter, le, sub
from typing import NamedTuple

from ..errors import ConfigError
from .chains import Chain, ChainGather, ChainPlan, Channel, evaluate, plain_plan
from .late_starts import delayed


def best_plan(
    chain: Chain,
    channel: Channel,
    *,
    limit: int | None = None,
    ends: Sequence[int] | None = None,
    forms: Sequence[bool] = (False, True),
) -> ChainPlan:
    """The plan that takes least time; of those tried that take as little, the one with the lowest peak.

    Exact for chains up to 8 items. For longer ones the search keeps to what is likely (see `_Breadth`), and its
    time grows with the number of items.

    Args:
        limit: most bytes in memory during any step; None for no limit.
        ends: of units, as in `plain_plan`. The result is never slower than their plain plans that fit.
        forms: whether gathers may be packed, and not.

    Raises:
        ConfigError: no plan fits.
    """
    if limit is not None and (missing := chain.lowest_peak - limit) > 0:
        raise ConfigError(
            f"no plan fits into {limit:,} bytes: {chain.lowest_peak:,} are in use at once even if every parameter is "
            f"gathered just before its first use and freed after its last; {missing:,} are missing. Raise the limit, "
            "or lower what is in memory anyway: a smaller batch, more recomputation"
        )
    candidates = [_Search(chain, channel, limit, forms).plan()]
    if ends:
        candidates += [plain_plan(chain, ends, is_packed=is_packed) for is_packed in forms]
    candidates += [delayed(chain, candidate, channel) for candidate in candidates]
    outcomes = [evaluate(chain, candidate, channel) for candidate in candidates]
    fitting = [index for index, outcome in enumerate(outcomes) if limit is None or outcome.peak <= limit]
    return candidates[min(fitting, key=lambda index: (outcomes[index].seconds, outcomes[index].peak))]


class _Lows:
    """Steps with little room: added in order, it says which is the last one with less room than asked for."""

    def __init__(self) -> None:
        self.rooms: list[float] = []
        self.steps: list[int] = []

    def add(self, step: int, room: float) -> None:
        while self.rooms and self.rooms[-1] >= room:  # whoever does not fit there does not fit here, which is later
            self.rooms.pop()
            self.steps.pop()
        self.rooms.append(room)
        self.steps.append(step)

    def last_below(self, num_bytes: int) -> int:
        """-1 if there is room everywhere."""
        index = bisect_left(self.rooms, num_bytes)
        return self.steps[index - 1] if index else -1


class _Breadth(NamedTuple):
    """How much of what is possible is searched.

    Attributes:
        states: most states that are kept at a boundary.
        length: most items of a gather.
        ahead: most items that a gather's end is ahead of compute when it starts, in the search. The plan that is
            found starts its gathers as early as they fit.
    """

    states: int
    length: int
    ahead: int

    @classmethod
    def for_chain(cls, num_parameters: int) -> _Breadth:
        if num_parameters <= 8:  # two ways to send, cuts anywhere: fewer than 2 * 3 ** 7 states at any boundary
            return cls(2 * 3**7, 8, 8)
        return cls(max(8, 4096 // num_parameters), 32, 64)


class _State(NamedTuple):
    """A way to gather all items before a boundary.

    Attributes:
        now: seconds at which compute is done with the steps before the first use of the item at the boundary.
        free: the time on the channel at which it is done with everything so far, or compute is, if that is later.
        launches: launches[i] is the time on the channel at which the collective of the next gather can begin if it has
            i + 1 items; what it lacks does not fit. Of more items, more is in memory, so they start later.
        reduced: reduced[i] is the seconds of the reductions before that collective.
        unpacking: bytes in buffers or copies, beyond the items themselves, during the step of that first use.
        gather: the last one, with no start yet; none at the beginning.
    """

    now: float
    free: float
    launches: tuple[float, ...]
    reduced: tuple[float, ...]
    unpacking: int
    gather: ChainGather | None
    before: _State | None

    def is_no_worse(self, other: _State) -> bool:
        """Whether all is as soon as in the other. With no more to unpack there are no fewer launches."""
        return (
            self.now <= other.now
            and self.free <= other.free
            and self.unpacking <= other.unpacking
            and all(map(le, self.launches, other.launches))
            and all(map(le, self.reduced, other.reduced))
        )


class _Extension(NamedTuple):
    """One more gather.

    Attributes:
        gather: with no start yet.
        collective: seconds.
        compute: seconds from when the gather is there to the next boundary.
        spare: bytes of room that it leaves during the step of its first use.
    """

    gather: ChainGather
    collective: float
    compute: float
    spare: float

    def candidates(self, states: Iterable[_State]) -> Iterator[_Candidate]:
        """The states after which the gather fits, each with this step."""
        gather, collective, compute, spare = self
        index = gather.end - gather.begin - 1
        for state in states:  # most of the time of the search is spent here
            now, _, launches, reduced, unpacking, _, _ = state
            if index < len(launches) and unpacking <= spare:
                done = launches[index] + collective
                there = done + reduced[index]
                arrival = there if there > now else now
                yield arrival + compute, done, arrival, state, self


class _RoomBeside(NamedTuple):
    """What a gather leaves to the gathers after it, whatever came before.

    Attributes:
        changed: gathers that end before this item start as if this one was not there.
        clear: for each gather that cannot, by its end: when the channel is done with the reductions that are started
            after the one before it could start, and before it can, on the clock of compute that waits for nothing.
        clear_behind: the same of the reductions between the last of those and the next boundary.
        reduced: for each of those gathers, the seconds of the reductions before it.
        unpacking: bytes in buffers or copies during the step of the next boundary's first use.
    """

    changed: int
    clear: Sequence[float]
    clear_behind: float
    reduced: Sequence[float]
    unpacking: int


_Candidate = tuple[float, float, float, _State, _Extension]
"""A state and what may follow: seconds of the state that the step leads to; the time on the channel at which the
collective is done; seconds at which compute has waited for it; the state before; the step."""


class _Search:
    """Dynamic programming over the boundaries of one chain."""

    def __init__(self, chain: Chain, channel: Channel, limit: int | None, forms: Sequence[bool]) -> None:
        self.chain, self.channel, self.forms = chain, channel, forms
        self.length = len(chain.items)
        self.breadth = _Breadth.for_chain(self.length)
        self.first = [item.first for item in chain.items]
        self.unpacked = chain.unpacked
        self.position = [*self.first, len(chain.seconds)]  # of compute, at a boundary
        self.num_bytes = [0, *accumulate(item.num_bytes for item in chain.items)]  # before a boundary
        self.num_messages = [0, *accumulate(item.num_messages for item in chain.items)]
        self.same_kind = self._ends_of_kinds()
        self.used = [bisect_right(self.first, step) for step in range(len(chain.seconds))]  # so many by each step
        self.clock = [0.0, *accumulate(chain.seconds)]  # of compute that waits for nothing
        self.reduced = chain.reduced
        self.clear = {is_packed: self._clear(is_packed) for is_packed in (False, True)}
        self.room = self._rooms(math.inf if limit is None else limit)
        self.room_beside: dict[tuple[int, int, bool, int], _RoomBeside] = {}
        # How early a gather can start if nothing else is in memory, by its end.
        ahead = self.breadth.ahead
        starts = [0, *self._starts(range(1, self.length + 1), self.room)]
        bounds = [self.first[end - ahead] if end > ahead else 0 for end in range(self.length + 1)]
        self.earliest = list(map(max, starts, bounds))

    def _ends_of_kinds(self) -> list[int]:
        """For every item the first one after it that is of another kind, or the number of items."""
        ends = [self.length] * self.length
        for index in reversed(range(self.length - 1)):
            is_same = self.chain.items[index].kind == self.chain.items[index + 1].kind
            ends[index] = ends[index + 1] if is_same else index + 1
        return ends

    def _rooms(self, limit: float) -> list[float]:
        """Bytes of the first items that fit, at each step; those that are not needed any more take none."""
        freed = [0] * (len(self.chain.held) + 1)
        for item in self.chain.items:
            freed[item.last + 1] += item.num_bytes
        return [limit - held + free for held, free in zip(self.chain.held, accumulate(freed), strict=False)]

    def _starts(self, ends: Iterable[int], rooms: Sequence[float]) -> list[int]:
        """The first position at which a gather can start, and fit up to the first use of its last item.

        Later steps need no look: what is in use by then is in memory in any plan.
        """
        lows, starts, seen = _Lows(), [], 0
        for end in ends:
            for step in range(seen, self.first[end - 1] + 1):
                lows.add(step, rooms[step])
            seen = self.first[end - 1] + 1
            starts.append(lows.last_below(self.num_bytes[end]) + 1)
        return starts

    def plan(self) -> ChainPlan:
        """The fastest plan found, every gather started as early as it fits."""
        if not self.length:
            return ChainPlan(())
        states = [self._first_state()]
        candidates: list[list[_Candidate]] = [[] for _ in range(self.length + 1)]
        for boundary in range(self.length):
            for step in self._steps(boundary):
                candidates[step.gather.end] += step.candidates(states)
            states = self._best(boundary + 1, candidates[boundary + 1])
            candidates[boundary + 1] = []
        if not states:  # all gathers packed, which are in memory twice for a while
            raise ConfigError("no plan fits into the limit without messages of single items")
        return self._traced(min(states, key=lambda state: state.free))

    def _first_state(self) -> _State:
        first, starts = self.first[0], self.earliest[1 : self._reach(0) + 1]
        launches = tuple(max(self.clear[False][:start], default=0.0) for start in starts)
        free = max(self.clear[False][:first], default=0.0)
        return _State(self.clock[first], free, launches, tuple(self.reduced[start] for start in starts), 0, None, None)

    def _reach(self, boundary: int) -> int:
        """The last item, plus one, that can be gathered when compute is at the boundary."""
        return bisect_right(self.earliest, self.position[boundary]) - 1

    def _steps(self, begin: int) -> Iterator[_Extension]:
        """All gathers that can begin here."""
        first = self.first[begin]
        ends = range(begin + 1, min(begin + self.breadth.length, self._reach(begin), self.same_kind[begin]) + 1)
        for is_packed in self.forms:
            least, seen = math.inf, first
            for end in ends:
                gather = ChainGather(begin, end, -1, is_packed)
                if is_packed:
                    # The step that the last gather ended at is seen again: this one may have more to unpack there.
                    steps = range(seen, self.unpacked[end - 1] + 1)
                    least = min(least, *(self.room[step] - self._unpacking(gather, step) for step in steps))
                    seen = self.first[end - 1]
                if least < self.num_bytes[end]:
                    break
                num_messages = 0 if is_packed else self.num_messages[end] - self.num_messages[begin]
                collective = self.channel.seconds(self._bytes(begin, end), num_messages)
                spare = self.room[first] - self._unpacking(gather, first) - self.num_bytes[end]
                compute = self.clock[self.position[end]] - self.clock[first] + self._copies(gather, begin, end)
                yield _Extension(gather, collective, compute, spare)

    def _unpacking(self, gather: ChainGather, step: int) -> int:
        """Bytes that are in memory twice, or still in the buffer when they are no longer needed, during the step."""
        return self._bytes(gather.begin, min(gather.end, self.used[step])) if gather.is_packed else 0

    def _state(self, candidate: _Candidate) -> _State:
        """What the candidate leads to."""
        now, done, arrival, before, (gather, *_) = candidate
        key = gather.begin, gather.end, gather.is_packed, before.unpacking
        if (room := self.room_beside.get(key)) is None:
            room = self.room_beside[key] = self._room_beside(gather, before.unpacking)
        kept = slice(gather.end - gather.begin, room.changed - gather.begin - 1)
        launches = [max(done, launch) for launch in before.launches[kept]]
        free = max(done, before.free)
        delay = arrival - self.clock[self.first[gather.begin]] - self._copies(gather, 0, gather.begin)
        for clear in room.clear:
            free = max(free, delay + clear)
            launches.append(free)
        free = max(free, delay + room.clear_behind, now - self.reduced[self.position[gather.end]])
        reduced = (*before.reduced[kept], *room.reduced)
        return _State(now, free, tuple(launches), reduced, room.unpacking, gather, before)

    def _room_beside(self, gather: ChainGather, unpacking: int) -> _RoomBeside:
        """The room for what comes after the gather, if `unpacking` bytes more are in memory during its first use."""
        end, first = gather.end, self.first[gather.begin]
        last, beside = self.unpacked[end - 1] if gather.is_packed else first, 0
        lows = _Lows()
        for step in range(first, last + 1):
            beside = self._unpacking(gather, step) + (unpacking if step == first else 0)
            lows.add(step, self.room[step] - beside)
        # Gathers that end before `changed` have room during all of these steps, and could start earlier. The others
        # start in between, at a position that compute reaches after it has waited for this gather.
        reach, boundary, clear = self._reach(end), self.position[end], self.clear[gather.is_packed]
        changed = min(bisect_right(self.earliest, first), bisect_right(self.num_bytes, lows.rooms[0]), reach + 1)
        starts = [first]
        for later in range(max(changed, end + 1), reach + 1):
            start = max(self.earliest[later], lows.last_below(self.num_bytes[later]) + 1)
            if start > boundary:
                break
            starts.append(start)
        ends = [*starts[1:], boundary]
        *clears, behind = (max(clear[a:b], default=-math.inf) for a, b in zip(starts, ends, strict=True))
        reduced = [self.reduced[start] for start in starts[1:]]
        return _RoomBeside(changed, clears, behind, reduced, beside if last == boundary else 0)

    def _bytes(self, begin: int, end: int) -> int:
        return self.num_bytes[end] - self.num_bytes[begin]

    def _copies(self, gather: ChainGather, begin: int, end: int) -> float:
        """Seconds of copying out these items, if they are sent as the gather is."""
        return self._bytes(begin, end) / self.channel.copy_bandwidth if gather.is_packed else 0.0

    def _clear(self, is_packed: bool) -> list[float]:
        """For each step, the time on the channel at which it is done with the reductions up to there, if compute, which
        waits for nothing, copies all items or none, and the channel does nothing else.
        """
        copied = [self.num_bytes[used] / self.channel.copy_bandwidth if is_packed else 0.0 for used in self.used]
        return list(map(sub, map(add, self.clock[1:], copied), self.reduced))

    def _best(self, boundary: int, candidates: Sequence[_Candidate]) -> list[_State]:
        """What the candidates lead to, without states that another one is no worse than."""
        if len(candidates) > self.breadth.states:
            candidates = self._likely(boundary, candidates)
        found: list[_State] = []
        for candidate in candidates:
            state = self._state(candidate)
            if (state.launches or boundary == self.length) and not any(other.is_no_worse(state) for other in found):
                found.append(state)
        return found

    def _likely(self, boundary: int, candidates: Sequence[_Candidate]) -> list[_Candidate]:
        """As many as are kept: the best ones at different prices of time, then the ones nearest to the lower bound.

        A copy buys time of the channel with time of compute. What that is worth shows only later.
        """
        frontier: list[_Candidate] = []
        for candidate in sorted(candidates, key=itemgetter(0, 1)):  # now, done
            if not frontier or candidate[1] < frontier[-1][1]:
                frontier.append(candidate)
        most = self.breadth.states
        if len(frontier) <= most:
            return frontier
        compute = self.clock[-1] - self.clock[self.position[boundary]]
        channel = self._bytes(boundary, self.length) / self.channel.bandwidth + self.reduced[-1]
        bounds = [max(now + compute, done + channel) for now, done, *_ in frontier]
        costs = [[i * now + (most - 1 - i) * done for now, done, *_ in frontier] for i in range(most)]
        best = {cost.index(min(cost)) for cost in costs}
        rest = sorted(set(range(len(frontier))) - best, key=bounds.__getitem__)
        return [frontier[index] for index in [*sorted(best), *rest[: most - len(best)]]]

    def _traced(self, state: _State) -> ChainPlan:
        """The plan that leads to the state."""
        gathers: list[ChainGather] = []
        while state.gather is not None and state.before is not None:
            gathers.append(state.gather)
            state = state.before
        gathers.reverse()
        rooms = list(self.room)
        for gather in gathers:
            for step in range(self.first[gather.begin], self.unpacked[gather.end - 1] + 1):
                rooms[step] -= self._unpacking(gather, step)
        starts = self._starts([gather.end for gather in gathers], rooms)
        return ChainPlan(tuple(dataclasses.replace(b, start=start) for b, start in zip(gathers, starts, strict=True)))
