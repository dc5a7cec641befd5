"""Optimizers built before and after sharding, and gradient clipping."""

import functools

import pytest
import torch
from torch import nn

from fsdp_compile import ConfigError, fsdp_compile, shard
from tests.distributed.training import (
    adamw,
    assert_close,
    assert_same_parameters,
    batch_of_rank,
    full,
    full_gradients,
    global_batch,
    train,
    train_unsharded,
)
from tests.models import build
from tests.ranks import on_ranks

STEPS = range(4)
compiled = functools.partial(fsdp_compile, backend="aot_eager")
both_front_ends = pytest.mark.parametrize("front_end", [compiled, shard], ids=["compiled", "eager"])


@both_front_ends
@on_ranks(2)
def test_an_optimizer_built_before_sharding_trains_the_model(world_size, front_end):
    expected, _ = train_unsharded("gpt", STEPS)
    model = build("gpt")
    optimizer = adamw(model.parameters())
    front_end(model)
    train(model, optimizer, STEPS)

    assert_same_parameters(model, expected)
    in_groups = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert [id(parameter) for parameter in in_groups] == [id(parameter) for parameter in model.parameters()]


@both_front_ends
@on_ranks(2)
def test_an_optimizer_with_state_raises_at_its_first_step_after_sharding(world_size, front_end):
    model = build("odd_mlp")
    optimizer = adamw(model.parameters())
    train(model, optimizer, [0])
    front_end(model)
    model(*batch_of_rank(model, 1)).backward()
    with pytest.raises((ConfigError, RuntimeError), match="build the optimizer after sharding"):
        optimizer.step()


@on_ranks(2)
def test_an_optimizer_of_another_model_is_left_alone(world_size):
    other, expected = build("odd_mlp"), build("odd_mlp")
    optimizer, expected_optimizer = adamw(other.parameters()), adamw(expected.parameters())
    train(other, optimizer, [0])
    train(expected, expected_optimizer, [0])
    shard(build("odd_mlp", seed=1))
    train(other, optimizer, [1])
    train(expected, expected_optimizer, [1])
    assert_same_parameters(other, expected)


@pytest.mark.parametrize("name", ["gpt", "odd_mlp", "odd_parameters", "few_rows"])
@on_ranks(2, 4)
def test_clip_grad_norm_equals_the_unsharded_models(world_size, name):
    expected, model = build(name), compiled(build(name))
    expected(*global_batch(expected, 0)).backward()
    model(*batch_of_rank(model, 0)).backward()
    expected_norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.01)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    assert expected_norm > 0.01
    assert_close(full(norm), expected_norm)
    for gradient, value in zip(full_gradients(model).values(), full_gradients(expected).values(), strict=True):
        torch.testing.assert_close(gradient, value, rtol=1e-4, atol=1e-7)
