"""Reports of models that run, and what a profiler saw of them."""

import tempfile
from pathlib import Path

import pytest
from torch.profiler import ProfilerActivity, profile

from fsdp_compile import ConfigError, fsdp_compile
from fsdp_compile.report import Comparison, Schedule, measured_schedule, page
from tests.distributed.training import batch_of_rank
from tests.models import build
from tests.ranks import on_ranks


def trained(**options):
    model = fsdp_compile(build("gpt"), **options)
    model(*batch_of_rank(model, 0)).backward()
    return model


def recorded(model, steps=1):
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for step in range(steps):
            model(*batch_of_rank(model, step)).backward()
    return profiler


@pytest.mark.parametrize(("backend", "lowering"), [("aot_eager", "packed"), ("inductor", "grouped")])
@on_ranks(2)
def test_a_measured_step_has_the_blocks_of_the_plan(world_size, backend, lowering):
    model = trained(backend=backend, collective_lowering=lowering)
    planned = Schedule.of(model.explain("h100").predictions[-1])
    measured = measured_schedule(planned, recorded(model, steps=2))
    sent = ("gather", "reduce", "wait")

    def named(schedule):
        return [(block.kind, block.name, block.unit) for block in schedule.blocks if block.kind in sent]

    assert named(measured) == named(planned)
    assert all(block.seconds > 0 for block in measured.blocks)
    of_compute = [block for block in measured.blocks if block.lane == "compute"]
    assert all(before.end <= after.start for before, after in zip(of_compute, of_compute[1:], strict=False))
    computed = {(block.side, line) for block in planned.blocks if block.kind == "compute" for line in block.lines}
    found = {(block.side, line) for block in measured.blocks if block.kind == "compute" for line in block.lines}
    assert found <= computed


@on_ranks(2)
def test_what_no_collective_parts_is_divided_among_its_units(world_size):
    """No parameter is gathered again: nothing parts the last unit's forward from its backward."""
    model = trained(backend="aot_eager", reshard_after_forward=False)
    planned = Schedule.of(model.explain("h100").predictions[-1])
    measured = measured_schedule(planned, recorded(model))
    sides = [block.side for block in measured.blocks]
    assert sides == sorted(sides, reverse=True)
    for side in ("forward", "backward"):
        lines = planned.texts[side].splitlines()
        for block in measured.blocks:
            assert block.side != side or all(line < len(lines) for line in block.lines)
    rows = Comparison(planned, measured).rows()
    last_reduced = [block.unit for block in planned.blocks if block.kind == "wait"][-1]
    for (_, unit), (computed, found, _, _) in rows.items():
        assert (computed > 0) == (found > 0) or unit == last_reduced


@on_ranks(2)
def test_explain_writes_the_page_and_the_schedule_and_compares(world_size):
    model = trained(backend="aot_eager")
    profiler = recorded(model)
    with tempfile.TemporaryDirectory() as folder:
        html, saved = Path(folder) / "report.html", Path(folder) / "schedule.json"
        text = str(model.explain("h100", html=html, schedule=saved, measured=profiler))
        planned = Schedule.from_json(saved.read_text())
        assert planned == Schedule.of(model.explain("h100").predictions[-1])
        assert html.read_text() == page([planned, measured_schedule(planned, profiler)])
    (total,) = [line.split() for line in text.splitlines() if line.startswith("│ both")]
    compute, exposed = float(total[5]), float(total[9])
    assert compute == pytest.approx(1e3 * sum(b.seconds for b in planned.blocks if b.kind == "compute"), abs=0.01)
    assert exposed == pytest.approx(1e3 * sum(b.seconds for b in planned.blocks if b.kind == "wait"), abs=0.01)


@on_ranks(2)
def test_a_profile_of_something_else_is_refused(world_size):
    model, other = trained(backend="aot_eager"), fsdp_compile(build("odd_mlp"), backend="aot_eager")
    with pytest.raises(ConfigError, match="nothing was compiled so far"):
        other.explain("h100", html="report.html")
    other(*batch_of_rank(other, 0)).backward()
    with pytest.raises(ConfigError, match="a step of these graphs .*: profile whole steps"):
        model.explain("h100", measured=recorded(other))


@on_ranks(1)
def test_without_collectives_there_is_nothing_to_compare(world_size):
    model = trained(backend="aot_eager")
    with pytest.raises(ConfigError, match="no collectives"):
        model.explain("h100", measured=recorded(model))
