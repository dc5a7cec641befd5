"""Measured schedules, of profiles that are made up."""

from types import SimpleNamespace

import pytest

from fsdp_compile.report import Schedule, measured_schedule
from tests.passes.tiny import rows, three_layers
from tests.report.test_schedule import prediction_of


def profiler_of(num_calls, milliseconds):
    """Of steps with so many calls each, of a millisecond each and as far apart."""
    events, now = [], 0.0
    for apart in milliseconds:
        for _ in range(num_calls):
            time_range = SimpleNamespace(start=1e3 * now, end=1e3 * (now + 1))
            events.append(SimpleNamespace(name="_c10d_functional::call", time_range=time_range))
            now += apart
        now += 1000
    return SimpleNamespace(events=lambda: events)


@pytest.mark.parametrize("milliseconds, median", [([3], 3), ([3, 90, 2, 5], 3), ([90, 2, 4], 4)])
def test_the_step_of_median_length_is_taken(milliseconds, median):
    planned = Schedule.of(prediction_of(three_layers(), rows()))
    calls = [block for block in planned.blocks if block.num_messages]
    num_calls = sum(block.num_messages if block.kind == "wait" else 1 for block in calls)
    measured = measured_schedule(planned, profiler_of(num_calls, milliseconds))
    assert measured.seconds == pytest.approx(1e-3 * (median * (num_calls - 1) + 1))
