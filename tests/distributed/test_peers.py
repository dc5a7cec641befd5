"""What sharding by hooks raises on, or costs, and no other test of ours shows; docs/compatibility.md has the rest.

Each of these fails with torch's FSDP1, with FSDP2, or with both.
"""

import sys
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp_compile import rewrite
from tests.distributed.training import (
    adamw,
    assert_same_gradients,
    assert_trains_as,
    batch_of_rank,
    both_front_ends,
    compiled,
    gathered_units,
    global_batch,
    train,
)
from tests.models import Block, Gpt, Regression, build, made
from tests.ranks import on_ranks

# A parameter is gathered where it is read, not where a forward begins


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x):
        return self.layer(x)

    def encode(self, x):
        return torch.tanh(self.layer(x))


class Encoded(Regression):
    def __init__(self):
        super().__init__()
        self.first = Encoder()
        self.head = nn.Linear(5, 1)


class ReadInAnotherModule(Encoded):
    """A weight of one unit is used in the forward of another."""

    def forward(self, x, target):
        return F.mse_loss(self.head(F.linear(torch.tanh(self.first(x)), self.first.layer.weight)), target)


class AnotherMethod(Encoded):
    """Of a unit, a method other than its forward is called."""

    def forward(self, x, target):
        return F.mse_loss(self.head(self.first.encode(x)), target)


class Output:
    """Of a class that nobody has registered anywhere."""

    def __init__(self, hidden):
        self.hidden = hidden


class WithOutput(Encoder):
    def forward(self, x):
        return Output(torch.tanh(self.layer(x)))


class UnitsWithOutputsOfAnyClass(Regression):
    def __init__(self):
        super().__init__()
        self.first, self.second = WithOutput(), WithOutput()
        self.head = nn.Linear(5, 1)

    def forward(self, x, target):
        return F.mse_loss(self.head(self.second(self.first(x).hidden).hidden), target)


class TwoDtypes(Regression):
    """Parameters of fp32 and fp64 in one unit, all of them trained."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.head = nn.Linear(5, 1).double()

    def forward(self, x, target):
        return F.mse_loss(self.head(torch.tanh(self.first(x)).double()), target.double()).float()


MODELS = {model.__name__: model for model in (ReadInAnotherModule, AnotherMethod, UnitsWithOutputsOfAnyClass)}
UNITS = [Encoder]


@pytest.mark.parametrize("name", list(MODELS))
@both_front_ends
@on_ranks(2)
def test_a_parameter_is_gathered_wherever_it_is_read(world_size, front_end, name):
    """FSDP1 and FSDP2 gather in the hooks of a unit's forward, and find its outputs by their class (row 4)."""
    assert_trains_as(front_end(made(MODELS[name]), auto_wrap_policy=UNITS), made(MODELS[name]))


class ReturnsAnOutput(Encoded):
    def forward(self, x, target):
        return Output(F.mse_loss(self.head(torch.tanh(self.first(x))), target))


@both_front_ends
@on_ranks(2)
def test_a_model_returns_an_object_of_any_class(world_size, front_end):
    """FSDP1 raises in the backward: its hook was never registered (row 4)."""
    expected, model = made(ReturnsAnOutput), front_end(made(ReturnsAnOutput), auto_wrap_policy=UNITS)
    expected(*global_batch(expected, 0)).hidden.backward()
    model(*batch_of_rank(model, 0)).hidden.backward()
    assert_same_gradients(model, expected)


@both_front_ends
@on_ranks(2)
def test_one_unit_holds_trained_parameters_of_two_dtypes(world_size, front_end):
    """FSDP1 and FSDP2 raise (rows 5 and 16)."""
    assert_trains_as(front_end(made(TwoDtypes), auto_wrap_policy=[TwoDtypes]), made(TwoDtypes))


# What a step costs beside the kernels


def calls_of(function, *files):
    """How often Python functions of these files were called while `function` ran."""
    found = Counter()

    def note(frame, event, _):
        if event == "call":
            found.update(file for file in files if file in frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


@on_ranks(2)
def test_forward_and_backward_dispatch_no_dtensor_operation_and_run_no_hook(world_size):
    """FSDP2 calls over a thousand functions of its own in such a step; where parameters are inputs of a graph, Dynamo
    guards every one of them (row 14)."""
    model = compiled(build("gpt"))
    train(model, adamw(model.parameters()), range(2))  # compiled, and no gradient left to add to
    dispatch, hooks = "torch/distributed/tensor/_dispatch.py", "torch/distributed/fsdp/"
    batch = batch_of_rank(model, 2)
    assert calls_of(lambda: model(*batch).backward(), dispatch, hooks) == {}
    assert calls_of(lambda: model.tokens.weight.detach().log_softmax(0), dispatch) != {}  # they are counted
    for module in model.modules():
        assert not (module._forward_pre_hooks or module._forward_hooks), module
        assert not (module._backward_pre_hooks or module._backward_hooks), module

    [graphs] = model.graphs
    shapes = [tuple(node.meta["val"].shape) for node in graphs.forward.graph.nodes if node.op == "placeholder"]
    assert len(shapes) == len(gathered_units(graphs.forward)) + 2 < len(list(model.parameters()))  # tokens and targets


# Units that nobody has named


class NestedBlocks(Gpt):
    """Blocks in a list that is not a child of the model."""

    def __init__(self):
        super().__init__()
        self.decoder = nn.ModuleDict({"layers": nn.ModuleList([Block(self.dim, num_heads=2) for _ in range(3)])})
        del self.blocks

    @property
    def blocks(self):
        return self.decoder["layers"]


def test_repeated_blocks_are_units_when_none_are_named():
    """FSDP1 and FSDP2 make the whole model one unit: all of its parameters are full at once (row 17)."""
    model = made(NestedBlocks)
    graphs = rewrite(model, *model.inputs(2, seed=0), world_size=2, collective_lowering="packed")
    blocks = [f"decoder.layers.{number}" for number in range(3)]
    assert gathered_units(graphs.forward) == ["tokens+positions", *blocks]  # the norm is too small to be a unit
