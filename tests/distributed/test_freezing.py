"""Parameters that are frozen or unfrozen while the model trains."""

import torch
from torch import nn

from fsdp_compile.passes import ops
from tests.distributed.training import (
    adamw,
    assert_close,
    assert_same_gradients,
    assert_same_parameters,
    both_front_ends,
    compiled,
    global_batch,
    mean_over_ranks,
    train,
)
from tests.models import build, made
from tests.ranks import on_ranks


def reduced_buckets(graphs):
    return [ops.argument(node, "bucket") for node in graphs.backward.graph.nodes if ops.is_reduction(node)]


def freeze(model, *globs, frozen=True):
    for name, parameter in model.named_parameters():
        if any(glob in name for glob in globs):
            parameter.requires_grad_(not frozen)


@both_front_ends
@on_ranks(2)
def test_freezing_and_unfreezing_at_any_time(world_size, front_end):
    """A layer is frozen when the model is sharded, unfrozen, another one is frozen, whole and in part."""
    expected, model = build("gpt"), build("gpt")
    for found in (expected, model):
        freeze(found, "blocks.0")
    front_end(model)
    optimizers = [adamw(found.parameters()) for found in (expected, model)]
    changes = [(), (("blocks.0",), False), (("blocks.1",), True), (("head", "weight"), True), (("blocks",), False)]
    for step, change in enumerate(changes):
        if change:
            for found in (expected, model):
                freeze(found, *change[0], frozen=change[1])
        expected_losses = train(expected, optimizers[0], [step], batch=global_batch)
        assert_close(mean_over_ranks(train(model, optimizers[1], [step])), expected_losses)
        assert_same_parameters(model, expected)


@on_ranks(2)
def test_what_is_frozen_is_not_reduced_and_nothing_is_computed_for_it(world_size):
    model = compiled(build("gpt"))
    every = backward_graphs(model)
    freeze(model, "blocks.0")
    frozen = backward_graphs(model)
    assert set(reduced_buckets(every)) - set(reduced_buckets(frozen)) == {"blocks.0"}
    freeze(model, "blocks.1.", "bias")
    part = backward_graphs(model)
    assert reduced_buckets(part) == reduced_buckets(frozen)  # the head is a part of that unit
    assert num_matmuls(part) < num_matmuls(frozen) < num_matmuls(every)
    freeze(model, "", frozen=False)
    backward_graphs(model)
    assert len(model.graphs) == 3  # the first graph is used again


def backward_graphs(model):
    model(*model.inputs(4, seed=0)).backward()
    return model.graphs[-1]


def num_matmuls(graphs):
    return sum("mm" in str(node.target) for node in graphs.backward.graph.nodes)


class Adapters(nn.Module):
    """A frozen layer with a trained one beside it."""

    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(5, 5), nn.Linear(5, 2), nn.Linear(2, 5)
        self.base.requires_grad_(False)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x))).pow(2).mean()


@both_front_ends
@on_ranks(2)
def test_gradients_of_a_unit_that_is_frozen_in_part(world_size, front_end):
    expected = made(Adapters)
    model = front_end(made(Adapters), auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse)
    x = torch.randn(4, 5)
    for frozen in ("down", "base.bias", "up.weight"):
        for found in (expected, model):
            found.zero_grad()
            for name, parameter in found.named_parameters():
                parameter.requires_grad_(not name.startswith(frozen))
            found(x).backward()
        assert_same_gradients(model, expected)
