"""torch.save(model), torch.load, and averaged copies: other models, sharded and compiled as the one they come from."""

import copy
import dataclasses
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from fsdp_compile import ConfigError, shard
from fsdp_compile.compat import fully_shard
from fsdp_compile.module import saving
from fsdp_compile.module.sharding import Sharding
from tests.distributed.training import (
    adamw,
    assert_close,
    assert_same_gradients,
    assert_same_parameters,
    batch_of_rank,
    both_front_ends,
    compiled,
    full_parameters,
    global_batch,
    hybrid_mesh,
    saved_and_loaded,
    train,
)
from tests.models import build
from tests.ranks import join_fake_group, on_ranks


def assert_trains_like(model, expected, optimizer_state=None):
    """The same losses and parameters after three steps, to the last bit."""
    optimizers = [adamw(network.parameters()) for network in (model, expected)]
    for optimizer in optimizers if optimizer_state else []:
        optimizer.load_state_dict(copy.deepcopy(optimizer_state))  # it keeps the tensors that it is given
    losses, expected_losses = (
        train(network, optimizer, range(2, 5)) for network, optimizer in zip((model, expected), optimizers, strict=True)
    )
    assert torch.equal(losses, expected_losses)
    assert_equal_parameters(model, expected)
    for name, buffer in expected.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name


def assert_equal_parameters(model, expected):
    values, expected_values = full_parameters(model), full_parameters(expected)
    assert list(values) == list(expected_values)
    assert all(torch.equal(values[name], value) for name, value in expected_values.items())


@pytest.mark.parametrize("name", ["odd_parameters", "conv_net", "adapted"])
@both_front_ends
@on_ranks(2)
def test_a_model_from_a_file_trains_on_as_the_one_that_was_saved(world_size, front_end, name):
    model = front_end(build(name))
    optimizer = adamw(model.parameters())
    train(model, optimizer, range(2))
    loaded = saved_and_loaded(model)

    assert type(loaded).__name__ == type(model).__name__
    assert isinstance(loaded, type(build(name)))
    assert [*loaded.state_dict()] == [*build(name).state_dict()]
    assert all(isinstance(parameter, DTensor) for parameter in loaded.parameters())
    assert [parameter.requires_grad for parameter in loaded.parameters()] == [
        parameter.requires_grad for parameter in model.parameters()
    ]
    assert_equal_parameters(loaded, model)
    assert_trains_like(loaded, model, optimizer.state_dict())


@on_ranks(2)
def test_a_model_from_a_file_has_shards_of_its_own_and_the_same_graphs(world_size):
    options = {"reshard_after_forward": {"blocks.1": False}, "backward_prefetch": 2, "dynamic": False}
    model = compiled(build("gpt"), **options)
    loaded = saved_and_loaded(saved_and_loaded(model))
    assert loaded.head.weight is loaded.tokens.weight
    for network in (model, loaded):
        network(*batch_of_rank(network, 0)).backward()
    assert str(loaded.graphs[0]) == str(model.graphs[0])
    assert loaded.graphs[0].schedule() == model.graphs[0].schedule()
    for network in (model, loaded):
        network.zero_grad()
    assert_trains_like(loaded, model)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.zero_()
    assert all(parameter.any() for parameter in full_parameters(model).values())


@pytest.mark.parametrize("name", ["odd_mlp", "odd_parameters"])
@on_ranks(4)
def test_a_model_on_a_hybrid_mesh_is_loaded_on_one(world_size, name):
    model = shard(build(name), hybrid_mesh())
    loaded = saved_and_loaded(model)
    assert next(loaded.parameters()).device_mesh.mesh_dim_names == ("replicate", "shard")
    assert_trains_like(loaded, model)


@on_ranks(4)
def test_a_model_on_some_ranks_is_loaded_on_them(world_size):
    pairs = [dist.new_group([0, 1]), dist.new_group([3, 2])]
    model = shard(build("odd_mlp"), process_group=pairs[dist.get_rank() // 2])
    if dist.get_rank() < 2:  # the other pair does not take part
        loaded = saved_and_loaded(model)
        assert next(loaded.parameters()).device_mesh.mesh.tolist() == [0, 1]
        assert_trains_like(loaded, model)


OPTIONS = {
    "whole on every rank": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "smaller groups": {"reshard_after_forward": 2},
    "precision, offload, sums": {
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
        "gradient_reduction": "sum",
    },
}


@pytest.mark.parametrize("option", list(OPTIONS))
@on_ranks(4)
def test_options_are_saved(world_size, option):
    """Graphs show them all; what they lead to is equal as well."""
    model = compiled(build("odd_parameters"), **OPTIONS[option])
    loaded = saved_and_loaded(model)
    assert_trains_like(loaded, model)
    assert str(loaded.graphs[0]) == str(model.graphs[0])
    assert loaded.graphs[0].schedule() == model.graphs[0].schedule()


@on_ranks(2)
def test_ignored_parameters_are_saved(world_size):
    model = build("odd_mlp")
    shard(model, ignored_params={model.layers[0].weight})
    with torch.no_grad():
        model.layers[0].weight += dist.get_rank()
    loaded = saved_and_loaded(model)
    assert type(loaded.layers[0].weight) is nn.Parameter
    assert_trains_like(loaded, model)


@on_ranks(2)
def test_a_model_sharded_from_the_bottom_up_is_saved_as_a_whole(world_size):
    model = build("odd_mlp")
    for module in (model.layers[0], model.layers[2], model):
        fully_shard(module, backend="aot_eager")
    loaded = saved_and_loaded(model)
    assert_trains_like(loaded, model)
    assert loaded.graphs[0].schedule() == model.graphs[0].schedule()


class Logging(nn.Module):
    """Refers to its parts and parameters from several places, as models do."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 3)
        self.second = nn.Linear(3, 1)
        self.in_order = [self.first, self.second]
        self.notes = {"rank": None}

    def forward(self, x):
        for layer in self.in_order:
            x = torch.tanh(layer(x))
        return x.mean()


def double(module, args, output):
    return 2 * output


@both_front_ends
@on_ranks(2)
def test_what_else_a_model_holds_is_saved_with_it(world_size, front_end):
    model = Logging()
    model.first.register_forward_hook(double)
    model.notes["rank"] = dist.get_rank()
    front_end(model)
    model.second.requires_grad_(False)
    model.mesh = model.first.weight.device_mesh
    for copied in (saved_and_loaded({"model": [model]})["model"][0], copy.deepcopy(model)):
        assert copied.in_order[0] is copied.first
        assert copied.notes == {"rank": dist.get_rank()}
        assert copied.mesh == copied.first.weight.device_mesh
        assert [parameter.requires_grad for parameter in copied.parameters()] == [True, True, False, False]
        x = torch.ones(2, 5)
        model.zero_grad()
        for network in (model, copied):
            network(x).backward()
        assert_same_gradients(copied, model)


@pytest.mark.parametrize("option", [None, "precision, offload, sums"])
@both_front_ends
def test_a_single_process_saves_and_loads(front_end, option):
    model = front_end(build("odd_parameters"), **OPTIONS.get(option, {}))
    model(*model.inputs(4, seed=0)).backward()
    loaded = saved_and_loaded(model)
    assert type(loaded.head.weight) is nn.Parameter
    for network in (model, loaded):
        network.zero_grad()
        network(*network.inputs(4, seed=0)).backward()
    assert all(
        torch.equal(parameter.grad, loaded.get_parameter(name).grad) for name, parameter in model.named_parameters()
    )
    assert list(map(str, loaded.graphs)) == list(map(str, model.graphs))
    assert torch.equal(saved_and_loaded(model.head).weight, model.head.weight)  # nothing else comes with a part


# What is refused: one process that takes the places of several ranks


@pytest.mark.parametrize("place", [(0, 4), (1, 2), (0, 1), (0, 0)], ids=str)
def test_a_file_of_another_rank_or_world_size(two_ranks, place):
    saved = pickle.dumps(shard(build("odd_mlp")))
    rank, world_size = place
    join_fake_group(world_size, rank)
    found = (
        f"saved by rank 0 of 2, and is loaded on rank {rank} of {max(1, world_size)}: .*torch.distributed.checkpoint"
    )
    with pytest.raises(ConfigError, match=found):
        pickle.loads(saved)


def test_a_file_of_a_single_process_on_two_ranks():
    saved = pickle.dumps(shard(build("odd_mlp")))
    join_fake_group(2)
    with pytest.raises(ConfigError, match="saved by rank 0 of 1, and is loaded on rank 0 of 2"):
        pickle.loads(saved)
    join_fake_group(0)


class SavesItself(nn.Linear):
    """Its class decides what is pickled: the constructor's arguments."""

    def __reduce__(self):
        return SavesItself, (2, 2)


def test_a_model_that_pickles_itself_without_its_parameters(two_ranks):
    saved = pickle.dumps(shard(SavesItself(2, 2)))
    with pytest.raises(ConfigError, match="weight was not saved: the model's class decides itself what is pickled"):
        pickle.loads(saved)


@pytest.mark.parametrize("copy_", [copy.deepcopy, pickle.dumps], ids=["deepcopy", "pickle"])
def test_parts_are_not_copied_or_pickled(two_ranks, copy_):
    model = shard(build("gpt"))
    with pytest.raises(ConfigError, match="parts of a sharded model cannot be copied or pickled"):
        copy_(model.blocks[0].up)


def test_a_shallow_copy_is_refused(two_ranks):
    with pytest.raises(ConfigError, match=r"shallow copy of a sharded model .* use copy.deepcopy"):
        copy.copy(shard(build("odd_mlp")))


# Averages


AVERAGES = {
    "equal weights": {},
    "moving": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "moving, with buffers": {"avg_fn": get_ema_avg_fn(0.9), "use_buffers": True},
}


@pytest.mark.parametrize(("name", "kind"), [*zip(["gpt", "odd_parameters", "conv_net"], AVERAGES, strict=True)])
@on_ranks(2)
def test_an_averaged_model_equals_the_unsharded_one(world_size, name, kind):
    batch = global_batch if name != "conv_net" else lambda model, step: model.inputs(4, seed=step)
    expected, model = build(name), compiled(build(name))
    optimizers = [adamw(network.parameters()) for network in (expected, model)]
    averages = [AveragedModel(network, **AVERAGES[kind]) for network in (expected, model)]
    for step in range(3):
        train(expected, optimizers[0], [step], batch=batch)
        train(model, optimizers[1], [step], batch=batch_of_rank if name != "conv_net" else batch)
        for average, network in zip(averages, (expected, model), strict=True):
            average.update_parameters(network)

    expected_average, average = averages
    assert [*average.state_dict()] == [*expected_average.state_dict()]
    assert_same_parameters(average, expected_average)
    assert_close(dict(average.named_buffers()), dict(expected_average.named_buffers()))
    with torch.no_grad():
        held_out = batch_of_rank(expected, 9)
        assert_close(average(*held_out), expected_average(*held_out))
    assert_same_parameters(model, expected)


def test_what_is_not_saved_of_a_sharding_is_what_it_has():
    """A field that was renamed would be pickled."""
    assert {field.name for field in dataclasses.fields(Sharding)} >= saving._MADE_ANEW
