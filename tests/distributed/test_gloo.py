"""Graphs overlap collectives, which gloo's own groups survive only most of the time."""

import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _resolve_process_group

from fsdp_compile import fsdp_compile
from fsdp_compile.runtime.groups import mesh_over
from tests.distributed.training import assert_same_parameters, batch_of_rank, global_batch, sgd, train
from tests.models import build
from tests.ranks import on_ranks

compiled = functools.partial(fsdp_compile, backend="aot_eager")


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
def test_collectives_run_on_one_thread_for_each_group_and_not_on_the_users_group(world_size):
    known = len(dist.distributed_c10d._world.pg_names)
    (group,) = groups_of(compiled(build("odd_mlp")))
    assert group is not dist.group.WORLD
    assert (num_threads_of(group), group.size(), group.rank()) == (1, 2, dist.get_rank())
    assert groups_of(compiled(build("gpt"))) == [group]
    assert len(dist.distributed_c10d._world.pg_names) == known  # torch names groups by this number


@on_ranks(4)
def test_both_axes_of_a_mesh_have_a_group_of_one_thread(world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    groups = groups_of(compiled(build("odd_mlp"), mesh))
    assert len(groups) == 2 and {num_threads_of(group) for group in groups} == {1}
    found = [torch.tensor([dist.get_rank()]) for _ in groups]
    for group, ranks in zip(groups, found, strict=True):
        group.allreduce([ranks]).wait()
    column, row = dist.get_rank() % 2, dist.get_rank() // 2
    assert sorted(int(ranks) for ranks in found) == sorted([2 * column + 2, 4 * row + 1])


@on_ranks(4)
def test_ranks_that_know_different_numbers_of_groups_find_each_other(world_size):
    if dist.get_rank() == 1:
        dist.new_group([1], use_local_synchronization=True)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    expected = build("odd_mlp")
    train(expected, sgd(expected.parameters()), range(2), batch=global_batch)
    for options in ({"mesh": mesh}, {"reshard_after_forward": 2}):
        model = compiled(build("odd_mlp"), **options)
        train(model, sgd(model.parameters()), range(2))
        assert_same_parameters(model, expected)

    row = mesh_over([[0, 1], [2, 3]][dist.get_rank() // 2], "cpu", None)
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total, group=row.get_group())
    assert int(total) == [1, 5][dist.get_rank() // 2]
