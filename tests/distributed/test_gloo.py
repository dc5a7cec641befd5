"""Graphs overlap collectives, which gloo's own groups survive only most of the time."""

import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _resolve_process_group

from fsdp_compile import fsdp_compile
from tests.distributed.training import batch_of_rank
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


@on_ranks(2)
def test_collectives_run_on_one_thread_for_each_group_and_not_on_the_users_group(world_size):
    (group,) = groups_of(compiled(build("odd_mlp")))
    assert group is not dist.group.WORLD
    assert group._get_backend(torch.device("cpu")).options._threads == 1
    assert dist.get_process_group_ranks(group) == [0, 1]
    assert groups_of(compiled(build("gpt"))) == [group]


@on_ranks(4)
def test_both_axes_of_a_mesh_have_a_group_of_one_thread(world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    groups = groups_of(compiled(build("odd_mlp"), mesh))
    ranks = [dist.get_process_group_ranks(group) for group in groups]
    column, row = dist.get_rank() % 2, dist.get_rank() // 2
    assert sorted(ranks) == sorted([[column, column + 2], [2 * row, 2 * row + 1]])
    assert {group._get_backend(torch.device("cpu")).options._threads for group in groups} == {1}
