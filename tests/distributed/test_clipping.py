"""`model.clip_grad_norm_`: the norm and the gradients of the unsharded model, with one all-reduce."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, ShardingStrategy
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_compile import ConfigError, shard
from tests.distributed.training import (
    assert_close,
    backward_of_both,
    batch_of_rank,
    compiled,
    full_gradients,
    global_batch,
    hybrid_mesh,
    take_step,
)
from tests.models import build
from tests.ranks import on_ranks

NORMS = [1, 2, 3.5, math.inf]
MAX_NORM = 0.01


def collectives(debug):
    return {str(op): count for op, count in debug.get_comm_counts().items() if count}


def assert_clips_like(model, expected, norm_type=2, num_all_reduces=1):
    """Both have gradients; afterwards they are clipped, and the norms were the same."""
    expected_norm = nn.utils.clip_grad_norm_(expected.parameters(), MAX_NORM, norm_type)
    with CommDebugMode() as debug:
        norm = model.clip_grad_norm_(MAX_NORM, norm_type)

    assert collectives(debug) == ({"c10d_functional.all_reduce": num_all_reduces} if num_all_reduces else {})
    assert type(norm) is torch.Tensor
    assert (norm.shape, norm.dtype) == ((), torch.float32)
    assert expected_norm > MAX_NORM
    assert_close(norm, expected_norm)
    for gradient, value in zip(full_gradients(model).values(), full_gradients(expected).values(), strict=True):
        torch.testing.assert_close(gradient, value, rtol=1e-4, atol=1e-7)
    return norm


def norms_of_ranks(norm):
    norms = [torch.empty_like(norm) for _ in range(dist.get_world_size())]
    dist.all_gather(norms, norm)
    return norms


@pytest.mark.parametrize("name", ["gpt", "odd_mlp", "odd_parameters", "few_rows", "adapted", "unused"])
@on_ranks(2, 3)
def test_clipping_equals_the_unsharded_models(world_size, name):
    expected, model = build(name), shard(build(name))
    for step, norm_type in enumerate(NORMS):
        for network, batch in ((expected, global_batch), (model, batch_of_rank)):
            network.zero_grad()
            network(*batch(network, step)).backward()
        norm = assert_clips_like(model, expected, norm_type)
        assert all(torch.equal(other, norm) for other in norms_of_ranks(norm))


@on_ranks(2)
def test_clipping_between_compiled_steps(world_size):
    """As in a training loop: backward, clip, step."""
    expected, model = build("odd_mlp"), compiled(build("odd_mlp"))
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.1) for network in (expected, model)]
    for step in range(3):
        backward_of_both(model, expected, step)
        assert_clips_like(model, expected)
        take_step(optimizers)


@pytest.mark.parametrize("norm_type", [2, math.inf])
@pytest.mark.parametrize("name", ["odd_mlp", "odd_parameters"])
@on_ranks(4)
def test_replicas_of_a_hybrid_mesh_count_once(world_size, name, norm_type):
    expected, model = build(name), shard(build(name), hybrid_mesh())
    backward_of_both(model, expected)
    norm = assert_clips_like(model, expected, norm_type)
    assert all(torch.equal(other, norm) for other in norms_of_ranks(norm))


@pytest.mark.parametrize("strategy", ["whole on every rank", "offload", "ignored"])
@on_ranks(3)
def test_clipping_what_is_not_just_sharded(world_size, strategy):
    expected, model = build("odd_mlp"), build("odd_mlp")
    expected(*global_batch(expected, 0)).backward()
    if strategy == "ignored":  # its gradient is not reduced: here the script does it
        weight = model.layers[2].weight
        shard(model, ignored_params={weight})
        model(*batch_of_rank(model, 0)).backward()
        dist.all_reduce(weight.grad)
        weight.grad /= world_size
    else:
        options = {"sharding_strategy": ShardingStrategy.NO_SHARD}
        shard(model, **options if strategy != "offload" else {"offload_policy": CPUOffloadPolicy(pin_memory=False)})
        model(*batch_of_rank(model, 0)).backward()
    norm = assert_clips_like(model, expected, num_all_reduces=0 if strategy == "whole on every rank" else 1)
    assert all(torch.equal(other, norm) for other in norms_of_ranks(norm))


@on_ranks(3)
def test_plain_parameters_of_a_sharded_model_count_once(world_size):
    expected = build("odd_mlp")
    model = shard(copy.deepcopy(expected))
    backward_of_both(model, expected)
    for network in (expected, model):
        network.plain = nn.Parameter(torch.ones(4))
        network.plain.grad = torch.full((4,), 3.0)
    assert_clips_like(model, expected)


@on_ranks(2)
def test_a_rank_without_gradients_takes_part(world_size):
    expected, model = build("odd_mlp"), shard(build("odd_mlp"))
    assert model.clip_grad_norm_(1.0) == 0

    backward_of_both(model, expected)
    if dist.get_rank() == 1:
        model.zero_grad()
    rows = [parameter.grad[: -(-len(parameter) // world_size)] for parameter in expected.parameters()]
    assert_close(model.clip_grad_norm_(1.0), torch.cat([row.flatten() for row in rows]).norm())


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("norm_type", [2, math.inf])
@on_ranks(2)
def test_a_gradient_that_is_not_finite_on_one_rank_is_seen_by_all(world_size, norm_type, value):
    expected, model = build("odd_mlp"), shard(build("odd_mlp"))
    backward_of_both(model, expected)
    expected.layers[0].weight.grad[-1, -1] = value
    if dist.get_rank() == world_size - 1:
        model.layers[0].weight.grad.to_local()[-1, -1] = value

    before = copy.deepcopy(full_gradients(model))
    with pytest.raises(RuntimeError, match="error_if_nonfinite=False"):
        model.clip_grad_norm_(MAX_NORM, norm_type, error_if_nonfinite=True)
    torch.testing.assert_close(full_gradients(model), before, rtol=0, atol=0, equal_nan=True)

    expected_norm = nn.utils.clip_grad_norm_(expected.parameters(), MAX_NORM, norm_type)
    norm = model.clip_grad_norm_(MAX_NORM, norm_type)
    assert str(norm) == str(expected_norm)
    torch.testing.assert_close(full_gradients(model), full_gradients(expected), rtol=0, atol=0, equal_nan=True)


@on_ranks(2)
def test_norms_of_low_precision_gradients_are_not_of_low_precision(world_size):
    for dtype, dtype_of_norm in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        model = shard(build("odd_mlp").to(dtype))
        model(*(tensor.to(dtype) for tensor in batch_of_rank(model, 0))).backward()
        gradients = torch.cat([gradient.flatten() for gradient in full_gradients(model).values()])
        norm = model.clip_grad_norm_(MAX_NORM)
        assert norm.dtype == dtype_of_norm
        torch.testing.assert_close(norm, gradients.to(dtype_of_norm).norm(), rtol=1e-5, atol=0)


@on_ranks(2)
def test_norms_whose_squares_overflow(world_size):
    """Every rank's norm fits into float32; the sum of their squares does not."""
    model = shard(nn.Linear(1, 2 * world_size, bias=False))
    model(torch.ones(1, 1)).sum().backward()
    model.weight.grad.to_local().copy_(torch.tensor([[9e18], [12e18]]))
    torch.testing.assert_close(model.clip_grad_norm_(1.0), torch.tensor(15e18 * math.sqrt(2)), rtol=1e-5, atol=0)


def test_a_single_process_clips_without_a_collective():
    expected, model = build("odd_parameters"), compiled(build("odd_parameters"))
    for network in (expected, model):
        network(*network.inputs(4, seed=0)).backward()
    assert_clips_like(model, expected, num_all_reduces=0)


@pytest.mark.parametrize("norm_type", [0, -1, math.nan])
def test_a_norm_that_is_none(norm_type):
    model = shard(build("odd_mlp"))
    with pytest.raises(ConfigError, match="norm_type is a positive number or inf"):
        model.clip_grad_norm_(1.0, norm_type)


class WithOwnNames(nn.Linear):
    """A model that has methods of these names keeps them."""

    def clip_grad_norm_(self):
        return "my own"

    def summon_full_params(self):
        return "my own too"


def test_methods_of_the_model_are_left_alone():
    model = shard(WithOwnNames(2, 2))
    assert (model.clip_grad_norm_(), model.summon_full_params()) == ("my own", "my own too")
