"""Checkpoints of model and optimizer: between numbers of ranks, from and to rank 0, and into models made on meta."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from fsdp_compile import ConfigError, shard
from tests.distributed.training import (
    adamw,
    assert_same_parameters,
    compiled,
    full,
    hybrid_mesh,
    load_checkpoint,
    save_checkpoint,
    state_of,
    train,
)
from tests.models import DEVICE, build
from tests.ranks import on_ranks, run_on_ranks

ROWS = 12  # of the batch: divisible by every world size here, so that all train on the same
FRONT_END_OF_NAME = {
    "odd_parameters": compiled,
    "odd_mlp": shard,
    "few_rows": shard,
}  # no world size divides their rows
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def whole_batch(model, step):
    return model.inputs(ROWS, seed=step)


def part_of_batch(model, step):
    rank, rows = dist.get_rank(), ROWS // dist.get_world_size()
    return tuple(tensor[rank * rows : (rank + 1) * rows] for tensor in whole_batch(model, step))


def trained_unsharded(name, steps):
    """Model and optimizer, trained without an interruption."""
    model = build(name)
    optimizer = adamw(model.parameters())
    train(model, optimizer, steps, batch=whole_batch)
    return model, optimizer


def full_state(model, optimizer):
    """All values by their path, in an order that all ranks share: full tensors are gathered."""
    leaves = {keystr(path): value for path, value in tree_flatten_with_path(state_of(model, optimizer))[0]}
    return {
        path: full(leaves[path]).clone() if torch.is_tensor(leaves[path]) else leaves[path] for path in sorted(leaves)
    }


def assert_equal(actual, expected):
    """The same keys, tensors to the last bit, and other values."""
    assert actual.keys() == expected.keys()
    for path, value in expected.items():
        if torch.is_tensor(value):
            assert actual[path].dtype == value.dtype, path
            assert torch.equal(actual[path], value), path
        else:
            assert actual[path] == value, path


def save(path, name, steps):
    """Train and save; rank 0 returns what was saved, in full."""
    model = FRONT_END_OF_NAME[name](build(name))
    optimizer = adamw(model.parameters())
    train(model, optimizer, steps, batch=part_of_batch)
    state = full_state(model, optimizer)
    save_checkpoint(path, model, optimizer)
    return state if dist.get_rank() == 0 else None


def load(path, name, steps, saved, **options):
    """Load into a new model, compare with what was saved, train on and compare with uninterrupted training."""
    model = FRONT_END_OF_NAME[name](build(name, seed=1), **options)
    optimizer = adamw(model.parameters())
    load_checkpoint(path, model, optimizer)
    assert_equal(full_state(model, optimizer), saved)
    train(model, optimizer, steps, batch=part_of_batch)
    assert_same_parameters(model, trained_unsharded(name, range(steps.stop))[0])


def load_all(path, saved):
    for name in FRONT_END_OF_NAME:
        load(path / name, name, range(2, 5), saved[name])


def load_in_one_process(path, saved):
    """A single rank without a process group: the parameters stay plain."""
    for name in FRONT_END_OF_NAME:
        model = compiled(build(name, seed=1))
        optimizer = adamw(model.parameters())
        load_checkpoint(path / name, model, optimizer, no_dist=True)
        assert_equal(full_state(model, optimizer), saved[name])
        train(model, optimizer, range(2, 5), batch=whole_batch)
        assert_same_parameters(model, trained_unsharded(name, range(5))[0])


def test_a_checkpoint_of_two_ranks_on_other_numbers_of_ranks(tmp_path):
    saved = {name: run_on_ranks(2, save, tmp_path / name, name, range(2))[0] for name in FRONT_END_OF_NAME}
    for world_size in (4, 3):
        run_on_ranks(world_size, load_all, tmp_path, saved)
    load_in_one_process(tmp_path, saved)


def load_on_a_hybrid_mesh(path, name, saved):
    load(path, name, range(2, 4), saved, mesh=hybrid_mesh())


def test_a_checkpoint_of_three_ranks_on_a_hybrid_mesh_and_without_sharding(tmp_path):
    name = "odd_parameters"
    saved = run_on_ranks(3, save, tmp_path, name, range(2))[0]
    run_on_ranks(4, load_on_a_hybrid_mesh, tmp_path, name, saved)

    model = build(name, seed=1)
    optimizer = adamw(model.parameters())
    load_checkpoint(tmp_path, model, optimizer, no_dist=True)
    assert_equal(full_state(model, optimizer), saved)


@pytest.mark.parametrize("name", ["gpt", "odd_mlp"])
@on_ranks(3)
def test_a_full_state_goes_to_rank_0_and_comes_back_from_it(world_size, name):
    expected, _ = trained_unsharded(name, range(4))
    model = shard(build(name))
    optimizer = adamw(model.parameters())
    train(model, optimizer, range(2), batch=part_of_batch)
    state = full_state(model, optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=FULL)
    if dist.get_rank() == 0:
        received = tree_flatten_with_path({"model": model_state, "optimizer": optimizer_state})[0]
        assert_equal({keystr(path): value for path, value in received}, state)
    else:
        assert (model_state, optimizer_state) == ({}, {})

    model = shard(build(name, seed=1))
    optimizer = adamw(model.parameters())
    set_model_state_dict(model, model_state, options=FROM_RANK_0)  # set_state_dict needs a state on every rank
    set_optimizer_state_dict(model, optimizer, optimizer_state, options=FROM_RANK_0)
    assert_equal(full_state(model, optimizer), state)
    train(model, optimizer, range(2, 4), batch=part_of_batch)
    assert_same_parameters(model, expected)


@on_ranks(3)
def test_a_model_made_on_the_meta_device_is_filled_from_rank_0(world_size):
    expected = build("odd_parameters")
    # torch 2.11 to 2.15 broadcast the memory of a tensor that is not contiguous, into FSDP2's models too.
    state = {name: value.contiguous() for name, value in expected.state_dict().items()} if dist.get_rank() == 0 else {}
    with torch.device("meta"):
        model = build("odd_parameters")
    compiled(model)
    model.to_empty(device=DEVICE)
    set_model_state_dict(model, state, options=FROM_RANK_0)
    assert_equal({name: full(value) for name, value in model.state_dict().items()}, expected.state_dict())
    train(model, adamw(model.parameters()), range(2), batch=part_of_batch)
    assert_same_parameters(model, trained_unsharded("odd_parameters", range(2))[0])


@pytest.mark.parametrize("assign", [False, True])
@on_ranks(3)
def test_a_model_made_on_the_meta_device_is_filled_from_a_checkpoint(world_size, assign, tmp_path):
    dcp.save(shard(build("odd_parameters")).state_dict(), checkpoint_id=tmp_path)
    with torch.device("meta"):
        model = build("odd_parameters")
    compiled(model)
    if assign:  # the checkpoint's tensors become the parameters
        state = {
            name: torch.distributed.tensor.empty(
                value.shape, device_mesh=value.device_mesh, placements=value.placements, dtype=value.dtype
            )
            for name, value in model.state_dict().items()
        }
        assert all(isinstance(value, DTensor) and not value.is_meta for value in state.values())
    else:
        model.to_empty(device=DEVICE)
        state = model.state_dict()
    dcp.load(state, checkpoint_id=tmp_path)
    model.load_state_dict(state, assign=assign)
    train(model, adamw(model.parameters()), range(2), batch=part_of_batch)
    assert_same_parameters(model, trained_unsharded("odd_parameters", range(2))[0])


@on_ranks(2)
def test_a_model_converted_before_its_checkpoint_is_loaded(world_size, tmp_path):
    """`.to(dtype)` keeps names, and a checkpoint of another dtype is converted as by the unsharded model."""
    dcp.save(shard(build("odd_mlp")).state_dict(), checkpoint_id=tmp_path)
    expected = build("odd_mlp", seed=1).to(torch.bfloat16)
    expected.load_state_dict(build("odd_mlp").state_dict())
    model = compiled(build("odd_mlp", seed=1)).to(torch.bfloat16)
    state = {name: value.float() for name, value in model.state_dict().items()}
    dcp.load(state, checkpoint_id=tmp_path)
    model.load_state_dict(state)
    assert [*model.state_dict()] == [*expected.state_dict()]
    assert_equal({name: full(value) for name, value in model.state_dict().items()}, dict(expected.state_dict()))
    batch = [tensor.bfloat16() for tensor in whole_batch(model, 0)]
    assert torch.equal(model(*batch), expected(*batch))


@on_ranks(2)
def test_part_of_a_model_state_dict(world_size):
    """strict=False with sharded values, and what a state dict of the wrong kind leads to."""
    donor, model = shard(build("odd_mlp")), compiled(build("odd_mlp", seed=1))
    part = {name: value for name, value in donor.state_dict().items() if "weight" in name}
    missing, unexpected = model.load_state_dict(part | {"other": torch.ones(1)}, strict=False)
    assert (missing, unexpected) == ([f"layers.{i}.bias" for i in (0, 2, 4)], ["other"])
    expected = build("odd_mlp", seed=1)
    expected.load_state_dict({name: full(value) for name, value in part.items()}, strict=False)
    assert_same_parameters(model, expected)

    model.layers[0].weight = nn.Parameter(torch.zeros(7, 5))  # plain, behind the model's back
    with pytest.raises(ConfigError, match="layers.0.weight was sharded as a DTensor"):
        model(*part_of_batch(model, 0))


@on_ranks(2)
def test_names_are_those_of_the_unsharded_model_after_compiled_steps(world_size):
    expected, model = build("conv_net"), compiled(build("conv_net"))
    optimizer = adamw(model.parameters())
    train(model, optimizer, [0], batch=part_of_batch)
    names = [name for name, _ in expected.named_parameters()]
    assert [*model.state_dict()] == [*expected.state_dict()]
    assert [*get_model_state_dict(model)] == [*get_model_state_dict(expected)]
    in_optimizer = get_state_dict(model, optimizer)[1]
    assert [*in_optimizer["state"]] == names
    assert in_optimizer["param_groups"][0]["params"] == names
