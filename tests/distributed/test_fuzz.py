"""Random models on real ranks: three steps are those of the unsharded model.

`--hypothesis-profile=thorough` trains 100 of them.
"""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile import ConfigError, fsdp_compile, rewrite
from fsdp_compile.costs import HARDWARE, predict
from tests.distributed.training import (
    assert_close,
    assert_same_gradients,
    assert_same_parameters,
    assert_same_step,
    halving,
    sgd,
    take_step,
)
from tests.random_models import HeadedModel, RandomModel, schedules, trees
from tests.ranks import run_on_ranks
from tests.test_fuzz import load_buffers

IS_THOROUGH = settings.get_current_profile_name() == "thorough"
ROWS = 2


def options():
    return st.fixed_dictionaries(
        {"backend": st.sampled_from(["aot_eager", "aot_eager", "aot_eager", "inductor"])},
        optional={
            **schedules(),
            "sharding_strategy": st.sampled_from([ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]),
            "hardware": st.just("h100"),
        },
    )


def loss_of(model, rank, step):
    found = model(*RandomModel.inputs(ROWS, seed=100 * step + rank))
    loss, extra = found if isinstance(found, tuple) else (found, None)
    return loss if extra is None else loss + extra.square().mean()


def buffers_of_ranks(model):
    return [[buffer.clone() for buffer in model.buffers()] for _ in range(dist.get_world_size())]


def as_replica(model, buffers, call, *args):
    """What a call of `model` returns on the rank that has these buffers, which are updated."""
    load_buffers(model, buffers)
    found = call(*args)
    buffers[:] = [buffer.clone() for buffer in model.buffers()]
    return found


def take_steps(model, expected, optimizers, in_backward):
    """Of the sharded model, which has taken its step in the backward or takes it now, and of the unsharded one."""
    if in_backward:
        assert all(parameter.grad is None for parameter in model.parameters())
        take_step(optimizers[1:])
        assert_same_parameters(model, expected)
    else:
        assert_same_gradients(model, expected)
        take_step(optimizers)


def compare(tree, is_double, options, in_backward):
    torch.manual_seed(0)
    expected = RandomModel(tree, is_double)
    model = copy.deepcopy(expected)
    fsdp_compile(model, **options)
    optimizers = [sgd(each.parameters()) for each in (model, expected)]
    if in_backward:
        model.optimizer_in_backward(optimizers[0])
    buffers = buffers_of_ranks(expected)
    for step in range(3):
        loss = loss_of(model, dist.get_rank(), step)
        losses = [as_replica(expected, own, loss_of, expected, rank, step) for rank, own in enumerate(buffers)]
        assert_close(loss, losses[dist.get_rank()])
        if loss.requires_grad:
            loss.backward()
            torch.stack(losses).mean().backward()
        take_steps(model, expected, optimizers, in_backward)
    assert_same_parameters(model, expected)
    assert_close(list(model.buffers()), buffers[dist.get_rank()])


NUM_HEADS = 3
TAKEN = st.lists(st.integers(0, NUM_HEADS + 1), min_size=1, max_size=3, unique=True)  # by the loss of one rank


def compare_micro_batches(tree, steps, options, in_backward):
    """Steps of two micro-batches, the first of them kept; `steps` are a seed of what is frozen, and what is taken."""
    torch.manual_seed(0)
    expected = HeadedModel(tree, NUM_HEADS)
    model = copy.deepcopy(expected)
    fsdp_compile(model, **options)
    optimizers = [sgd(each.parameters()) for each in (model, expected)]
    if in_backward:
        model.optimizer_in_backward(optimizers[0])
    rank, world_size = dist.get_rank(), dist.get_world_size()
    buffers = buffers_of_ranks(expected)

    def loss_of_heads(own, which):
        return expected.loss(expected(*own), which)

    for step, (seed, taken) in enumerate(steps):
        for index in range(2):
            rows = [RandomModel.inputs(ROWS, seed=100 * step + 10 * index + each) for each in range(world_size)]
            of_ranks = [taken[(index + each) % len(taken)] for each in range(world_size)]
            with contextlib.nullcontext() if index else model.no_sync():
                model.loss(model(*rows[rank]), of_ranks[rank]).backward()
            given = zip(buffers, rows, of_ranks, strict=True)
            losses = [as_replica(expected, own, loss_of_heads, *each) for own, *each in given]
            torch.stack(losses).mean().backward()
            for each in (model, expected):
                each.freeze(seed + index)
        take_steps(model, expected, optimizers, in_backward)
    assert_same_parameters(model, expected)


@settings(max_examples=25 if IS_THOROUGH else 1, suppress_health_check=list(HealthCheck))
@given(
    tree=trees(with_dropout=False),
    steps=st.lists(st.tuples(st.integers(0, 99), st.lists(TAKEN, min_size=1, max_size=3)), min_size=2, max_size=2),
    options=options(),
    in_backward=st.booleans(),
)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_outputs_are_left_out_and_parameters_are_frozen_between_micro_batches(
    world_size, tree, steps, options, in_backward
):
    run_on_ranks(world_size, compare_micro_batches, tree, steps, options, in_backward)


def compare_retries(tree, part, sizes):
    """Steps of a loop that halves the batch until it fits, with `sizes[step]` rows, of each rank in turn.

    Args:
        part: of what a step of the first size is predicted to take, the budget.
    """
    torch.manual_seed(0)
    expected = RandomModel(tree)
    hardware = HARDWARE["h100"]
    options = {"hardware": hardware, "collective_lowering": "packed"}
    graphs = rewrite(expected, *RandomModel.inputs(sizes[0], 0), world_size=dist.get_world_size(), **options)
    budget = int(part * predict(graphs, hardware).memory.peak.total)
    model = fsdp_compile(copy.deepcopy(expected), backend="aot_eager", dynamic=False, memory_budget=budget, **options)
    optimizers = [sgd(each.parameters()) for each in (model, expected)]
    buffers, rank = buffers_of_ranks(expected), dist.get_rank()
    for step in range(len(sizes)):

        def call(rows, each=model, seed=100 * step + rank):
            found = each(*RandomModel.inputs(rows, seed=seed))
            return (found[0] + found[1].square().mean()) if isinstance(found, tuple) else found

        try:
            loss, rows = halving(call, sizes[(step + rank) % len(sizes)] if step else sizes[0])
        except ConfigError:
            assert step == 0  # on all ranks: none has come further
            return
        rows_of_rank: list[int] = [0] * len(buffers)
        dist.all_gather_object(rows_of_rank, rows)
        losses = [
            as_replica(expected, own, call, num, expected, 100 * step + other)
            for other, (own, num) in enumerate(zip(buffers, rows_of_rank, strict=True))
        ]
        assert_same_step(model, expected, loss, losses, optimizers)
    assert_same_parameters(model, expected)


@settings(max_examples=25 if IS_THOROUGH else 1, suppress_health_check=list(HealthCheck))
@given(
    tree=trees(with_dropout=False),
    part=st.floats(0.6, 1.2),
    sizes=st.lists(st.sampled_from([1, 2, 4, 64, 256]), min_size=2, max_size=4),
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_loop_that_goes_on_with_fewer_rows_trains_as_it_does_unsharded(world_size, tree, part, sizes):
    run_on_ranks(world_size, compare_retries, tree, part, sizes)


@settings(max_examples=25 if IS_THOROUGH else 2, suppress_health_check=list(HealthCheck))
@given(tree=trees(with_dropout=False), is_double=st.booleans(), options=options(), in_backward=st.booleans())
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_random_model_trains_as_it_does_unsharded(world_size, tree, is_double, options, in_backward):
    run_on_ranks(world_size, compare, tree, is_double, options, in_backward)
