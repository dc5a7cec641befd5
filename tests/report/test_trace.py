"""Traces, as Perfetto reads them."""

import json

from fsdp_compile.costs.memory import CATEGORIES
from fsdp_compile.report import Schedule, trace
from tests.passes.tiny import rows, three_layers
from tests.report.test_schedule import prediction_of


def test_a_trace_has_a_process_for_each_schedule_and_a_thread_for_each_lane():
    schedule = Schedule.of(prediction_of(three_layers(), rows()))
    events = json.loads(trace({"planned": schedule, "again": schedule}))["traceEvents"]
    named = [(event["pid"], event["name"], event["args"]["name"]) for event in events if event["ph"] == "M"]
    assert named == [
        (number, *name)
        for number, process in enumerate(["planned", "again"])
        for name in [("process_name", process), ("thread_name", "compute"), ("thread_name", "shard")]
    ]
    spans = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert [(event["ts"], event["dur"]) for event in spans] == [
        (1e6 * block.start, 1e6 * block.seconds) for block in schedule.blocks
    ]
    assert {"gather low.gathered", "compute mm", "free low.gathered"} <= {event["name"] for event in spans}
    counters = [event["args"] for event in events if event["ph"] == "C" and event["pid"] == 0]
    assert counters == [dict(zip(CATEGORIES, held, strict=True)) for _, held in schedule.memory]
