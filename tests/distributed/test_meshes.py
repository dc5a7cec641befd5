"""Meshes and process groups: hybrid sharding, a part of the ranks, a single process."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_compile import shard
from fsdp_compile.module.sharding import sharding_of
from fsdp_compile.runtime.groups import backend_of
from tests.distributed.training import (
    assert_same_gradients,
    assert_same_parameters,
    assert_trains_as,
    batch_of_rank,
    both_front_ends,
    compiled,
    hybrid_mesh,
)
from tests.models import DEVICE, build
from tests.ranks import on_ranks


@pytest.mark.parametrize("name", ["odd_mlp", "adapted", "odd_parameters"])
@both_front_ends
@on_ranks(4)
def test_hybrid_sharding_equals_the_unsharded_model(world_size, front_end, name):
    model = front_end(build(name), hybrid_mesh())
    assert_trains_as(model, build(name))


@on_ranks(4)
def test_hybrid_sharding_splits_along_one_axis_and_copies_along_the_other(world_size):
    num_full_bytes = sum(parameter.nbytes for parameter in build("gpt").parameters())
    model = shard(build("gpt"), hybrid_mesh())
    locals_of_rank = [None] * world_size
    dist.all_gather_object(locals_of_rank, [parameter.to_local().detach() for parameter in model.parameters()])

    assert sum(tensor.nbytes for tensor in locals_of_rank[0]) == num_full_bytes // 2
    for first, second in ((0, 2), (1, 3)):  # ranks that hold the same shards
        assert all(map(torch.equal, locals_of_rank[first], locals_of_rank[second]))
    assert not torch.equal(locals_of_rank[0][0], locals_of_rank[1][0])


@both_front_ends
@on_ranks(4)
def test_values_come_from_rank_0_on_a_hybrid_mesh(world_size, front_end):
    model = front_end(build("odd_mlp", seed=dist.get_rank()), hybrid_mesh())
    assert_same_parameters(model, build("odd_mlp", seed=0))


def pair_of_this_rank():
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return groups[dist.get_rank() // 2]


@both_front_ends
@on_ranks(4)
def test_a_process_group_shards_over_its_ranks_only(world_size, front_end):
    expected = build("odd_mlp")
    model = front_end(build("odd_mlp"), process_group=pair_of_this_rank())
    first = dist.get_rank() // 2 * 2
    for rank in (first, first + 1):
        (expected(*batch_of_rank(expected, 0, rank)) / 2).backward()
    model(*batch_of_rank(model, 0)).backward()
    assert_same_gradients(model, expected)


@both_front_ends
@on_ranks(2)
def test_a_mesh_of_one_dimension_shards_over_it(world_size, front_end):
    mesh = init_device_mesh(DEVICE.type, (2,))
    model = front_end(build("odd_mlp"), mesh)
    assert_trains_as(model, build("odd_mlp"))
    assert all(parameter.device_mesh == mesh for parameter in model.parameters())


def test_a_group_has_a_backend_for_each_type_of_device(monkeypatch):
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.get_backend() == "undefined"  # so torch calls those that it chooses itself
        assert backend_of(None, "cpu") == "gloo"
        assert backend_of(None, "mps") == ""
        monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")  # as where there are GPUs
        assert [backend_of(None, kind) for kind in ("cpu", "cuda")] == ["gloo", "nccl"]
    finally:
        dist.destroy_process_group()


@on_ranks(2)
def test_no_shard_of_a_process_has_the_key_of_another(world_size):
    shards = [each for _ in range(2) for each in sharding_of(compiled(build("odd_mlp"))).shards]
    assert len({each.key for each in shards}) == len(shards) > 2  # Dynamo guards on it


def test_a_single_process_keeps_plain_parameters_and_no_collective():
    expected = build("gpt")
    expected(*expected.inputs(4, seed=0)).backward()
    model = compiled(build("gpt"))
    model(*model.inputs(4, seed=0)).backward()

    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert_same_gradients(model, expected)
    text = str(model.graphs[0].forward) + str(model.graphs[0].backward)
    assert "all_gather" not in text
    assert "reduce_scatter" not in text
