"""Planning: the plans it finds against all plans there are."""

import functools
import itertools
import math
from operator import attrgetter
from random import Random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fsdp_compile.errors import ConfigError
from fsdp_compile.planning.chains import (
    Chain,
    ChainGather,
    ChainPlan,
    Channel,
    Item,
    Outcome,
    Reduction,
    evaluate,
    plain_plan,
)
from fsdp_compile.planning.chains_of_graphs import SAME, _leanest, _search
from fsdp_compile.planning.search import _Search, best_plan

# Profiles are in tests/conftest.py. Items of a chain that is compared with all plans; numbers of long chains.
MOST, NUM_LONG = (7, 300) if settings.get_current_profile_name() == "thorough" else (5, 10)


# Numbers are small integers and bandwidths powers of two: sums of seconds are exact, and equal is equal.
@st.composite
def chains(draw, max_parameters):
    num_steps = draw(st.integers(1, max_parameters))
    per_step = st.lists(st.integers(0, 8), min_size=num_steps, max_size=num_steps)
    seconds, held = draw(per_step), draw(per_step)
    num_parameters, step = draw(st.integers(1, max_parameters)), st.integers(0, num_steps - 1)
    firsts = sorted(draw(st.lists(step, min_size=num_parameters, max_size=num_parameters)))
    last = {first: st.just(first) | st.integers(first, num_steps - 1) for first in firsts}
    kind = st.sampled_from([0, 0, 0, 0, 1])
    items = [
        Item(draw(st.integers(0, 8)), first, draw(last[first]), draw(st.integers(1, 2)), draw(kind), draw(last[first]))
        for first in firsts
    ]
    reductions = draw(st.just([]) | st.lists(st.builds(Reduction, st.integers(0, 8), step), max_size=4))
    return Chain(seconds, held, items, sorted(reductions, key=attrgetter("step")))


def channels():
    power = st.sampled_from([0.5, 1, 2, 4])
    return st.builds(Channel, st.integers(0, 4), st.sampled_from([0, 0.25, 1, 2]), power, st.sampled_from([1, 4, 64]))


def cuts_of(chain):
    """Every way to cut the items into gathers, as pairs (begin, end)."""
    num_parameters = len(chain.items)
    for cuts in itertools.product((False, True), repeat=num_parameters - 1):
        boundaries = [0, *(index for index, is_cut in enumerate(cuts, 1) if is_cut), num_parameters]
        pairs = list(itertools.pairwise(boundaries))
        if all(len({item.kind for item in chain.items[begin:end]}) == 1 for begin, end in pairs):
            yield pairs


def nondecreasing(highest, least=0):
    """All sequences that do not decrease, element by element at most `highest`, which does not decrease."""
    if not highest:
        yield ()
        return
    for value in range(least, highest[0] + 1):
        for rest in nondecreasing(highest[1:], value):
            yield (value, *rest)


class AllPlans:
    """All plans with the same cuts at once: every gather sent either way, started at every position that is allowed.

    What they take is computed as `evaluate` does it for one plan, a row of an array for each.
    """

    def __init__(self, chain, pairs):
        self.chain, self.pairs = chain, pairs
        starts = list(nondecreasing([chain.items[begin].first for begin, _ in pairs]))
        packed = list(itertools.product((False, True), repeat=len(pairs)))
        self.starts = np.tile(np.array(starts), (len(packed), 1))
        self.packed = np.repeat(np.array(packed), len(starts), axis=0)

    def plan(self, row):
        columns = zip(self.pairs, self.starts[row].tolist(), self.packed[row].tolist(), strict=True)
        return ChainPlan([ChainGather(*pair, start, is_packed) for pair, start, is_packed in columns])

    def seconds(self, channel):
        chain, num_rows = self.chain, len(self.starts)
        now, free = np.zeros(num_rows), np.zeros(num_rows)
        done = np.zeros(self.starts.shape)
        for step, seconds in enumerate(chain.seconds):
            for number, (begin, end) in enumerate(self.pairs):
                items = chain.items[begin:end]
                size, messages = (sum(map(attrgetter(name), items)) for name in ("num_bytes", "num_messages"))
                taken = np.where(self.packed[:, number], channel.seconds(size, 0), channel.seconds(size, messages))
                # Those that are due earlier have begun; a gather is due at its start alone.
                is_due = self.starts[:, number] == step
                free = np.where(is_due, np.maximum(now, free) + taken, free)
                done[:, number] = np.where(is_due, free, done[:, number])
            for number, (begin, end) in enumerate(self.pairs):
                for index in range(begin, end):
                    item = chain.items[index]
                    if item.first == step:
                        now = np.maximum(now, done[:, number]) if index == begin else now
                        now = now + self.packed[:, number] * (item.num_bytes / channel.copy_bandwidth)
            now = now + seconds
            for reduction in chain.reductions:
                if reduction.step == step:
                    free = np.maximum(now, free) + reduction.seconds
        return np.maximum(now, free)

    def peaks(self):
        peak = np.zeros(len(self.starts), dtype=int)
        for step, held in enumerate(self.chain.held):
            total = np.full(len(self.starts), held)
            for number, (begin, end) in enumerate(self.pairs):
                is_started, is_packed = self.starts[:, number] <= step, self.packed[:, number]
                following = self.chain.items[end].first if end < len(self.chain.items) else math.inf
                unpacked = max(self.chain.items[end - 1].first, min(self.chain.items[end - 1].copied, following))
                for item in self.chain.items[begin:end]:
                    is_sent = is_started & (step <= np.where(is_packed, unpacked, item.last))
                    is_copied = is_packed & (item.first <= step <= item.last)
                    total += item.num_bytes * (is_sent.astype(int) + is_copied)
            peak = np.maximum(peak, total)
        return peak


def check_against_all_plans(chain, channel):
    """At every limit at which anything changes the best plan is as fast as the fastest of all plans that fit."""
    fastest = {}  # by peak
    for plans in map(functools.partial(AllPlans, chain), cuts_of(chain)):
        seconds, peaks = plans.seconds(channel), plans.peaks()
        one = evaluate(chain, plans.plan(len(seconds) // 2), channel)
        assert (one.seconds, one.peak) == (seconds[len(seconds) // 2], peaks[len(seconds) // 2])
        for peak in np.unique(peaks).tolist():
            fastest[peak] = min(seconds[peaks == peak].min().item(), fastest.get(peak, math.inf))
    for limit in sorted(fastest):
        outcome = evaluate(chain, best_plan(chain, channel, limit=limit), channel)
        assert outcome.peak <= limit
        assert outcome.seconds == min(seconds for peak, seconds in fastest.items() if peak <= limit)
    with pytest.raises(ConfigError, match=r" 1 are missing"):
        best_plan(chain, channel, limit=min(fastest) - 1)


# Both are rare among small chains. A start in the middle of a packed gather, half copied out, and a gather that starts
# after the reduction in one state, with the channel free as soon, and before it in another.
HALF_COPIED = [(3, 0), (2, 1), (4, 4), (2, 5), (1, 5)]
HALF_REDUCED = [(0, 0), (0, 0), (2, 0), (1, 1)]


def chain_of(seconds, reads, reductions=()):
    return Chain(seconds, [0] * len(seconds), [Item(size, at, at) for size, at in reads], reductions)


@given(chains(MOST), channels())
@example(chain_of([4, 2, 3, 0, 0, 2], HALF_COPIED), Channel(3, 2, 1, 2))
@example(chain_of([0, 0], HALF_REDUCED, [Reduction(1, 0)]), Channel(0, 2, 0.5, 1))
def test_the_best_plan_is_the_best_of_all_plans(chain, channel):
    check_against_all_plans(chain, channel)


@given(chains(4), channels(), st.integers(0, 40))
@example(chain_of([4, 4, 4], [(2, 0), (3, 1), (5, 2)]), Channel(0, 0, 1, 1), 3)  # peaks of 7 and 8: nothing between
def test_the_search_for_a_lean_plan_ends(chain, channel, room):
    """However few bytes there are to choose between; what it finds fits and is as fast as the fastest."""
    limit = chain.lowest_peak + room
    forms, asked = (False, True), itertools.count()

    def search(tight):
        assert next(asked) < 20
        return _search(tight, channel, forms, limit)

    fastest = evaluate(chain, best_plan(chain, channel, limit=limit), channel)
    lean = evaluate(chain, _leanest(chain, channel, search, limit), channel)
    assert lean.peak <= limit
    assert lean.seconds <= SAME * fastest.seconds


def long_chain(random):
    """Layers of items of very different bytes; some steps read two of them, some items are read again.

    Every other chain has reductions.
    """
    num_parameters = random.randint(30, 300)
    seconds, items = [], []
    while len(items) < num_parameters:
        seconds.append(random.choice([0.0, random.uniform(0, 5e-4), random.uniform(0, 5e-3)]))
        for _ in range(random.choice([0, 1, 1, 1, 2])):
            items.append((random.choice([4 << 10, 1 << 20, 64 << 20]), len(seconds) - 1))
    last = len(seconds) - 1
    held = [random.randint(0, 64 << 20) for _ in seconds]
    reads = [(size, first, random.choice([first] * 9 + [random.randint(first, last)])) for size, first in items]
    reduced = [step for step in range(last) if random.random() < 0.3] * random.randint(0, 1)
    reductions = [Reduction(random.uniform(0, 5e-3), step) for step in reduced]
    return Chain(seconds, held, [Item(*read, copied=random.choice([0, read[1] + 1])) for read in reads], reductions)


def units_of(chain, random):
    return [*sorted(random.sample(range(1, len(chain.items)), 8)), len(chain.items)]


LINK = Channel(start=2e-5, per_message=5e-6, bandwidth=5e10, copy_bandwidth=1e12)


@pytest.mark.parametrize("seed", range(NUM_LONG))
def test_the_best_plan_is_never_slower_than_a_plain_one_that_fits(seed):
    random = Random(seed)
    chain = long_chain(random)
    ends = units_of(chain, random)
    plain = [evaluate(chain, plain_plan(chain, ends, is_packed=way), LINK) for way in (False, True)]
    for limit in (chain.lowest_peak, chain.lowest_peak + 1, min(p.peak for p in plain), max(p.peak for p in plain)):
        outcome = evaluate(chain, best_plan(chain, LINK, limit=limit, ends=ends), LINK)
        assert outcome.peak <= limit
        assert all(outcome.seconds <= p.seconds for p in plain if p.peak <= limit)
    unlimited = evaluate(chain, best_plan(chain, LINK, ends=ends), LINK)
    assert unlimited.seconds <= min(p.seconds for p in plain)


@pytest.mark.parametrize("seed", range(3))
def test_a_plan_of_a_long_chain_is_a_plan(seed):
    chain = long_chain(Random(seed))
    gathers = best_plan(chain, LINK, limit=chain.lowest_peak + (200 << 20)).gathers
    assert [gather.begin for gather in gathers] == [0, *(gather.end for gather in gathers[:-1])]
    assert gathers[-1].end == len(chain.items)
    assert all(gather.begin < gather.end for gather in gathers)
    assert all(a.start <= b.start for a, b in itertools.pairwise(gathers))
    assert all(0 <= gather.start <= chain.items[gather.begin].first for gather in gathers)


def test_the_best_plan_of_a_long_chain_gives_bytes_for_seconds():
    chain = long_chain(Random(0))
    limits = [chain.lowest_peak + room for room in (0, 20 << 20, 40 << 20, 80 << 20)]
    outcomes = [evaluate(chain, best_plan(chain, LINK, limit=limit), LINK) for limit in limits]
    assert outcomes[0].peak == chain.lowest_peak
    for smaller, faster in itertools.pairwise(outcomes):
        assert faster.seconds < smaller.seconds
        assert faster.peak > smaller.peak


# Three steps of 4 seconds, an item each; 1 byte a second.
THREE = Chain([4, 4, 4], [0, 0, 0], [Item(2, 0, 0), Item(3, 1, 1), Item(5, 2, 2)])


def channel(start=0, per_message=0, copy_bandwidth=1):
    return Channel(start, per_message, 1, copy_bandwidth)


def test_what_a_plan_takes():
    """Compute waits 2 s for the first, not for the second, and 1 s of the 5 for the third."""
    gathers = [ChainGather(0, 1, 0, False), ChainGather(1, 2, 0, False), ChainGather(2, 3, 1, False)]
    assert evaluate(THREE, ChainPlan(gathers), channel()) == Outcome(seconds=15, exposed=3, peak=8)


def test_the_worked_example_of_the_search():
    link = channel(start=1)
    search = _Search(THREE, link, 8, [False])
    assert search.room == [8, 10, 13] and search.earliest[1:] == [0, 0, 1]
    states, found = [search._first_state()], [[] for _ in range(4)]
    shown = [(0, 0, (0, 0))]
    for boundary in range(3):
        for step in search._steps(boundary):
            found[step.gather.end] += step.candidates(states)
        states = search._best(boundary + 1, found[boundary + 1])
        shown += [(boundary + 1, state.now, state.launches) for state in states]
    rows = [(0, 0, (0, 0)), (1, 7, (3, 7)), (2, 14, (10,)), (2, 11, (7,)), (3, 24, ()), (3, 20, ()), (3, 17, ())]
    assert shown == rows
    plan = best_plan(THREE, link, limit=8, forms=[False])
    assert [(gather.begin, gather.end, gather.start) for gather in plan.gathers] == [(0, 1, 0), (1, 2, 0), (2, 3, 1)]
    assert evaluate(THREE, plan, link) == Outcome(seconds=17, exposed=5, peak=8)


def test_what_a_packed_bucket_takes():
    """Twice in memory during the second step: 3 bytes copied, of a buffer of 8. 8 s to gather, 8 to copy."""
    gathers = [ChainGather(0, 1, 0, False), ChainGather(1, 3, 1, True)]
    assert evaluate(THREE, ChainPlan(gathers), channel()) == Outcome(seconds=30, exposed=10, peak=13)


def test_the_plain_plan_starts_each_unit_with_the_unit_before():
    gathers = (ChainGather(0, 1, 0, False), ChainGather(1, 2, 0, False), ChainGather(2, 3, 1, False))
    assert plain_plan(THREE, [1, 2, 3]).gathers == gathers
    assert [gather.start for gather in plain_plan(THREE, [1, 2, 3], depth=0).gathers] == [0, 1, 2]
    assert [gather.start for gather in plain_plan(THREE, [1, 2, 3], depth=2).gathers] == [0, 0, 0]


def test_a_start_that_costs_nothing_is_late():
    """Gathering the second item takes 3 s; the step before its use takes 4."""
    chain = Chain([4, 4, 4], [0, 0, 0], [Item(2, 0, 0), Item(3, 2, 2)])
    assert best_plan(chain, channel()).gathers == (ChainGather(0, 1, 0, False), ChainGather(1, 2, 1, False))


def test_a_start_that_later_ones_wait_for_is_not_late():
    """The second gather fits once the first item is gone: the first must not delay that. The third can be late."""
    chain = Chain([4] * 6, [0] * 6, [Item(3, 1, 1), Item(12, 3, 3), Item(1, 5, 5)])
    assert [gather.start for gather in best_plan(chain, channel(), limit=13).gathers] == [0, 2, 4]


@pytest.mark.parametrize("seconds, start", [(0.5, 1), (2, 0)])
def test_a_start_is_late_where_there_is_time_for_the_reduction_before_it_too(seconds, start):
    """Between the end of the first step and the use of the second item, which takes 3 s, there are 4."""
    chain = Chain([4, 4, 4], [0, 0, 0], [Item(2, 0, 0), Item(3, 2, 2)], [Reduction(seconds, 0)])
    assert best_plan(chain, channel()).gathers == (ChainGather(0, 1, 0, False), ChainGather(1, 2, start, False))


def test_small_parameters_travel_together_and_large_ones_apart():
    items = [Item(1 if step < 4 else 32, step, step) for step in range(6)]
    chain = Chain([4] * 4 + [40] * 2, [0] * 6, items)

    def gathers(channel):
        return [(gather.begin, gather.end, gather.is_packed) for gather in best_plan(chain, channel).gathers]

    assert gathers(channel(start=8)) == [(0, 4, False), (4, 5, False), (5, 6, False)]
    assert gathers(channel(start=8, per_message=2)) == [(0, 4, True), (4, 5, False), (5, 6, False)]


def test_a_limit_that_nothing_fits_is_refused():
    with pytest.raises(ConfigError, match="no plan fits into 4 bytes: 5 are in use at once .* 1 are missing"):
        best_plan(THREE, channel(), limit=4)


def test_a_chain_without_parameters_has_a_plan_without_buckets():
    chain = Chain([1, 2], [3, 4], [])
    assert evaluate(chain, best_plan(chain, channel(), limit=4), channel()) == Outcome(seconds=3, exposed=0, peak=4)
    with pytest.raises(ConfigError, match="1 are missing"):
        best_plan(chain, channel(), limit=3)


def test_reductions_share_the_channel_and_are_waited_for_at_the_end():
    chain = Chain([2, 2, 2], [0] * 3, [Item(4, 0, 0), Item(4, 2, 2)], [Reduction(5, 0), Reduction(3, 2)])
    channel = Channel(start=0, per_message=0, bandwidth=2, copy_bandwidth=4)
    plan = ChainPlan([ChainGather(0, 1, 0, False), ChainGather(1, 2, 1, False)])
    # Gather until 2, compute until 4, reduction until 9, gather until 11, compute until 13, reduction until 16.
    assert evaluate(chain, plan, channel) == Outcome(seconds=16, exposed=2 + 5, peak=4)
    early = ChainPlan([ChainGather(0, 1, 0, False), ChainGather(1, 2, 0, False)])
    # Both gathers until 4: the reduction waits for them, and nothing waits for it.
    assert evaluate(chain, early, channel) == Outcome(seconds=12, exposed=2, peak=8)
    assert evaluate(chain, best_plan(chain, channel), channel).seconds == 12


def test_only_the_forms_that_are_allowed_are_planned():
    chain = Chain([1] * 4, [0] * 4, [Item(8, step, step) for step in range(4)])
    for copy_bandwidth, per_message in ((1e9, 100), (1e-3, 0)):  # packed is better, then it is worse
        channel = Channel(start=1, per_message=per_message, bandwidth=8, copy_bandwidth=copy_bandwidth)
        for form in (False, True):
            assert {gather.is_packed for gather in best_plan(chain, channel, forms=[form]).gathers} == {form}
        (best,) = {gather.is_packed for gather in best_plan(chain, channel).gathers}
        assert best == (per_message > 0)
    with pytest.raises(ConfigError, match="without messages of single items"):
        best_plan(chain, channel, limit=8, forms=[True])
