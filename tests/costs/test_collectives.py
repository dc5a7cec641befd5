import dataclasses

import pytest

from fsdp_compile.costs.collectives import Ring, all_gather, all_reduce, reduce_scatter
from fsdp_compile.costs.hardware import HARDWARE, Hardware, Link

SMALL = Hardware(
    name="small",
    flops={"float32": 1e12},
    efficiency=1.0,
    memory_bandwidth=1e11,
    memory=1 << 30,
    ranks_per_node=4,
    within_node=Link(100e9, 1e-6),
    between_nodes=Link(10e9, 5e-6),
    host_bandwidth=1e10,
    collective_start=10e-6,
    kernel_start=0.0,
    contention=1.0,
)


def test_a_ring_in_a_node():
    ring = Ring.of_axis(4, 1, SMALL)
    assert ring == Ring(4, 4)
    assert all_gather(1 << 30, ring, SMALL) == pytest.approx(10e-6 + 3 * 1e-6 + (1 << 30) * 3 / 4 / 100e9)
    assert reduce_scatter(1 << 30, ring, SMALL) == all_gather(1 << 30, ring, SMALL)


def test_a_ring_over_nodes_has_the_cards_of_all_ranks_that_it_passes():
    ring = Ring.of_axis(8, 1, SMALL)
    assert ring == Ring(8, 4) and ring.num_nodes == 2
    assert all_gather(1 << 30, ring, SMALL) == pytest.approx(10e-6 + 6e-6 + 5e-6 + (1 << 30) * 7 / 8 / 40e9)


def test_replicas_on_different_nodes_have_one_card():
    ring = Ring.of_axis(2, 4, SMALL)
    assert ring == Ring(2, 1)
    expected = 10e-6 + 2 * (5e-6 + (1 << 30) / 2 / 10e9)
    assert all_reduce(1 << 30, ring, SMALL) == pytest.approx(expected)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather_started_once():
    ring = Ring(4, 4)
    both = reduce_scatter(1 << 20, ring, SMALL) + all_gather(1 << 20, ring, SMALL)
    assert all_reduce(1 << 20, ring, SMALL) == pytest.approx(both - 10e-6)


def test_a_single_rank_sends_nothing():
    assert all_gather(1 << 20, Ring(1, 1), SMALL) == all_reduce(1 << 20, Ring(1, 1), SMALL) == 0
    assert reduce_scatter(1 << 20, Ring(1, 1), SMALL) == 0


def test_parts_that_are_not_aligned_are_slow():
    ring = Ring(4, 4)
    assert all_gather((1 << 26) + 4, ring, SMALL) > 5 * all_gather(1 << 26, ring, SMALL)


def test_an_all_reduce_cuts_its_buffer_where_it_likes():
    aligned, other = (all_reduce(num_bytes, Ring(3, 3), SMALL) for num_bytes in (48_000, 48_004))
    assert other == pytest.approx(aligned, rel=1e-3)


def test_reduce_scatters_by_other_means():
    slow = dataclasses.replace(SMALL, reduce_scatter_factor=2.0)
    ring = Ring(4, 4)
    once, twice = (reduce_scatter(1 << 26, ring, hardware) for hardware in (SMALL, slow))
    assert twice - 13e-6 == pytest.approx(2 * (once - 13e-6))


def test_the_latency_of_8_nodes_of_h100_is_the_one_published():
    """297 us for 8 x 8 GPUs, in a published table of all-gathers."""
    hardware = HARDWARE["h100"]
    assert all_gather(16 * 64, Ring.of_axis(64, 1, hardware), hardware) == pytest.approx(297e-6, rel=0.01)
