"""Sizes that vary: few compilations, the same numbers, and a warning for what is compiled again or breaks."""

import copy
import itertools
import random
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fsdp_compile import CompilationWarning, fsdp_compile
from tests.distributed.training import assert_close, assert_same_gradients
from tests.models import Gpt, build
from tests.ranks import on_ranks

BATCHES, LENGTHS = [2, 3, 4, 5, 6, 7, 8, 9], [3, 5, 7, 8]


def shuffled(*values):
    sizes = list(itertools.product(*values))
    random.Random(0).shuffle(sizes)
    return sizes


def batch_of_size(model, rows, length):
    return [tensor[:, :length].contiguous() for tensor in model.inputs(rows, seed=rows * length)]


class Mixing(nn.Module):
    """Tokens, mixed with those before them."""

    inputs = Gpt.inputs
    vocabulary, length = 11, 8

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(11, 5), nn.Linear(5, 11)

    def forward(self, tokens, targets):
        return F.cross_entropy(self.head(self.tokens(tokens).cumsum(1)).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(("kind", "backend"), [(Gpt, "aot_eager"), (Mixing, "inductor")])
@on_ranks(2)
def test_eight_batch_sizes_and_four_lengths_take_three_compilations(world_size, kind, backend):
    expected = kind()
    model = fsdp_compile(copy.deepcopy(expected), backend=backend)
    for rows, length in shuffled(BATCHES, LENGTHS):
        inputs = batch_of_size(expected, rows, length)
        losses = [each(*inputs) for each in (model, expected)]
        for loss in losses:
            loss.backward()
        assert_close(*losses)
        assert_same_gradients(model, expected)
        model.zero_grad()
        expected.zero_grad()
    assert len(model.graphs) <= 3
    with torch.no_grad():
        for rows, length in shuffled(BATCHES, LENGTHS):
            inputs = batch_of_size(expected, rows, length)
            assert_close(model(*inputs), expected(*inputs))
    assert len([graphs for graphs in model.graphs if graphs.backward is None]) <= 3


def warned_while(function):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    found = [each for each in caught if each.category is CompilationWarning]
    assert all(each.filename == __file__ for each in found)  # where the model is called
    return [str(each.message) for each in found]


def assert_one_line(said, beginning, part):
    """On the first rank; the others have nothing to add."""
    if dist.is_initialized() and dist.get_rank() > 0:
        assert said == []
        return
    (line,) = said
    assert line.startswith(beginning) and part in line and "\n" not in line and "model.explain()" in line


@on_ranks(2)
def test_a_recompilation_warns_once_and_is_counted(world_size):
    model = fsdp_compile(build("gpt"), backend="aot_eager")

    def train(rows):
        model(*batch_of_size(model, rows, 8)).backward()

    assert warned_while(lambda: train(4)) == []
    assert "compilations" not in str(model.explain("h100"))
    assert_one_line(warned_while(lambda: train(3)), "Gpt was compiled again: ", "size")
    assert warned_while(lambda: train(2)) == []
    assert "compilations" in str(model.explain("h100"))
    assert "1 x compiled again: " in str(model.explain("h100"))


@on_ranks(2)
def test_evaluation_and_kept_gradients_are_compiled_without_a_warning(world_size):
    model = fsdp_compile(build("gpt"), backend="aot_eager")

    def use():
        inputs = batch_of_size(model, 4, 8)
        model(*inputs).backward()
        with model.no_sync():
            model(*inputs).backward()
        model(*inputs).backward()
        model.eval()
        with torch.no_grad():
            model(*inputs)
        model.train()

    assert warned_while(use) == []
    assert len(model.graphs) >= 3
    assert "compiled again: " in str(model.explain("h100"))


class Printing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break(msg="to look at it")
        return F.relu(self.second(x)).sum()


@on_ranks(1, 2)
def test_a_graph_break_warns_once_and_is_counted(world_size):
    model = fsdp_compile(Printing(), backend="aot_eager")

    def train():
        model(torch.ones(2, 4)).backward()

    assert_one_line(warned_while(train), "the graph of Printing breaks: ", "to look at it")
    assert warned_while(train) == []
    assert "1 x graph break: " in str(model.explain("h100"))


class Sliced(nn.Module):
    """Walks a slice of its layers, as Llama does: a container that is made, and registers them, in every forward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers[:2]:
            x = layer(x).relu()
        return x


@on_ranks(2)
def test_modules_that_a_forward_makes_are_no_reason_to_compile_again(world_size):
    model, x = fsdp_compile(Sliced(), backend="aot_eager"), torch.ones(2, 4)
    for _ in range(4):
        with model.no_sync():
            model(x).sum().backward()
        model(x).sum().backward()
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
        nn.ModuleList([nn.Linear(2, 2)])  # registers something elsewhere
    assert len(model.graphs) == 3  # kept, reduced with what was kept, without gradients
