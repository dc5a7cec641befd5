"""Models of which a few layers are traced for all: the graphs are those of the whole model, or all of it is traced."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.utils.checkpoint import checkpoint

from fsdp_compile import traced_call
from fsdp_compile.module.equal_layers import EqualLayers, calls_counted
from fsdp_compile.options import Options
from fsdp_compile.passes import pipeline
from fsdp_compile.rewriting import Economy, Rewriter
from tests.passes.tracing import plain_graph
from tests.test_equal_units import gpt, llama_like

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Layers(nn.Module):
    """Layers of which a forward calls so many, with what differs among them set by `differ(layer, index)`."""

    def __init__(self, differ=None, number=12, called=None):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(number)])
        for index, layer in enumerate(self.layers):
            if differ is not None:
                differ(layer, index)
        self.called = called

    def forward(self, x):
        for layer in self.layers[: self.called]:
            x = layer(x) * getattr(layer, "factor", 1)
        return x


def of_layers(**options):
    return Layers(**options), (torch.ones(3, 4),)


def numbered(layer, index):
    layer.index = index


def every_third_is_scaled(layer, index):
    layer.factor = 2 if index % 3 else 3


def one_has_a_hook(layer, index):
    if index == 7:
        layer.register_forward_hook(lambda module, args, output: output + 1)


def all_have_a_hook(layer, index):
    layer.register_forward_hook(partial(plus, 2))


def plus(number, module, args, output):
    return output + number


def each_adds_its_own(layer, index):
    layer.register_forward_hook(partial(plus, index / 2))


def one_is_frozen(layer, index):
    layer.requires_grad_(index != 3)


def llama_computed_again():
    model, inputs = llama_like(12)
    equal_layers(model, inputs).compute_again()
    return model, inputs


def equal_layers(model, inputs):
    with calls_counted(model) as num_calls, torch.no_grad():
        model(*inputs)
    return EqualLayers.of(model, num_calls)


def checkpointed(layer, index):
    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


MODELS = {
    "gpt": partial(gpt, 12),
    "llama": partial(llama_like, 12),
    "llama, computed again": llama_computed_again,
    "layers with their number": partial(of_layers, differ=numbered),
    "layers with a hook": partial(of_layers, differ=all_have_a_hook),
    "layers that are computed again": partial(of_layers, differ=checkpointed),
}
"""Of which a few layers are traced."""


@pytest.fixture
def num_layers(monkeypatch):
    """How many layers the model had whenever it was traced, as a list that grows."""
    found, trace = [], traced_call.trace

    def noted(model, *args):
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        found.append(max(map(len, lists)))
        return trace(model, *args)

    monkeypatch.setattr(traced_call, "trace", noted)
    return found


def rewriter(model, inputs, economy):
    return Rewriter(model, inputs, {}, Options(collective_lowering="grouped"), economy=economy)


def graphs(model, inputs, economy):
    return rewriter(model, inputs, economy)(world_size=2, sharding_strategy=ShardingStrategy.FULL_SHARD)


def text(found):
    return [plain_graph(side.graph) for side in found.sides]


@pytest.mark.parametrize("name", MODELS)
def test_the_graphs_are_those_of_the_whole_model(name, num_layers):
    model, inputs = MODELS[name]()
    economy = Economy(layers=equal_layers(model, inputs), lowers=False)
    of_few, of_all = (rewriter(model, inputs, each) for each in (economy, None))
    for strategy, size in ((ShardingStrategy.FULL_SHARD, 2), (ShardingStrategy.SHARD_GRAD_OP, 3)):
        found, whole = (each(world_size=size, sharding_strategy=strategy) for each in (of_few, of_all))
        assert text(found) == text(whole)
        assert found.dependence == whole.dependence
    assert num_layers == [6, 12]
    assert sum(isinstance(module, nn.ModuleList) and len(module) == 12 for module in model.modules()) == 1


def each_has_an_array(layer, index):
    layer.table = np.arange(3)


@pytest.mark.parametrize(
    "differ",
    [
        every_third_is_scaled,
        one_has_a_hook,
        each_adds_its_own,
        one_is_frozen,
        each_has_an_array,  # whose comparison has no truth value
    ],
)
def test_layers_that_differ_are_not_equal(differ):
    assert equal_layers(*of_layers(differ=differ)) is None
    assert equal_layers(*of_layers()).names == [f"layers.{index}" for index in range(12)]


def by_index(layer, index):
    layer.index = index
    layer.forward = lambda x: nn.Sequential.forward(layer, x) * (1 if layer.index % 3 else 2)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"differ": by_index}, [6, 12]), ({"called": 9}, [12]), ({"number": 11}, [11])],
    ids=["what a layer computes depends on its number", "not all layers are called", "few layers"],
)
def test_what_a_few_layers_do_not_tell_is_traced(options, expected, num_layers):
    model, inputs = of_layers(**options)
    found = graphs(model, inputs, Economy(layers=equal_layers(model, inputs)))
    assert num_layers == expected
    assert text(found) == text(graphs(model, inputs, None))


def test_graphs_that_are_not_lowered_are_verified(monkeypatch):
    seen = []
    monkeypatch.setattr(pipeline, "verify", lambda gm, stage, **options: seen.append(options))
    model, inputs = of_layers()
    for with_gradients in (True, False):
        with torch.set_grad_enabled(with_gradients):
            graphs(model, inputs, Economy(lowers=False))
    finished = [options for options in seen if options.get("freed")]
    assert len(finished) == 3
