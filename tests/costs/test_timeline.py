import dataclasses

import pytest
from torch import nn

from fsdp_compile import ConfigError, rewrite
from fsdp_compile.costs import explain
from fsdp_compile.costs.collectives import Ring, all_gather, reduce_scatter
from fsdp_compile.costs.optimizers import OPTIMIZERS
from fsdp_compile.costs.predict import bytes_text, predict, time_text
from fsdp_compile.costs.timeline import COMPUTE, rings_of, simulate
from fsdp_compile.costs.work import Work
from fsdp_compile.passes import ops
from tests.costs.test_collectives import SMALL
from tests.passes.tiny import Chain, rows

RINGS = {"shard": Ring(2, 2)}
SLOW = dataclasses.replace(SMALL, within_node=dataclasses.replace(SMALL.within_node, bandwidth=1e3))


def graphs_of(**options):
    model = Chain(up=nn.Linear(4, 8, bias=False), down=nn.Linear(8, 4, bias=False))
    return rewrite(model, rows(), world_size=2, auto_wrap_policy=nn.Linear, **options)


def work_of(**options):
    return Work.of(graphs_of(**options), compiler="aot_eager")


def events_of(timeline, *targets):
    return [event for event in timeline.events if ops.is_call(event.node, *targets)]


def test_collectives_of_a_group_run_one_after_another():
    found = simulate(work_of(), SLOW, RINGS)
    sent = [event for event in found.events if event.lane == "shard"]
    assert len(sent) == 4  # two gathers, two reductions; the backward has one weight left and needs no other
    assert all(before.end <= after.start for before, after in zip(sent, sent[1:], strict=False))
    seconds = {all_gather(128, RINGS["shard"], SLOW), reduce_scatter(128, RINGS["shard"], SLOW)}
    assert {round(event.end - event.start, 9) for event in sent} == {round(value, 9) for value in seconds}


def test_a_wait_stops_compute_until_its_collective_is_done():
    found = simulate(work_of(), SLOW, RINGS)
    gathers = events_of(found, ops.ALL_GATHER)
    first = next(event for event in found.events if event.lane == COMPUTE)
    assert first.start == gathers[0].end
    assert sum(found.exposed.values()) == pytest.approx(found.seconds - found.compute, rel=1e-6)


def test_what_is_hidden_is_not_exposed():
    fast = dataclasses.replace(SMALL, collective_start=0.0, within_node=dataclasses.replace(SMALL.within_node, hop=0))
    slow_compute = dataclasses.replace(fast, kernel_start=1.0)
    found = simulate(work_of(), slow_compute, RINGS)
    assert sum(found.exposed.values()) < 1e-6
    assert found.seconds == pytest.approx(found.lower_bound, rel=1e-6)


def test_prefetching_hides_what_no_prefetching_exposes():
    compute_bound = dataclasses.replace(SMALL, kernel_start=50e-6, contention=1.0)
    seconds = [
        simulate(work_of(forward_prefetch=depth, backward_prefetch=depth), compute_bound, RINGS).seconds
        for depth in (0, 1)
    ]
    assert seconds[1] < seconds[0]


def test_compute_is_slower_while_collectives_run():
    contended = dataclasses.replace(SMALL, contention=2.0, kernel_start=50e-6)
    free = dataclasses.replace(contended, contention=1.0)
    slower, faster = (simulate(work_of(), hardware, RINGS) for hardware in (contended, free))
    assert slower.compute == faster.compute
    assert slower.seconds > faster.seconds


def test_the_groups_of_a_hybrid_mesh_have_their_own_rings_and_lanes():
    model = Chain(up=nn.Linear(4, 8))
    work = Work.of(rewrite(model, rows(), world_size=(2, 4)), compiler="inductor")
    assert rings_of(work, SMALL) == {"shard": Ring(4, 4), "replicate": Ring(2, 1)}
    found = simulate(work, SMALL, rings_of(work, SMALL))
    assert set(found.communication) == {"shard", "replicate"}


def test_a_prediction_adds_the_optimizer_and_says_what_binds():
    adam, sgd = (predict(graphs_of(), SLOW, optimizer=name) for name in ("adam", "sgd"))
    shards = 2 * 16 * 4
    assert adam.memory.peak.held["optimizer"] == 2 * shards and sgd.memory.peak.held["optimizer"] == 0
    difference = (OPTIMIZERS["adam"].traffic - OPTIMIZERS["sgd"].traffic) * shards / SLOW.memory_bandwidth
    assert adam.seconds - sgd.seconds == pytest.approx(difference)
    assert adam.binds == "shard" and adam.seconds >= adam.lower_bound
    assert 0 < adam.utilisation < 1


def test_a_prediction_and_its_explanation_say_the_same():
    graphs = graphs_of()
    lines = str(predict(graphs, SLOW)).splitlines()
    assert [line[:14].rstrip() for line in lines] == ["step", "lower bound", "memory"]
    assert "on small: compute" in lines[0] and "set by communication (shard)" in lines[1]
    assert " B at the peak" in lines[2]
    explained = [line.strip() for line in str(explain([graphs], SLOW)).splitlines()]
    assert explained[1].startswith("schedule      as the options say") and explained[3:6] == lines


@pytest.mark.parametrize(
    "seconds, num_bytes, texts",
    [
        (0.0123, 3 << 20, ("12.3 ms", "3 MiB")),
        (1.5, 70 << 30, ("1.5 s", "70 GiB")),
        (0.0, 0, ("0 ms", "0 B")),
        (1.0, 1536, ("1 s", "1.5 KiB")),
    ],
)
def test_units_fit_what_they_count(seconds, num_bytes, texts):
    assert (time_text(seconds), bytes_text(num_bytes)) == texts


def test_an_optimizer_that_is_not_known():
    with pytest.raises(ConfigError, match="optimizer is one of sgd, momentum, adam, not 'lion'"):
        predict(graphs_of(), SMALL, optimizer="lion")
