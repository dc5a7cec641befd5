"""`dp_mesh_dims`: parameters and inputs that are DTensors on a mesh with dimensions for data and for parts."""

import copy
import functools
import io

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims
from torch.distributed.fsdp import fully_shard as fully_shard_of_torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_compile import ConfigError
from fsdp_compile.compat import fully_shard
from tests.distributed.test_tensor_parallel import WIDTH, Block
from tests.distributed.training import CLOSE, STEPS, adamw
from tests.models import DEVICE
from tests.ranks import on_ranks

HIDDEN, ROWS = 12, 8


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(Block(HIDDEN), Block(HIDDEN))


def on_mesh(model, root):
    """Every parameter as a DTensor on the whole mesh; matrices of blocks are split over "tp", if that has one."""
    split = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    for owner_name, owner in model.named_modules():
        for name, parameter in [*owner.named_parameters(recurse=False)]:
            dim = split.get(f"{owner_name.rpartition('.')[2]}.{name}")
            of_parts = Replicate() if dim is None else Shard(dim)
            placements = [of_parts if axis == "tp" else Replicate() for axis in root.mesh_dim_names]
            owner.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), root, placements)))
    return model


def batch(root, step):
    """The rows of all ranks, each of which has those of its place on the dimensions for data."""
    torch.manual_seed(step)
    x = torch.randn(ROWS, WIDTH, device=DEVICE)
    return x, distribute_tensor(x, root, [Replicate() if axis == "tp" else Shard(0) for axis in root.mesh_dim_names])


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


MESHES = {
    "sharded": ((2, 2), ("rows", "tp"), DataParallelMeshDims(shard="rows")),
    "hybrid": ((2, 2, 1), ("copies", "rows", "tp"), DataParallelMeshDims(shard="rows", replicate="copies")),
    "nothing else": ((4,), ("rows",), DataParallelMeshDims(shard="rows")),
    "flattened": ((1, 2, 2), ("rows", "cp", "tp"), DataParallelMeshDims(shard=("rows", "cp"))),
}


@functools.cache
def root_of(kind):
    """One object for each mesh: torch's `fully_shard` takes no other that is equal."""
    sizes, names, _ = MESHES[kind]
    return init_device_mesh(DEVICE.type, sizes, mesh_dim_names=names)


@pytest.mark.parametrize("kind, backend", [*((kind, "aot_eager") for kind in MESHES), ("sharded", "inductor")])
@on_ranks(4)
def test_it_trains_as_torchs_own_and_as_the_whole_model(world_size, kind, backend):
    """The loss is that of all rows, so that gradients are sums over ranks: the factor undoes the mean."""
    torch._dynamo.reset()
    root, (_, _, dims) = root_of(kind), MESHES[kind]
    whole = blocks().to(DEVICE)
    ours, theirs = (on_mesh(copy.deepcopy(whole), root) for _ in range(2))
    for block in ours:
        fully_shard(block, mesh=root, dp_mesh_dims=dims)
    fully_shard(ours, mesh=root, dp_mesh_dims=dims, backend=backend)
    for block in (*theirs, theirs):
        fully_shard_of_torch(block, mesh=root, dp_mesh_dims=dims)
    for model in (ours, theirs):
        model.set_gradient_divide_factor(1.0)
    optimizers = [adamw(model.parameters()) for model in (whole, ours, theirs)]
    for step in STEPS:
        x, split = batch(root, step)
        losses = [whole(x).square().mean(), ours(split).square().mean(), theirs(split).square().mean()]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        for loss in losses[1:]:
            torch.testing.assert_close(full(loss), losses[0], **CLOSE)
    for name, expected in whole.named_parameters():
        found, of_torch = ours.get_parameter(name), theirs.get_parameter(name)
        torch.testing.assert_close(found.full_tensor(), expected, **CLOSE)
        assert found.placements == of_torch.placements and found.device_mesh == of_torch.device_mesh


@pytest.mark.parametrize("kind", ["sharded", "nothing else"])
@on_ranks(4)
def test_copies_compute_the_same_and_pickling_is_refused(world_size, kind):
    torch._dynamo.reset()
    root, (_, _, dims) = root_of(kind), MESHES[kind]
    model = fully_shard(on_mesh(blocks().to(DEVICE), root), mesh=root, dp_mesh_dims=dims, backend="aot_eager")
    copied = copy.deepcopy(model)
    _, split = batch(root, 0)
    torch.testing.assert_close(full(copied(split)), full(model(split)), rtol=0, atol=0)
    model.clip_grad_norm_(1.0)
    with pytest.raises(ConfigError, match="cannot be pickled"):
        torch.save(model, io.BytesIO())


@on_ranks(4)
def test_plain_tensors_are_sharded_over_the_dimensions_for_data(world_size):
    root = root_of("sharded")
    model = fully_shard(nn.Linear(4, 4, device=DEVICE), mesh=root, dp_mesh_dims=DataParallelMeshDims(shard="rows"))
    assert {parameter.device_mesh for parameter in model.parameters()} == {root["rows"]}


@on_ranks(4)
def test_what_cannot_be_sharded_so_stays_as_it_is(world_size):
    root = root_of("sharded")
    model = on_mesh(blocks().to(DEVICE), root)
    before = dict(model.named_parameters())

    def refuses(message, model, **arguments):
        with pytest.raises(ConfigError, match=message):
            fully_shard(model, mesh=root, **arguments)

    refuses("torch's DataParallelMeshDims, not tuple", model, dp_mesh_dims=("rows",))
    refuses("names 'cp', and the dimensions of mesh are", model, dp_mesh_dims=DataParallelMeshDims(shard="cp"))
    refuses("copies only", model, dp_mesh_dims=DataParallelMeshDims(replicate="rows"))
    refuses(
        r"1\.up\.weight has the placement .* over 'tp', not Replicate|0\.up\.weight has the placement",
        model,
        dp_mesh_dims=DataParallelMeshDims(shard="tp"),
    )
    refuses(
        "no offload policy", model, dp_mesh_dims=DataParallelMeshDims(shard="rows"), offload_policy="no offload policy"
    )
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    elsewhere = on_mesh(blocks().to(DEVICE), init_device_mesh(DEVICE.type, (4, 1), mesh_dim_names=("rows", "tp")))
    refuses("is a DTensor on .* and mesh is", elsewhere, dp_mesh_dims=DataParallelMeshDims(shard="rows"))
    assert dist.get_world_size() == world_size
