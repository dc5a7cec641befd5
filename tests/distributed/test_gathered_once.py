"""Full parameters that last from call to call: several micro-batches with one gather, equal to the large batch."""

import copy
import os
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, ShardingStrategy
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_compile import CommunicationDtype, compat, fsdp_compile, shard
from fsdp_compile.module.sharding import sharding_of
from tests.distributed.test_accumulation import NUM, accumulate, backward, backward_unsharded, micro_batch
from tests.distributed.training import (
    Collectives,
    adamw,
    assert_close,
    assert_same_gradients,
    assert_same_parameters,
    assert_same_tensors,
    compiled,
    full_gradients,
    hybrid_mesh,
    sgd,
    take_step,
)
from tests.models import build
from tests.ranks import on_ranks

KEEPS = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "auto_wrap_policy": {nn.Linear}}
UNITS = 3  # of odd_mlp, if every Linear is one


def train_both(model, expected, steps, accumulate_in=accumulate):
    """Steps of several micro-batches, of both; how many gathers each of them takes."""
    counts, optimizers = [], [adamw(model.parameters()), adamw(expected.parameters())]
    for step in range(steps):
        with Collectives("all_gather") as gathers:
            accumulate_in(model, step)
        counts.append(gathers.num)
        for index in range(NUM):
            backward_unsharded(expected, step, index)
        assert_same_gradients(model, expected)
        take_step(optimizers)
    assert_same_parameters(model, expected)
    return counts


def without_sync(model, step):
    accumulate(model, step, syncs=False)


def as_fsdp2(model, step):
    """As users of FSDP2 accumulate."""
    for index in range(NUM):
        is_last = index == NUM - 1
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last)
        backward(model, step, index)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@on_ranks(2)
def test_no_sync_gathers_once_a_step_what_is_not_resharded(world_size, backend):
    model, expected = fsdp_compile(build("odd_mlp"), backend=backend, **KEEPS), build("odd_mlp")
    assert train_both(model, expected, 3, without_sync) == [UNITS] * 3
    assert len(model.graphs) == 2  # one that keeps gradients, and one that reduces


@on_ranks(2)
def test_what_is_resharded_is_gathered_by_every_micro_batch(world_size):
    model, expected = compiled(build("odd_mlp"), auto_wrap_policy={nn.Linear}), build("odd_mlp")
    # the backward has no use for the first unit, and has the last one from the forward
    _, *counts = train_both(model, expected, 2, without_sync)  # tracing runs some as well
    assert counts == [NUM * (UNITS + 1)]


@pytest.mark.parametrize("reshard", [None, False, True])
@on_ranks(2)
def test_fsdp2_says_what_outlives_a_backward(world_size, reshard):
    model, expected = build("odd_mlp"), build("odd_mlp")
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            compat.fully_shard(layer, reshard_after_forward=reshard, backend="aot_eager")
    compat.fully_shard(model, reshard_after_forward=reshard, backend="aot_eager")
    _, *counts = train_both(model, expected, 3, as_fsdp2)
    assert counts == [NUM * (2 * UNITS - 1) if reshard else UNITS] * 2


@pytest.mark.parametrize(
    ("name", "front_end"),
    [("adapted", compiled), ("graph_break", compiled), ("unused", compiled), ("odd_parameters", shard)],
)
@on_ranks(2)
def test_frozen_unused_and_other_parameters_train_as_the_whole(world_size, name, front_end):
    model, expected = front_end(build(name), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP), build(name)
    train_both(model, expected, 2, without_sync)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@on_ranks(4)
def test_replicas_of_bf16_parameters_are_as_with_a_gather_for_each(world_size, backend):
    options = {"mesh": hybrid_mesh(), "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    strategy = ShardingStrategy._HYBRID_SHARD_ZERO2
    once = fsdp_compile(build("odd_mlp"), sharding_strategy=strategy, backend=backend, **options)
    each = fsdp_compile(build("odd_mlp"), reshard_after_forward=True, backend=backend, **options)
    for step in range(2):
        for model in (once, each):
            accumulate(model, step, syncs=False)
        assert_same_tensors(full_gradients(once), full_gradients(each))
        take_step([sgd(once.parameters()), sgd(each.parameters())])


@on_ranks(2)
def test_offloaded_parameters_and_poison(world_size):
    with mock.patch.dict(os.environ, FSDP_COMPILE_POISON="1"):
        model = compiled(build("odd_mlp"), offload_policy=CPUOffloadPolicy(pin_memory=False), **KEEPS)
    assert train_both(model, build("odd_mlp"), 2, without_sync) == [UNITS] * 2


@on_ranks(2)
def test_parameters_that_change_are_gathered_anew(world_size):
    """Behind a reduction; by an optimizer that steps while gradients are kept; and by hand."""
    model, expected = compiled(build("odd_mlp"), **KEEPS), build("odd_mlp")
    optimizers = [sgd(model.parameters()), sgd(expected.parameters())]

    def backward_of_both(step):
        backward(model, step, 0)
        backward_unsharded(expected, step, 0)
        assert_same_gradients(model, expected)

    def assert_same_loss():
        assert_close(model(*micro_batch(model, 0, 0)), expected(*micro_batch(expected, 0, 0)))

    model.set_reshard_after_backward(False)
    for step in range(3):
        backward_of_both(step)
        take_step(optimizers)
    backward_of_both(3)
    with model.no_sync():
        assert_same_loss()
        take_step(optimizers)
        assert_same_loss()
        with model.summon_full_params():
            for parameter in model.parameters():
                parameter.data.mul_(2)
        for parameter in expected.parameters():
            parameter.data.mul_(2)
        assert_same_loss()


@on_ranks(2)
def test_what_lasts_is_let_go(world_size):
    """Behind the last backward; where the state is read or copied; and after what was raised in a forward."""
    model = compiled(build("odd_mlp"), **KEEPS)

    def lent():
        return [shard.gathered for shard in sharding_of(model).shards]

    def parts():
        return [StorageWeakRef(part.untyped_storage()) for gathered in lent() for part in gathered.parts]

    with model.no_sync():
        backward(model, 0, 0)
        found = parts()
        with torch.no_grad():
            model(*micro_batch(model, 0, 0))  # a call without gradients gathers for itself
        assert not any(reference.expired() for reference in found)
    backward(model, 0, 1)
    assert lent() == [None] * UNITS and all(reference.expired() for reference in found)
    for let_go in (model.state_dict, model.reset_iter_state, lambda: copy.deepcopy(model), model.reshard):
        with model.no_sync():
            backward(model, 0, 0)
        assert None not in lent()
        let_go()
        assert lent() == [None] * UNITS
    with pytest.raises(RuntimeError), model.no_sync():
        model(torch.zeros(2, 3), torch.zeros(2))
    model.zero_grad()
    expected = build("odd_mlp")
    accumulate(model, 1, syncs=False)
    for index in range(NUM):
        backward_unsharded(expected, 1, index)
    assert_same_gradients(model, expected)


@on_ranks(2)
def test_a_step_that_nobody_speaks_of_reduces_and_lets_go(world_size):
    """What was said before the first backward of the last step is expected of this one, and it does not come."""
    model, expected = compiled(build("odd_mlp"), **KEEPS), build("odd_mlp")
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    for index in range(2):
        backward(model, 0, index)
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    model._get_fsdp_state()._fsdp_param_group.post_backward()
    model._get_fsdp_state()._root_post_backward_final_callback()
    for index in range(2):
        backward_unsharded(expected, 0, index)
    for _ in range(2):
        assert_same_gradients(model, expected)
        take_step([sgd(model.parameters()), sgd(expected.parameters())])
        backward(model, 1, 0)
        backward_unsharded(expected, 1, 0)
        assert [shard.gathered for shard in sharding_of(model).shards] == [None] * UNITS


@on_ranks(2)
def test_numbers_that_are_sent_as_integers_are_gathered_by_every_call(world_size):
    model = compiled(build("odd_mlp"), communication_dtype=CommunicationDtype(gather="int8"), **KEEPS)
    accumulate(model, 0, syncs=False)
    with Collectives("all_gather") as gathers:
        accumulate(model, 1, syncs=False)
    assert gathers.num == NUM * UNITS
