"""Into how many pieces a plan decomposes the collectives of tensor parallelism, and what it says of that."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_compile import rewrite
from fsdp_compile.costs import HARDWARE, Link, explain, predict
from fsdp_compile.passes import ops
from fsdp_compile.passes.plan import StepPlan
from fsdp_compile.planning.pieces import PIECES
from fsdp_compile.planning.step_plans import MARGIN

WIDTH = 256
LINKS = {"slow": 2e9, "fast": 1e13}
HARDWARES = {
    name: dataclasses.replace(
        HARDWARE["h100"],
        name=name,
        flops={"float32": 5e11},
        efficiency=1.0,
        memory_bandwidth=1e12,
        within_node=Link(bandwidth, 1e-6),
        collective_start=1e-6,
        kernel_start=1e-6,
        contention=1.0,
    )
    for name, bandwidth in LINKS.items()
}


def split(mesh):
    torch.manual_seed(0)
    split_rows = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
    layers = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(2)]
    return nn.Sequential(*[parallelize_module(layer, mesh, split_rows) for layer in layers])


def planned(name, **options):
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.randn(512, WIDTH, requires_grad=True)
    options = {"hardware": HARDWARES[name], "auto_wrap_policy": ModuleWrapPolicy({nn.Sequential})} | options
    return rewrite(split(root["tp"]), x, world_size=root["dp"], **options)


def num_collectives(graphs):
    return sum(ops.is_functional_collective(node) for side in graphs.sides for node in side.graph.nodes)


def test_a_plan_takes_pieces_where_they_pay(four_ranks):
    found, whole = planned("slow"), planned("slow", collective_pieces=1)
    assert found.plan.pieces in PIECES and whole.plan.pieces == 1
    assert num_collectives(found) == found.plan.pieces * num_collectives(whole)
    faster, slower = (predict(graphs, HARDWARES["slow"]) for graphs in (found, whole))
    assert faster.seconds * 1.02 < slower.seconds and faster.model_collectives < slower.model_collectives
    assert f"collectives of the model itself in {found.plan.pieces} pieces" in str(explain([found], HARDWARES["slow"]))


def test_a_plan_takes_none_without_room_for_products_twice(four_ranks):
    whole = predict(planned("slow", collective_pieces=1), HARDWARES["slow"])
    room = int(whole.peak.total / (1 - MARGIN)) + 1
    found = planned("slow", memory_budget=room)
    assert found.plan is None or found.plan.pieces == 1


def test_a_plan_takes_none_where_they_would_win_little(four_ranks):
    found = planned("fast")
    assert found.plan is None or found.plan.pieces == 1


@pytest.mark.parametrize("plan", [StepPlan.as_asked(4), StepPlan(("0",), (), (), 2, 0.5, 8)])
def test_plans_are_text_and_back(plan):
    assert StepPlan.from_json(plan.to_json()) == plan
