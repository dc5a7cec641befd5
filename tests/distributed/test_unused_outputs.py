"""Outputs that the loss leaves out: gradients are None where eager has None, on all ranks alike."""

import contextlib
import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.utils.checkpoint import checkpoint

from fsdp_compile import fsdp_compile
from tests.distributed.training import (
    assert_same_gradients,
    assert_same_parameters,
    assert_same_step,
    both_front_ends,
    compiled,
    hybrid_mesh,
    take_step,
)
from tests.models import made, seeded
from tests.ranks import on_ranks

WIDTH = 5


@dataclasses.dataclass
class Found:
    """What a model of transformers returns: a loss or none, and a dictionary of more."""

    loss: torch.Tensor | None
    heads: dict[str, torch.Tensor]


class Heads(nn.Module):
    """A trunk, and outputs of every kind: heads, one of two of them, views of one tensor, one without gradient."""

    def __init__(self, breaks=False, recomputes=True):
        super().__init__()
        self.trunk, self.side = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.breaks, self.recomputes = breaks, recomputes

    def forward(self, x):
        trunk = torch.tanh(self.trunk(x))
        side = checkpoint(self.side, x, use_reentrant=False) if self.recomputes else self.side(x)
        side = self.scale * side
        if self.breaks:
            torch._dynamo.graph_break()
        one, two, three = self.one(trunk), self.two(trunk + side), self.three(side)
        heads = {"one": one, "two": two, "again": two, "sign": torch.sign(three), "view": three.t(), "row": three[0]}
        return Found(loss=one.detach().mean(), heads={**heads, "both": one * three, "side": side})


def loss_of(model, names, seed):
    heads = model(torch.randn(4, WIDTH, generator=seeded(seed))).heads
    return sum((heads[name] - 0.1).square().mean() for name in names)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)


STEPS = [
    # what each rank takes into its loss, and again from the first where there are more ranks
    [["one"]],
    [["two"], ["two"]],
    [["one"], ["two"]],
    [["sign"], ["row"]],
    [["view"], ["one", "again"]],
    [["both"]],
    [["side"], ["side"]],
    [["row"], ["side"]],
]


def train_and_compare(model, expected, steps=STEPS):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    optimizers = [adamw(each) for each in (model, expected)]
    for step, names in enumerate(steps):
        losses = [loss_of(expected, names[each % len(names)], 10 * step + each) for each in range(world_size)]
        loss = loss_of(model, names[rank % len(names)], 10 * step + rank)
        assert_same_step(model, expected, loss, losses, optimizers)
    assert_same_parameters(model, expected)


@pytest.mark.parametrize(("backend", "breaks"), [("inductor", False), ("aot_eager", True)])
@on_ranks(1, 2)
def test_parameters_behind_an_output_that_is_left_out_have_no_gradient(world_size, backend, breaks):
    expected = made(Heads, breaks)
    model = copy.deepcopy(expected)
    fsdp_compile(model, backend=backend, auto_wrap_policy={nn.Linear})
    steps = STEPS[:-1] if breaks else STEPS  # in the last, one rank has nothing to do behind the break
    train_and_compare(model, expected, steps)


@on_ranks(4)
def test_ranks_that_leave_out_different_outputs_under_every_strategy(world_size):
    for options in (
        {"mesh": hybrid_mesh()},
        {"collective_lowering": "grouped"},
        {"sharding_strategy": ShardingStrategy.NO_SHARD},
    ):
        model = compiled(made(Heads), **options)
        train_and_compare(model, made(Heads), [[["one"], ["two"], ["sign"]], [["side"]]])


ACCUMULATED = [
    # of micro-batches, all but the last of which are kept; that one is the same for all ranks in the first
    [[["one", "side"], ["row"]], [["one"]]],
    [[["one"], ["two"]], [["side"]]],
    [[["row"]], [["one"], ["two"]], [["one"]]],
    [[["one"]], [["one", "row"], ["one"]]],
]


@both_front_ends
@on_ranks(1, 2)
def test_what_is_kept_of_outputs_that_are_left_out(world_size, front_end):
    expected = made(Heads, False, front_end is compiled)  # a rank that recomputes by itself waits for the others
    model = front_end(copy.deepcopy(expected), auto_wrap_policy=lambda recurse, **_: recurse)  # one unit
    optimizers = [adamw(each) for each in (model, expected)]
    rank = dist.get_rank()
    for step, batches in enumerate(ACCUMULATED if front_end is compiled else ACCUMULATED[:1]):
        for index, names in enumerate(batches):
            seed = 100 * step + 10 * index
            is_last = index == len(batches) - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss_of(model, names[rank % len(names)], seed + rank).backward()
            for each in range(world_size):
                (loss_of(expected, names[each % len(names)], seed + each) / world_size).backward()
        assert_same_gradients(model, expected)
        take_step(optimizers)
    assert_same_parameters(model, expected)
