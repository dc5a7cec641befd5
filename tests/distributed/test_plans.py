"""Planned schedules on real ranks: the same numbers as the unsharded model, the same plan on every rank."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from fsdp_compile import ConfigError, fsdp_compile
from fsdp_compile.costs import HARDWARE, Link
from fsdp_compile.passes import ops
from tests.distributed.training import (
    adamw,
    assert_close,
    assert_same_parameters,
    batch_of_rank,
    mean_over_ranks,
    train,
    train_unsharded,
)
from tests.models import build
from tests.ranks import on_ranks

SLOW = dataclasses.replace(  # collectives take longer than compute, and each of them a millisecond
    HARDWARE["h100"],
    name="slow",
    flops={"float32": 5e10},
    memory_bandwidth=1e10,
    within_node=Link(5e7, 1e-6),
    collective_start=1e-3,
)
STEPS = range(3)


def gathers_of(side):
    return [node for node in side.graph.nodes if ops.is_all_gather(node)]


@pytest.mark.parametrize(
    ("backend", "lowering", "kept"),
    [("aot_eager", "packed", None), ("aot_eager", "grouped", True), ("inductor", "auto", True)],
)
@on_ranks(2)
def test_planned_training_is_that_of_the_unsharded_model(world_size, backend, lowering, kept):
    model = fsdp_compile(
        build("gpt"), backend=backend, hardware=SLOW, collective_lowering=lowering, reshard_after_forward=kept
    )
    losses = train(model, adamw(model.parameters()), STEPS)
    expected, expected_losses = train_unsharded("gpt", STEPS)
    assert_close(mean_over_ranks(losses), expected_losses)
    assert_same_parameters(model, expected)
    (graphs,) = model.graphs
    assert len(gathers_of(graphs.forward)) == 1  # all units at once
    assert len(gathers_of(graphs.backward)) == (0 if kept is None else 1)


@on_ranks(2)
def test_activations_that_are_computed_again_change_no_number(world_size):
    model = build("gpt")
    needed = fsdp_compile(build("gpt"), backend="aot_eager", hardware=SLOW)
    needed(*batch_of_rank(needed, 0)).backward()
    peak = needed.explain(SLOW).predictions[0].memory.peak.total
    model = fsdp_compile(model, backend="aot_eager", hardware=SLOW, memory_budget=int(0.85 * peak / 0.95))
    losses = train(model, adamw(model.parameters()), STEPS)
    assert model.graphs[0].plan.activations < 1
    expected, expected_losses = train_unsharded("gpt", STEPS)
    assert_close(mean_over_ranks(losses), expected_losses)
    assert_same_parameters(model, expected)


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
