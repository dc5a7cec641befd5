"""Collectives that the model calls itself: priced by the ring of their process group, as kernels that compute runs."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_compile import ConfigError, fsdp_compile, rewrite
from fsdp_compile.costs.collectives import Ring, all_gather, all_reduce, all_to_all, broadcast
from fsdp_compile.costs.memory import memory_of
from fsdp_compile.costs.model_collectives import ModelCollective, shown
from fsdp_compile.costs.predict import predict
from fsdp_compile.costs.timeline import rings_of
from fsdp_compile.costs.work import Work
from tests.costs.test_collectives import SMALL

WIDTH, ROWS = 64, 16


def split_model(mesh):
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


@pytest.fixture
def graphs(four_ranks):
    """Of a model that two neighbouring ranks split, and that is sharded over the two of every second rank."""
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = fsdp_compile(split_model(root["tp"]), root["dp"], backend="aot_eager", fullgraph=True)
    model(torch.randn(ROWS, WIDTH, requires_grad=True)).square().mean().backward()
    return model.graphs[0]


def kernels(work):
    return [kernel for side in work.sides for kernel in side.collectives]


def test_each_takes_what_its_ring_takes(graphs):
    work = Work.of(graphs, compiler="inductor")
    size = 4 * ROWS * WIDTH
    assert [(kernel.collective, kernel.num_bytes) for kernel in kernels(work)] == [
        (ModelCollective("all_reduce", (0, 1)), size)
    ] * 2
    alone = all_reduce(size, Ring(2, 2), SMALL)
    in_forward, in_backward = kernels(work)
    assert in_forward.seconds(SMALL) == alone and not in_forward.beside
    gradient_of_weight = max(in_backward.beside, key=lambda kernel: kernel.flops)
    assert gradient_of_weight.flops == 2 * ROWS * WIDTH * 2 * WIDTH
    expected = [alone, alone - sum(kernel.seconds(SMALL) for kernel in in_backward.beside)]
    assert [kernel.seconds(SMALL) for kernel in (in_forward, in_backward)] == expected
    prediction = predict(graphs, SMALL)
    assert prediction.model_collectives == sum(expected) < prediction.timeline.compute


def test_what_is_computed_beside_a_collective_hides_it_and_is_slower():
    slow = dataclasses.replace(SMALL, contention=1.25)
    assert [shown(3.0, computed, slow) for computed in (0.0, 1.0, 10.0)] == pytest.approx([3.0, 2.0, 0.6])
    assert shown(3.0, 10.0, SMALL) == 0.0


def test_pieces_run_beside_the_matmul_of_the_next(four_ranks):
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    found = rewrite(split_model(root["tp"]), x, world_size=root["dp"], collective_pieces=4)
    pieces = Work.of(found, compiler="inductor").forward.collectives
    beside = [[kernel.flops for kernel in piece.beside if kernel.flops > ROWS * WIDTH] for piece in pieces]
    assert beside == [[2 * ROWS / 4 * WIDTH * 2 * WIDTH]] * 3 + [[]]


def test_what_is_sharded_over_every_second_rank_goes_through_its_own_part_of_the_network(graphs):
    """Of four ranks on two nodes, neighbours that split the model share a node; those that share its parts do not."""
    two_nodes = dataclasses.replace(SMALL, ranks_per_node=2)
    work = Work.of(graphs, compiler="inductor")
    assert list(rings_of(work, two_nodes).values()) == [Ring(2, 1)]
    assert [kernel.seconds(two_nodes) for kernel in kernels(work)] == [
        kernel.seconds(SMALL) for kernel in kernels(work)
    ]


def test_a_mesh_that_is_rewritten_for_has_the_rings_of_its_ranks(four_ranks):
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    two_nodes = dataclasses.replace(SMALL, ranks_per_node=2)
    found = rewrite(split_model(root["tp"]), x, world_size=root["dp"])
    of_neighbours = rewrite(split_model(root["tp"]), x, world_size=2)
    works = [Work.of(each, compiler="inductor") for each in (found, of_neighbours)]
    assert [[*rings_of(work, two_nodes).values()] for work in works] == [[Ring(2, 1)], [Ring(2, 2)]]


@pytest.mark.parametrize(
    "sizes, names, message",
    [((2, 2), ("dp", "tp"), "of which 'tp' is for ranks that split a model"), ((1, 2, 2), None, "3 dimensions")],
)
def test_a_mesh_that_nothing_is_sharded_over(four_ranks, sizes, names, message):
    with pytest.raises(ConfigError, match=message):
        rewrite(nn.Linear(4, 4), torch.ones(4), world_size=init_device_mesh("cpu", sizes, mesh_dim_names=names))


def test_what_is_received_is_in_memory_once(graphs):
    work = Work.of(graphs, compiler="aot_eager")
    forward = work.forward.graph
    (reduced,) = [node for node in forward.nodes if node.name.startswith("all_reduce")]
    (wait,) = reduced.users
    moments = {moment.node: moment for moment in memory_of(work).moments}
    assert moments[wait].total == moments[reduced].total - 4 * ROWS * WIDTH  # of what was sent


class Dispatch(nn.Module):
    """Sends a part of its rows to each rank of all."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return all_to_all_single(self.project(x), None, None, dist.group.WORLD)


def test_all_to_all(four_ranks):
    model = fsdp_compile(Dispatch(), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        model(torch.randn(ROWS, WIDTH))
    (kernel,) = kernels(Work.of(model.graphs[0], compiler="inductor"))
    assert kernel.collective == ModelCollective("all_to_all_single", (0, 1, 2, 3))
    assert kernel.seconds(SMALL) == all_to_all(4 * ROWS * WIDTH, Ring(4, 4), SMALL)


def test_a_group_that_is_gone_takes_nothing(graphs):
    dist.destroy_process_group()
    assert [kernel.seconds(SMALL) for kernel in kernels(Work.of(graphs, compiler="inductor"))] == [0.0] * 2


def test_ranks_of_an_all_to_all_send_each_part_once():
    """Of 8 ranks on two nodes, a rank sends 3 parts of 1 MB to its own node, and 4 to the other one."""
    assert all_to_all(8e6, Ring(8, 4), SMALL) == pytest.approx(10e-6 + 5e-6 + 4e6 / 10e9)
    assert all_to_all(4e6, Ring(4, 4), SMALL) == pytest.approx(10e-6 + 1e-6 + 3e6 / 100e9)
    assert all_to_all(4e6, Ring(1, 1), SMALL) == 0


def test_a_broadcast_sends_all_bytes_to_each():
    assert broadcast(4e6, Ring(4, 4), SMALL) == pytest.approx(10e-6 + 3e-6 + 4e6 / 100e9)
    assert broadcast(4e6, Ring(1, 1), SMALL) == 0
    assert all_gather(4e6, Ring(4, 4), SMALL) < broadcast(4e6, Ring(4, 4), SMALL)
