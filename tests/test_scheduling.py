"""Plans of whole steps: what is decided for a hardware and a memory budget, and what that is predicted to take."""

import dataclasses
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import expecttest
import pytest
import torch
from torch import nn

from fsdp_compile import ConfigError, rewrite
from fsdp_compile.compiler.splits import Splits
from fsdp_compile.costs import HARDWARE, Link, predict
from fsdp_compile.passes import ops
from fsdp_compile.passes.plan import StepPlan
from fsdp_compile.planning.step_plans import Goal
from tests.models import build
from tests.passes.tiny import four_layers, rows

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import memory

memory.MODELS["tiny"] = lambda: (memory.Mlp(dim=128, layers=4), memory._rows(128, 128))

BALANCED = dataclasses.replace(  # compute takes about as long as communication
    HARDWARE["h100"],
    name="balanced",
    flops={"float32": 5e10},
    efficiency=1.0,
    memory_bandwidth=1e10,
    within_node=Link(4e8, 1e-6),
    kernel_start=1e-6,
    contention=1.0,
)
SLOW = dataclasses.replace(BALANCED, name="slow", within_node=Link(5e7, 1e-6))
FAST = dataclasses.replace(BALANCED, name="fast", within_node=Link(1e11, 1e-6))
F32, F64 = torch.float32, torch.float64
COSTLY = dataclasses.replace(BALANCED, name="costly", collective_start=1e-3)


def planned(model, hardware, **options):
    options = {"world_size": 2, "collective_lowering": "auto", "hardware": hardware} | options
    return rewrite(model, *model.inputs(4, seed=0), **options)


def gathers_of(side):
    return [node for node in side.graph.nodes if ops.is_all_gather(node)]


@pytest.mark.parametrize("hardware", [BALANCED, SLOW, FAST, COSTLY], ids=lambda hardware: hardware.name)
def test_a_plan_is_never_slower_than_no_plan(hardware):
    model = build("gpt")
    found = predict(planned(model, hardware), hardware)
    plain = predict(rewrite(model, *model.inputs(4, seed=0), world_size=2, collective_lowering="grouped"), hardware)
    assert found.seconds <= plain.seconds
    if hardware in (SLOW, COSTLY):  # there is something to gain: what is kept is not gathered again
        assert found.seconds < 0.95 * plain.seconds


@pytest.mark.parametrize(("hardware", "is_planned"), [(FAST, False), (COSTLY, True)], ids=["fast", "costly"])
def test_a_plan_that_nobody_asked_for_has_to_win_something(hardware, is_planned):
    with patch("fsdp_compile.rewriting.Goal", partial(Goal, is_within_plain=True)):
        graphs = planned(build("gpt"), hardware)
    assert (graphs.plan is not None) == is_planned
    assert planned(build("gpt"), hardware).plan is not None


def test_time_rises_as_the_budget_shrinks_and_the_peak_obeys():
    model = build("gpt")
    free = predict(planned(model, SLOW), SLOW)
    seconds = []
    for part in (1.06, 0.9, 0.8):
        budget = int(free.memory.peak.total * part / 0.95)
        found = predict(planned(model, SLOW, memory_budget=budget), SLOW)
        assert found.memory.peak.total <= 0.95 * budget
        seconds.append(found.seconds)
    assert seconds == sorted(seconds) and seconds[0] < seconds[-1]
    with pytest.raises(ConfigError, match=r"memory_budget of 102\.4 KiB: .* are missing.*at its peak.*would help: "):
        planned(model, SLOW, memory_budget="0.1 MiB")


class Deep(nn.Module):
    """Units of several parameters, used one after another."""

    def __init__(self):
        super().__init__()
        self.units = nn.ModuleList(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))) for _ in range(12))

    def forward(self, x):
        for unit in self.units:
            x = unit(x)
        return x

    def inputs(self, batch, seed):
        return (rows(64, batch),)


def test_packed_buffers_that_parameters_are_still_copied_out_of_are_counted():
    model, options = Deep(), {"collective_lowering": "packed"}
    free = predict(planned(model, COSTLY, **options), COSTLY)
    seconds = [free.seconds]
    for part in (0.9, 0.7):
        budget = int(free.memory.peak.total * part / 0.95)
        seconds.append(predict(planned(model, COSTLY, memory_budget=budget, **options), COSTLY).seconds)
    assert seconds == sorted(seconds)
    assert seconds[-1] < 1.5 * free.seconds  # otherwise nothing is found but what gathers all units by themselves


def test_where_memory_is_short_activations_are_computed_again():
    model = build("gpt")
    free = predict(planned(model, FAST), FAST).memory.peak
    graphs = planned(model, FAST, memory_budget=int(0.85 * free.total / 0.95))
    assert graphs.plan.activations < 1
    peak = predict(graphs, FAST).memory.peak
    assert peak.total <= 0.85 * free.total and peak.held["activations"] < 0.5 * free.held["activations"]


@pytest.mark.parametrize("reshard", [True, False])
def test_activations_are_left_where_memory_is_short_without_any(reshard):
    """The partitioner, which takes long, is not run for what has no room for parameters, gradients and states."""
    model, runs = build("gpt"), []

    def noting(splits, activations):
        runs.append(activations)
        return split(splits, activations)

    split, options = Splits._split, {"reshard_after_forward": reshard}
    held = predict(planned(model, FAST, **options), FAST).memory.peak.held
    with patch.object(Splits, "_split", noting):
        for part, tries in ((0.9, True), (0.2, False)):
            runs.clear()
            planned(model, dataclasses.replace(FAST, memory=int(part * sum(held.values()))), **options)
            assert any(activations is not None for activations in runs) == tries, part


def test_units_that_the_user_decided_on_are_left():
    model = build("gpt")
    graphs = planned(model, FAST, reshard_after_forward={"blocks.0": False})
    assert "blocks.0" in graphs.plan.kept
    graphs = planned(model, SLOW, reshard_after_forward=True)
    assert (graphs.plan.kept if graphs.plan else ()) == ()
    assert len(gathers_of(graphs.backward)) > 0


@pytest.mark.parametrize("lowering", ["packed", "grouped"])
def test_the_lowering_that_was_asked_for_is_planned(lowering):
    graphs = planned(build("gpt"), COSTLY, collective_lowering=lowering)
    gathers = gathers_of(graphs.forward)
    assert len(gathers) == 1  # a collective costs more than waiting for all of them
    assert ops.is_call(gathers[0], ops.ALL_GATHER if lowering == "packed" else ops.ALL_GATHER_GROUPED)


class Mixed(nn.Module):
    """Units in float32 and float64, one after another."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4, dtype=dtype) for dtype in (F32, F64, F64, F32))

    def forward(self, x):
        return self.d(self.c(self.b(self.a(x).double())).float())

    def inputs(self, batch, seed):
        return (rows(num=batch),)


def test_buckets_of_different_dtypes_are_not_gathered_at_once():
    plan = planned(Mixed(), COSTLY, auto_wrap_policy=nn.Linear).plan
    assert [gather.buckets for gather in plan.forward] == [("a",), ("b", "c"), ("d",)]


def test_plans_survive_json():
    plan = planned(build("gpt"), BALANCED).plan
    assert StepPlan.from_json(plan.to_json()) == plan


def test_inference_is_planned_too():
    with torch.no_grad():
        graphs = planned(build("gpt"), COSTLY)
    assert graphs.backward is None and len(gathers_of(graphs.forward)) == 1


def test_options_that_planning_needs():
    with pytest.raises(ConfigError, match="memory_budget needs hardware="):
        rewrite(four_layers(), rows(), world_size=2, memory_budget=100)
    for wrong in (0, -1, True, 1.5, "much", "GiB", "1.2.3 GiB"):
        with pytest.raises(ConfigError, match="memory_budget is a positive number of bytes, or text"):
            rewrite(four_layers(), rows(), world_size=2, memory_budget=wrong, hardware="h100")
    with pytest.raises(ConfigError, match="'k80' is neither"):
        rewrite(four_layers(), rows(), world_size=2, hardware="k80")
    with pytest.raises(ConfigError, match="hardware is a Hardware, a name or the name of a file, not 5"):
        rewrite(four_layers(), rows(), world_size=2, hardware=5)


class TestSchedules(expecttest.TestCase):
    def test_what_a_plan_looks_like(self):
        graphs = rewrite(
            four_layers(),
            rows(),
            world_size=2,
            auto_wrap_policy=nn.Linear,
            collective_lowering="auto",
            hardware=dataclasses.replace(BALANCED, collective_start=1e-7, within_node=Link(2e8, 0.0)),
            reshard_after_forward=True,
        )
        self.assertExpectedInline(
            graphs.schedule(),
            """\
forward
                            all_gather_grouped first                64
                            all_gather_grouped second               128
                            wait first.gathered                     128
  mm                                                                128
                            free first.gathered                     64
                            all_gather_grouped third                128
                            wait second.gathered                    128
  mm                                                                128
                            free second.gathered                    64
                            all_gather_grouped fourth               128
                            wait third.gathered                     128
  mm                                                                128
                            free third.gathered                     64
                            wait fourth.gathered                    64
  mm                                                                64
                            free fourth.gathered                    0
backward
                            all_gather_grouped fourth               64
  mm                                                                64
                            reduce_scatter_grouped fourth           64
                            all_gather_grouped third                128
                            wait fourth.gathered                    128
  mm                                                                128
                            free fourth.gathered                    64
  mm                                                                64
                            wait fourth.grad                        64
                            reduce_scatter_grouped third            64
                            all_gather_grouped second               128
                            wait third.gathered                     128
  mm                                                                128
                            free third.gathered                     64
  mm                                                                64
                            wait third.grad                         64
                            reduce_scatter_grouped second           64
                            wait second.gathered                    64
  mm                                                                64
                            free second.gathered                    0
  mm                                                                0
                            wait second.grad                        0
                            reduce_scatter_grouped first            0
                            wait first.grad                         0""",
        )


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_what_is_allocated_stays_within_the_budget(four_ranks, backend):
    free = memory.measure("tiny", "FULL_SHARD", backend, hardware=SLOW)
    states = 2 * free.predicted.moments[0].held["shards"]  # of the optimizer, which the measurement does not have
    peaks = []
    for part in (1.1, 0.9, 0.8) if backend == "aot_eager" else (0.9,):
        budget = int(part * (free.measured + states))
        found = memory.measure("tiny", "FULL_SHARD", backend, hardware=SLOW, memory_budget=budget)
        peaks.append(found.measured + states)
        assert peaks[-1] <= budget
    assert peaks == sorted(peaks, reverse=True)
