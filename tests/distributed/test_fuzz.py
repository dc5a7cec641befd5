"""Random models on real ranks: three steps are those of the unsharded model.

`--hypothesis-profile=thorough` trains 100 of them.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile import fsdp_compile
from tests.distributed.training import assert_close, assert_same_gradients, assert_same_parameters, sgd
from tests.random_models import RandomModel, schedules, trees
from tests.ranks import run_on_ranks

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


def compare(tree, is_double, options):
    torch.manual_seed(0)
    expected = RandomModel(tree, is_double)
    model = copy.deepcopy(expected)
    fsdp_compile(model, **options)
    optimizers = [sgd(each.parameters()) for each in (model, expected)]
    ranks = range(dist.get_world_size())
    for step in range(3):
        loss = loss_of(model, dist.get_rank(), step)
        losses = [loss_of(expected, rank, step) for rank in ranks]
        assert_close(loss, losses[dist.get_rank()])
        if loss.requires_grad:
            loss.backward()
            torch.stack(losses).mean().backward()
        assert_same_gradients(model, expected)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, expected)


@settings(max_examples=25 if IS_THOROUGH else 3, suppress_health_check=list(HealthCheck))
@given(tree=trees(with_dropout=False), is_double=st.booleans(), options=options())
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_random_model_trains_as_it_does_unsharded(world_size, tree, is_double, options):
    run_on_ranks(world_size, compare, tree, is_double, options)
