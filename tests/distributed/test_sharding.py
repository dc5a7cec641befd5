"""What sharding makes of a model and its parameters."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_compile import shard
from tests.distributed.training import assert_same_tensors, full_parameters
from tests.models import MODELS, Block, build
from tests.ranks import on_ranks


def num_local_rows(num_rows):
    """Rows of this rank: chunks of ceil(rows / world size), the last ones shorter or empty."""
    rows = -(-num_rows // dist.get_world_size())
    return max(0, min(rows, num_rows - dist.get_rank() * rows))


@pytest.mark.parametrize("name", list(MODELS))
@on_ranks(2, 3, 4)
def test_parameters_are_dtensors_with_the_original_names_and_values(world_size, name):
    expected = build(name)
    model = build(name)
    same = shard(model)

    assert same is model
    assert same.module is model
    assert [*model.state_dict()] == [*expected.state_dict()]
    for (name, parameter), (expected_name, value) in zip(
        model.named_parameters(), expected.named_parameters(), strict=True
    ):
        assert name == expected_name
        assert isinstance(parameter, nn.Parameter), name
        assert isinstance(parameter, DTensor), name
        assert parameter.placements == ((Shard(0),) if value.dim() else (Replicate(),)), name
        assert (parameter.shape, parameter.dtype) == (value.shape, value.dtype), name
        assert parameter.requires_grad == value.requires_grad, name
        assert parameter.is_leaf, name
        if value.dim():
            assert parameter.to_local().shape == (num_local_rows(value.shape[0]), *value.shape[1:]), name
        assert torch.equal(parameter.full_tensor(), value), name


@on_ranks(2, 4)
def test_a_rank_holds_one_nth_of_the_bytes(world_size):
    num_full_bytes = sum(value.nbytes for value in build("gpt").parameters())
    model = shard(build("gpt"))

    storages = {
        parameter.to_local().untyped_storage().data_ptr(): parameter.to_local().untyped_storage().nbytes()
        for parameter in model.parameters()
    }
    assert sum(parameter.to_local().nbytes for parameter in model.parameters()) == num_full_bytes // world_size
    assert sum(storages.values()) <= 1.02 * num_full_bytes / world_size


@on_ranks(2)
def test_values_come_from_rank_0(world_size):
    expected = build("conv_net", seed=0)
    model = build("conv_net", seed=dist.get_rank())
    with torch.no_grad():
        model.stem[1].running_mean.fill_(dist.get_rank() + 5.0)
    shard(model)

    assert_same_tensors(full_parameters(model), full_parameters(expected))
    assert torch.equal(model.stem[1].running_mean, torch.full((6,), 5.0))


@on_ranks(2)
def test_values_stay_the_ranks_own_on_request(world_size):
    own = dict(build("conv_net", seed=dist.get_rank()).named_parameters())
    model = build("conv_net", seed=dist.get_rank())
    with torch.no_grad():
        model.stem[1].running_mean.fill_(dist.get_rank() + 5.0)
    shard(model, sync_module_states=False)

    for name, parameter in model.named_parameters():
        first_row = -(-parameter.shape[0] // world_size) * dist.get_rank()
        rows = own[name].detach()[first_row:][: parameter.to_local().shape[0]]
        assert torch.equal(parameter.to_local(), rows), name
    assert torch.equal(model.stem[1].running_mean, torch.full((6,), dist.get_rank() + 5.0))


@on_ranks(2)
def test_tied_parameters_stay_one_object(world_size):
    model = shard(build("gpt"))

    assert model.head.weight is model.tokens.weight
    assert model.head._parameters["weight"] is model.tokens._parameters["weight"]
    assert "head.weight" not in dict(model.named_parameters())
    assert {"head.weight", "tokens.weight"} <= set(model.state_dict())


@on_ranks(2)
def test_the_model_keeps_what_makes_it_a_model_of_its_class(world_size):
    original = build("gpt")
    modules = dict(original.named_modules())
    model = shard(original)

    assert dict(model.named_modules()) == modules
    assert isinstance(model, MODELS["gpt"])
    assert type(model).__name__ == MODELS["gpt"].__name__
    assert all(isinstance(block, Block) for block in model.blocks)
