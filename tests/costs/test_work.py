"""Graphs of symbolic sizes: predictions are of the sizes that were traced with, and leave the graphs as they are."""

import pytest
import torch
from torch import nn

from fsdp_compile import rewrite
from fsdp_compile.compiler.capture import Capture
from fsdp_compile.costs import HARDWARE, predict
from fsdp_compile.passes.pipeline import Pipeline
from tests.models import build
from tests.passes.tiny import biased, rows

HARDWARE_OF_TEST = HARDWARE["h100"]


def prediction_of(model, inputs, compiler):
    graphs = rewrite(model, *inputs, world_size=2)
    return predict(graphs, HARDWARE_OF_TEST, compiler=compiler)


def moments_of(prediction):
    """Where something is held; symbolic sizes are nodes too, and hold nothing."""
    return [
        (moment.side, moment.held)
        for moment in prediction.memory.moments
        if isinstance(moment.node.meta.get("val"), torch.Tensor)
    ]


@pytest.mark.parametrize("compiler", ["inductor", "eager"])
@pytest.mark.parametrize("name", ["gpt", "conv_net"])
def test_symbolic_graphs_are_predicted_as_the_static_graphs_of_the_same_sizes(name, compiler):
    model = build(name)
    static = prediction_of(model, model.inputs(4, seed=0), compiler)
    inputs = model.inputs(4, seed=0)
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, 0)
    symbolic = prediction_of(model, inputs, compiler)
    assert (symbolic.timeline.seconds, symbolic.flops) == (static.timeline.seconds, static.flops)
    assert moments_of(symbolic) == moments_of(static)


def test_a_graph_without_symbols_is_predicted_from_as_it_is():
    graphs = rewrite(biased(), rows(), world_size=2)
    work = predict(graphs, HARDWARE_OF_TEST).work
    assert work.forward.graph is graphs.forward.graph and work.backward.graph is graphs.backward.graph


def test_predicting_while_compiling_adds_no_guard():
    found = []

    def note(graphs):
        found.append(predict(graphs, HARDWARE_OF_TEST, compiler="aot_eager"))

    capture = Capture(lambda plan: Pipeline.of(), None, note, generates_code=False)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    compiled = torch.compile(model, backend=capture.compile, dynamic=True)
    for num in (3, 5, 9):
        compiled(rows(num=num)).sum().backward()
    (prediction,) = found
    (rows_of_trace,) = [
        node.meta["val"].shape[0] for node in prediction.work.forward.graph.nodes if node.name == "relu"
    ]
    assert rows_of_trace == 3


def test_sizes_that_depend_on_data_have_a_number():
    x = rows()
    torch._dynamo.decorators.mark_unbacked(x, 0)
    assert prediction_of(biased(), (x,), "aot_eager").flops > prediction_of(biased(), (rows(),), "aot_eager").flops
