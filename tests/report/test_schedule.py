"""Schedules as values: against the timeline and the memory that they are made of."""

import dataclasses

import pytest
import torch
from torch import nn

from fsdp_compile import ConfigError, rewrite
from fsdp_compile.costs import HARDWARE, Link, predict
from fsdp_compile.costs.memory import CATEGORIES
from fsdp_compile.report import Schedule
from tests.models import build
from tests.passes.tiny import rows, three_layers

SLOW = dataclasses.replace(HARDWARE["h100"], name="slow", within_node=Link(1e6, 0.0))


def prediction_of(model, *inputs, **options):
    graphs = rewrite(model, *inputs, world_size=2, auto_wrap_policy=nn.Linear, **options)
    return predict(graphs, SLOW, compiler="aot_eager")


@pytest.fixture(scope="module")
def prediction():
    return prediction_of(three_layers(), rows())


def blocks(schedule, kind, side="forward"):
    return [block for block in schedule.blocks if block.kind == kind and block.side == side]


def test_a_step_in_blocks(prediction):
    schedule = Schedule.of(prediction)
    assert [(block.name, block.unit) for block in blocks(schedule, "gather")] == [
        ("low.gathered", "low"),
        ("mid.gathered", "mid"),
        ("top.gathered", "top"),
    ]
    assert [block.name for block in blocks(schedule, "wait")] == ["low.gathered", "mid.gathered", "top.gathered"]
    assert [block.name for block in blocks(schedule, "free")] == ["low.gathered", "mid.gathered"]
    assert [(block.name, block.unit) for block in blocks(schedule, "compute")][:2] == [("mm", "low"), ("mm", "mid")]
    assert [block.unit for block in blocks(schedule, "reduce", "backward")] == ["top", "mid", "low"]


def test_times_are_those_of_the_timeline(prediction):
    schedule, timeline = Schedule.of(prediction), prediction.timeline
    assert (schedule.seconds, schedule.lower_bound) == (timeline.seconds, timeline.lower_bound)
    assert max(block.end for block in schedule.blocks) == timeline.seconds
    exposed = sum(block.seconds for block in schedule.blocks if block.kind == "wait")
    assert exposed == pytest.approx(prediction.exposed)
    of_compute = [block for block in schedule.blocks if block.lane == "compute"]
    assert all(before.end <= after.start for before, after in zip(of_compute, of_compute[1:], strict=False))
    for lane in schedule.lanes[1:]:
        sent = [block for block in schedule.blocks if block.lane == lane]
        assert sum(block.seconds for block in sent) == pytest.approx(timeline.communication[lane])


def test_the_curve_of_memory_reaches_the_peak():
    for name in ("gpt", "conv_net", "odd_mlp"):
        model = build(name)
        prediction = predict(rewrite(model, *model.inputs(4, seed=0), world_size=2), SLOW)
        schedule, peak = Schedule.of(prediction), prediction.memory.peak
        assert max(sum(held) for _, held in schedule.memory) == peak.total
        assert tuple(peak.held[category] for category in CATEGORIES) in {held for _, held in schedule.memory}
        seconds = [begin for begin, _ in schedule.memory]
        assert seconds == sorted(seconds) and seconds[0] == 0


def test_every_block_points_to_its_lines(prediction):
    schedule = Schedule.of(prediction)
    for block in schedule.blocks:
        lines = [schedule.texts[block.side].split("\n")[line] for line in block.lines]
        assert lines
        if block.kind in ("wait", "free"):
            assert f"fsdp.{block.kind}(" in lines[0] and block.name in lines[0]
        elif block.kind == "compute":
            assert all(f"{name.strip()}(" in "".join(lines) for name in block.name.removesuffix(", ...").split(","))
    assert any("tiny.py" in block.source for block in schedule.blocks)


def test_sizes_that_vary_are_drawn_as_they_were_traced():
    x = rows()
    torch._dynamo.mark_dynamic(x, 0)
    varying, fixed = (Schedule.of(prediction_of(three_layers(), each)) for each in (x, rows()))
    assert [block.start for block in varying.blocks] == [block.start for block in fixed.blocks]


def test_a_saved_schedule_is_the_same(prediction):
    schedule = Schedule.of(prediction)
    assert Schedule.from_json(schedule.to_json()) == schedule


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1, "categories": [], "blocks": [[]], "memory": []}'])
def test_what_is_no_schedule_is_refused(text):
    with pytest.raises(ConfigError, match="no saved schedule"):
        Schedule.from_json(text)


def test_a_schedule_of_another_version_is_refused(prediction):
    text = Schedule.of(prediction).to_json().replace('"format": 1', '"format": 0')
    with pytest.raises(ConfigError, match="another version"):
        Schedule.from_json(text)
