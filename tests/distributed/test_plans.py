"""Planned schedules on real ranks: the same numbers as the unsharded model, the same plan on every rank."""

import copy
import dataclasses
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_compile import ConfigError, fsdp_compile, rewrite
from fsdp_compile.costs import HARDWARE, Link
from fsdp_compile.costs.predict import predict
from fsdp_compile.planning.step_plans import MARGIN
from tests.distributed.training import (
    assert_same_parameters,
    assert_same_step,
    assert_trains_as,
    batch_of_rank,
    gathered_units,
    halving,
    sgd,
)
from tests.models import build, seeded
from tests.ranks import on_ranks

SLOW = dataclasses.replace(  # collectives take longer than compute, and each of them a millisecond
    HARDWARE["h100"],
    name="slow",
    flops={"float32": 5e10},
    memory_bandwidth=1e10,
    within_node=Link(5e7, 1e-6),
    collective_start=1e-3,
)


@pytest.mark.parametrize(
    ("backend", "lowering", "kept"),
    [("aot_eager", "packed", None), ("aot_eager", "grouped", True), ("inductor", "auto", True)],
)
@on_ranks(2)
def test_planned_training_is_that_of_the_unsharded_model(world_size, backend, lowering, kept):
    model = fsdp_compile(
        build("gpt"), backend=backend, hardware=SLOW, collective_lowering=lowering, reshard_after_forward=kept
    )
    assert_trains_as(model, build("gpt"))
    (graphs,) = model.graphs
    assert len(gathered_units(graphs.forward)) == 1  # all units at once
    assert len(gathered_units(graphs.backward)) == (0 if kept is None else 1)


@on_ranks(2)
def test_activations_that_are_computed_again_change_no_number(world_size):
    model = build("gpt")
    needed = fsdp_compile(build("gpt"), backend="aot_eager", hardware=SLOW)
    needed(*batch_of_rank(needed, 0)).backward()
    peak = needed.explain(SLOW).predictions[0].memory.peak.total
    model = fsdp_compile(model, backend="aot_eager", hardware=SLOW, memory_budget=int(0.77 * peak / 0.95))
    assert_trains_as(model, build("gpt"))
    assert model.graphs[0].plan.activations < 1


@on_ranks(2)
def test_ranks_with_different_rows_follow_the_plan_of_the_first(world_size):
    model = fsdp_compile(build("gpt"), backend="aot_eager", hardware=SLOW)
    tokens, targets = batch_of_rank(model, 0)
    own = 4 - dist.get_rank()
    for length in (tokens.shape[1], tokens.shape[1] - 2):  # the second makes sizes symbols
        model(tokens[:own, :length].contiguous(), targets[:own, :length].contiguous()).backward()
    plans: list[object] = [None] * world_size
    dist.all_gather_object(plans, [graphs.plan for graphs in model.graphs])
    assert all(plan == plans[0][0] is not None for found in plans for plan in found)


@on_ranks(2)
def test_a_budget_that_is_too_small_says_so_on_every_rank(world_size):
    model = fsdp_compile(build("gpt"), backend="aot_eager", hardware=SLOW, memory_budget="100 KiB")
    with pytest.raises(ConfigError, match=r"memory_budget of .* are missing"):
        model(*batch_of_rank(model, 0))
    dist.barrier()


@on_ranks(2)
def test_without_hardware_a_budget_measures_this_machine(world_size):
    model = fsdp_compile(build("gpt"), backend="aot_eager", memory_budget="1 GiB")
    model(*batch_of_rank(model, 0)).backward()
    assert "planned" in str(model.explain("h100"))


@on_ranks(2)
def test_a_budget_takes_the_model_as_one_graph(world_size):
    model = build("odd_mlp")
    original = model.forward

    def breaking(*inputs):
        torch._dynamo.graph_break()
        return original(*inputs)

    model.forward = breaking
    model = fsdp_compile(model, backend="aot_eager", hardware=SLOW, memory_budget="1 GiB")
    with pytest.raises(Exception, match="graph_break"):
        model(*batch_of_rank(model, 0))


class Tower(nn.Module):
    """What is saved for the backward grows with the rows, and outweighs the parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def rows_of(num_rows, step, rank):
    return torch.randn(num_rows, 16, generator=seeded(100 * step + rank))


@functools.cache
def peak_of(num_rows):
    """Bytes that a rank is predicted to need for a step of so many rows, at least."""
    found = rewrite(Tower(), rows_of(num_rows, 0, 0), world_size=2, hardware=dataclasses.replace(SLOW, memory=1))
    torch._dynamo.reset()
    return predict(found, SLOW, compiler="aot_eager").memory.peak.total


def budget_for(num_rows):
    return int(peak_of(num_rows) * 1.01 / (1 - MARGIN))


def train_halving(model, expected, sizes):
    """Steps that begin with `sizes[step][rank]` rows, of a model and of the unsharded one; the rows they ended with."""
    optimizers = [sgd(each.parameters()) for each in (model, expected)]
    taken, rank = [], dist.get_rank()
    for step, rows in enumerate(sizes):
        loss, num_rows = halving(lambda num_rows, step=step: model(rows_of(num_rows, step, rank)), rows[rank])
        all_rows: list[int] = [0] * len(rows)
        dist.all_gather_object(all_rows, num_rows)
        losses = [expected(rows_of(num_rows, step, other)) for other, num_rows in enumerate(all_rows)]
        assert_same_step(model, expected, loss, losses, optimizers)
        taken.append(tuple(all_rows))
    assert_same_parameters(model, expected)
    return taken


@on_ranks(2)
def test_a_loop_that_halves_the_batch_until_it_fits_trains_as_the_unsharded_model(world_size):
    """At first no plan fits; then the plan does not fit the rows of one rank."""
    options = {"hardware": SLOW, "memory_budget": budget_for(64), "collective_lowering": "packed"}
    model = fsdp_compile(Tower(), backend="aot_eager", dynamic=False, **options)
    taken = train_halving(model, Tower(), [(128, 128), (128, 64), (32, 128)])
    assert taken == [(64, 64), (64, 64), (32, 64)]


@on_ranks(2)
def test_a_rank_with_a_model_more_gets_the_plan_of_the_model_that_all_have(world_size):
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        teacher = fsdp_compile(Tower(), process_group=group, backend="aot_eager", hardware=SLOW)
        teacher(rows_of(4, 0, 0))
    model = fsdp_compile(Tower(), backend="aot_eager", hardware=SLOW)
    assert train_halving(model, Tower(), [(4, 4)]) == [(4, 4)]


@on_ranks(2)
def test_a_copy_has_a_plan_of_its_own(world_size):
    model = fsdp_compile(Tower(), backend="aot_eager", hardware=SLOW, memory_budget=budget_for(32))
    copied = copy.deepcopy(model)
    for each, num_rows in ((model, 4), (copied, 32)):
        assert train_halving(each, Tower(), [(num_rows, num_rows)]) == [(num_rows, num_rows)]
    plans: list[object] = [None] * world_size
    dist.all_gather_object(plans, [each.graphs[0].plan for each in (model, copied)])
    assert plans[0] == plans[1]
    assert plans[0][0] != plans[0][1]
