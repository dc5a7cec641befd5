"""torch.distributed.pipelining drives sharded stages as it drives FSDP2's."""

import copy

import pytest
import torch
import torch._functorch.config
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from fsdp_compile import compat
from tests.distributed.training import Collectives, assert_close, full
from tests.models import DEVICE, seeded
from tests.ranks import on_ranks

MICROBATCHES, ROWS, WIDTH = 4, 2, 8


def nothing_is_left():
    """For a `dw_builder`: the backward of weights was run with that of inputs."""
    return lambda: None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def loss_of(output, target):
    return nn.functional.mse_loss(output, target)


def stages_of(whole, mesh, stages_of_rank, *, is_v=False, **options):
    """This rank's stages of a model of blocks, with their numbers, sharded along the second axis of the mesh.

    Their parameters have the names that they have in the whole. Where `is_v`, the first rank has the last stage, too.
    """
    pipe, number = mesh.get_local_rank("pipe"), mesh.size(0)
    count = number * stages_of_rank
    length = len(whole) // count
    for index in (pipe, count - 1 - pipe) if is_v else range(pipe, count, number):
        part = copy.deepcopy(whole[index * length : (index + 1) * length])
        for block in part:
            compat.fully_shard(block, mesh=mesh["shards"], backend="aot_eager")
        compat.fully_shard(part, mesh=mesh["shards"], backend="aot_eager")
        yield index, PipelineStage(part, index, count, DEVICE, group=mesh.get_group("pipe"), **options)


def pipelined(schedule, stages):
    return schedule(stages if len(stages) > 1 else stages[0], n_microbatches=MICROBATCHES, loss_fn=loss_of)


def batch(rank, number):
    generator = seeded(1000 * number + rank)
    return torch.randn(2, MICROBATCHES * ROWS, WIDTH, generator=generator).unbind()


@pytest.mark.parametrize(
    ("schedule", "stages_of_rank", "options"),
    [
        (Schedule1F1B, 1, {}),
        (ScheduleGPipe, 1, {}),
        (ScheduleInterleaved1F1B, 2, {}),
        (ScheduleInterleavedZeroBubble, 2, {"dw_builder": nothing_is_left}),
        (ScheduleZBVZeroBubble, 2, {"dw_builder": nothing_is_left, "is_v": True}),
    ],
)
@on_ranks(2, 4)
def test_stages_train_as_the_whole(world_size, schedule, stages_of_rank, options):
    torch.manual_seed(0)
    whole = nn.Sequential(*(Block() for _ in range(4)))
    mesh = init_device_mesh(DEVICE.type, (2, world_size // 2), mesh_dim_names=("pipe", "shards"))
    stages = dict(stages_of(whole, mesh, stages_of_rank, **options))
    run = pipelined(schedule, list(stages.values()))
    parameters = {name: each for stage in stages.values() for name, each in stage.submod.named_parameters()}
    wanted, last = dict(whole.named_parameters()), 2 * stages_of_rank - 1
    optimizer, expected_optimizer = (torch.optim.AdamW(held.values(), 0.01) for held in (parameters, wanted))
    for step in range(3):
        (x, target), losses = batch(mesh.get_local_rank("shards"), step), []
        with Collectives("all_gather") as gathers:
            run.step(*((x,) if 0 in stages else ()), **({"target": target, "losses": losses} if last in stages else {}))
        if step and world_size > 2:  # the first one shows what the schedule says, and when
            assert gathers.num == len(whole) // 2  # once for all micro-batches
        batches = [batch(rank, step) for rank in range(world_size // 2)]
        expected = [loss_of(whole(inputs), outputs) for inputs, outputs in batches]
        (sum(expected) / len(expected)).backward()
        if last in stages:
            assert_close(torch.stack(losses).mean(), expected[mesh.get_local_rank("shards")])
        for name, parameter in parameters.items():
            assert_close(full(parameter.grad), wanted[name].grad)
        for each in (optimizer, expected_optimizer):
            each.step()
            each.zero_grad()
    for name, parameter in parameters.items():
        assert_close(full(parameter), wanted[name])


@on_ranks(4)
def test_a_backward_that_is_split_is_refused(world_size):
    mesh = init_device_mesh(DEVICE.type, (2, world_size // 2), mesh_dim_names=("pipe", "shards"))
    stages = dict(stages_of(nn.Sequential(*(Block() for _ in range(4))), mesh, stages_of_rank=2))
    run = pipelined(ScheduleInterleavedZeroBubble, list(stages.values()))
    x, target = batch(0, 0)
    as_torch_says = torch._functorch.config.patch(donated_buffer=False)  # in its error
    refused = pytest.raises(RuntimeError, match="cannot be split into one for inputs and one for weights")
    with as_torch_says, refused:
        run.step(*((x,) if 0 in stages else ()), **({"target": target} if 3 in stages else {}))
