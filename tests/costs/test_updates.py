"""An optimizer that steps in the backward: what it takes of time and memory there."""

import math

import pytest

from fsdp_compile.costs import HARDWARE, predict
from fsdp_compile.costs.explain import explain
from fsdp_compile.costs.optimizers import OPTIMIZERS, gradient_bytes
from tests.passes.tiny import rows, three_layers
from tests.passes.tracing import trace

HARDWARE_OF_TEST = HARDWARE["h100"]


@pytest.fixture(scope="module")
def graphs():
    """Without updates, and with those of an optimizer with two states."""
    return [trace(three_layers(), rows(), updates=updates).graphs for updates in (None, 2)]


def test_updates_take_the_traffic_of_the_optimizer_and_each_the_start_of_a_kernel(graphs):
    after, inside = (predict(each, HARDWARE_OF_TEST, optimizer="adam") for each in graphs)
    assert after.optimizer_seconds == 7 * gradient_bytes(after.work) / HARDWARE_OF_TEST.memory_bandwidth > 0
    assert inside.optimizer_seconds == 0
    added = after.optimizer_seconds + 3 * HARDWARE_OF_TEST.kernel_start
    assert math.isclose(inside.timeline.compute, after.timeline.compute + added)


def test_a_gradient_dies_with_its_update_and_the_states_are_those_of_the_updates(graphs):
    after, inside = (predict(each, HARDWARE_OF_TEST, optimizer="adam").memory for each in graphs)
    (gradients,) = {moment.held["optimizer"] // 2 for moment in (*after.moments, *inside.moments)}
    assert after.moments[-1].held["gradients"] == gradients > 0
    assert inside.moments[-1].held["gradients"] == 0
    assert predict(graphs[1], HARDWARE_OF_TEST, optimizer="sgd").memory.peak.held["optimizer"] == 2 * gradients


def test_formulas_say_what_is_predicted(graphs):
    found = predict(graphs[1], HARDWARE_OF_TEST)
    for name, expected in {
        "optimizer_bytes": found.memory.peak.held["optimizer"],
        "optimizer_time": 0.0,
        "compute_time": found.timeline.compute,
        "step_time": found.seconds,
    }.items():
        assert math.isclose(found.formula(name).at(HARDWARE_OF_TEST, N=2), expected), name


def test_explain_says_so(graphs):
    said = [str(explain([each], HARDWARE_OF_TEST)) for each in graphs]
    assert [("steps in the backward: 3 updates" in text) for text in said] == [False, True]


def test_traffic_by_states():
    assert {name: each.traffic for name, each in OPTIMIZERS.items()} == {"sgd": 3, "momentum": 5, "adam": 7}
