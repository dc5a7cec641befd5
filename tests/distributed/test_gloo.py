"""Graphs overlap collectives, which gloo's own groups survive only most of the time."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile.runtime.gloo import TOGETHER, overlapping_group
from fsdp_compile.runtime.groups import mesh_over
from tests.distributed.training import assert_trains_as, batch_of_rank, compiled, hybrid_mesh, sgd
from tests.models import build
from tests.ranks import on_ranks

_c10d = torch.ops._c10d_functional


def groups_of(model):
    """The process groups of the collectives in a model's graphs."""
    model(*batch_of_rank(model, 0)).backward()
    sides = [side for graphs in model.graphs for side in (graphs.lowered.forward, graphs.lowered.backward)]
    calls = [node for side in sides for node in side.graph.nodes if "_c10d_functional" in str(node.target)]
    names = {node.args[-1] for node in calls if "wait_tensor" not in str(node.target)}
    return [_resolve_process_group(name) for name in sorted(names)]


def num_threads_of(group):
    return group._get_backend(torch.device("cpu")).options._threads


@on_ranks(2)
def test_collectives_run_on_a_direct_group_and_not_on_the_users_group(world_size):
    known = len(dist.distributed_c10d._world.pg_names)
    (group,) = groups_of(compiled(build("odd_mlp")))
    assert group is not dist.group.WORLD
    assert (num_threads_of(group), group.size(), group.rank()) == (1, 2, dist.get_rank())
    assert groups_of(compiled(build("gpt"))) == [group]
    assert len(dist.distributed_c10d._world.pg_names) == known  # torch names groups by this number


def of_rank(rank, numel, dtype):
    return ((torch.arange(numel) + 10 * rank) % 16).to(dtype)


@on_ranks(2, 3, 4)
def test_messages_from_rank_to_rank_gather_and_reduce(world_size):
    """Small ones travel together, large ones alone."""
    name = overlapping_group(dist.group.WORLD, "cpu").group_name
    rank = dist.get_rank()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        sizes = (5, 0, TOGETHER, 3)
        parts = [of_rank(rank, numel, dtype) for numel in sizes]
        gathered = _c10d.all_gather_into_tensor_coalesced(parts, world_size, name)
        fulls = [of_rank(rank, numel * world_size, dtype) for numel in sizes]
        reduced = {how: _c10d.reduce_scatter_tensor_coalesced(fulls, how, world_size, name) for how in ("sum", "avg")}
        for found, numel in zip(map(_c10d.wait_tensor, gathered), sizes, strict=True):
            assert torch.equal(found, torch.cat([of_rank(other, numel, dtype) for other in range(world_size)]))
        for index, numel in enumerate(sizes):
            total = sum(of_rank(other, numel * world_size, dtype) for other in range(world_size))
            total = total[rank * numel : (rank + 1) * numel]
            assert torch.equal(_c10d.wait_tensor(reduced["sum"][index]), total)
            assert torch.equal(_c10d.wait_tensor(reduced["avg"][index]), total / world_size)
        everywhere = _c10d.all_reduce(of_rank(rank, 4, dtype).view(2, 2), "avg", name)
        total = sum(of_rank(other, 4, dtype) for other in range(world_size))
        assert torch.equal(_c10d.wait_tensor(everywhere), (total / world_size).view(2, 2))


@on_ranks(2, 3, 4)
def test_all_reduces_are_exact_and_the_same_bits_on_all_ranks(world_size):
    """Small ones go to every rank whole, large ones in parts, whose numbers of elements are no multiples of ranks."""
    name = overlapping_group(dist.group.WORLD, "cpu").group_name
    generator = torch.Generator().manual_seed(dist.get_rank())
    tensors = [torch.randn(*shape, generator=generator) for shape in ((5,), (TOGETHER // 4 + 1,), (7, 11_003))]
    pending = [_c10d.all_reduce(tensor, how, name) for tensor in tensors for how in ("sum", "avg", "max")]
    found = [_c10d.wait_tensor(each) for each in pending]
    for tensor, (total, mean, largest) in zip(tensors, zip(*[iter(found)] * 3, strict=True), strict=True):
        of_ranks = [torch.empty_like(tensor) for _ in range(world_size)]
        dist.all_gather(of_ranks, tensor)
        expected = sum(of_ranks[1:], start=of_ranks[0])  # in the order of the ranks
        assert torch.equal(total, expected)
        assert torch.equal(mean, expected / world_size)
        assert torch.equal(largest, torch.stack(of_ranks).amax(0))


@on_ranks(2)
def test_a_reduction_that_gradients_do_not_have_is_refused(world_size):
    name = overlapping_group(dist.group.WORLD, "cpu").group_name
    with pytest.raises(NotImplementedError, match="sums or averages"):
        _c10d.reduce_scatter_tensor(torch.ones(4), "max", world_size, name)


@on_ranks(4)
def test_both_axes_of_a_mesh_have_a_direct_group(world_size):
    groups = groups_of(compiled(build("odd_mlp"), hybrid_mesh()))
    assert len(groups) == 2 and {num_threads_of(group) for group in groups} == {1}
    rank = torch.tensor([dist.get_rank()])
    found = [_c10d.wait_tensor(_c10d.all_reduce(rank, "sum", group.group_name)) for group in groups]
    column, row = dist.get_rank() % 2, dist.get_rank() // 2
    assert sorted(int(ranks) for ranks in found) == sorted([2 * column + 2, 4 * row + 1])


@on_ranks(4)
def test_ranks_that_know_different_numbers_of_groups_find_each_other(world_size):
    mesh = hybrid_mesh()
    if dist.get_rank() == 1:
        dist.new_group([1], use_local_synchronization=True)
    for options in (
        {"mesh": mesh},
        {"mesh": mesh, "sharding_strategy": ShardingStrategy.NO_SHARD},
        {"sharding_strategy": ShardingStrategy.HYBRID_SHARD},
        {"reshard_after_forward": 2},
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LOCAL_WORLD_SIZE", "2")
            model = compiled(build("odd_mlp"), **options)
        assert_trains_as(model, build("odd_mlp"), range(2), sgd)

    assert mesh_over([[0, 1], [2, 3]], "cpu", ("replicate", "shard")) == mesh
    row = mesh_over([[0, 1], [2, 3]][dist.get_rank() // 2], "cpu", None)
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total, group=row.get_group())
    assert int(total) == [1, 5][dist.get_rank() // 2]


@on_ranks(4)
def test_ranks_make_their_group_without_splitting_the_group_of_all(world_size):
    """NCCL splits the group of all ranks if a device is bound to it, and waits until all ranks call."""
    bound = []
    make = distributed_c10d._new_process_group_helper

    def helper(*arguments, **options):
        bound.append(dist.group.WORLD.bound_device_id)
        return make(*arguments, **options)

    device = torch.device("cpu", 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_c10d, "_new_process_group_helper", helper)
        patch.setattr(dist.group.WORLD, "bound_device_id", device)
        first = dist.get_rank() // 2 * 2
        mesh_over([[first + 1, first]], "cpu", ("replicate", "shard"))
        assert bound == [None, None]
        assert dist.group.WORLD.bound_device_id == device
