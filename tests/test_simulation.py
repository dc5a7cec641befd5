"""The simulation of ranks sees what real ones would suffer from: early frees and dropped waits."""

import os
from unittest.mock import patch

import pytest
import torch

from fsdp_compile.passes import ops
from tests.models import build
from tests.simulation import Simulation

WAIT = torch.ops._c10d_functional.wait_tensor.default


@pytest.fixture
def simulated():
    torch._dynamo.reset()
    model = build("odd_mlp")
    with patch.dict(os.environ, FSDP_COMPILE_POISON="1"):
        return model, Simulation.of(model, model.inputs(4, 0), (1, 2))


def losses_of(model, simulation):
    step = simulation.step(dict(model.named_parameters()), [model.inputs(4, 0)] * 2, [0, 0])
    return torch.stack([outputs[0].detach() for outputs in step.outputs])


def test_it_computes_what_the_model_does(simulated):
    model, simulation = simulated
    torch.testing.assert_close(losses_of(model, simulation), model(*model.inputs(4, 0)).detach().expand(2))


@pytest.mark.parametrize("index", range(3))
def test_a_free_that_comes_early_shows(simulated, index):
    model, simulation = simulated
    graph = simulation.graphs.lowered.forward.graph
    poison = [node for node in graph.nodes if ops.is_call(node, ops.POISON)][index]
    poison.args[0].append(poison)
    assert losses_of(model, simulation).isnan().all()


@pytest.mark.parametrize("index", range(3))
def test_a_wait_that_is_missing_shows(simulated, index):
    model, simulation = simulated
    graph = simulation.graphs.lowered.forward.graph
    wait = [node for node in graph.nodes if node.target is WAIT][index]
    wait.replace_all_uses_with(wait.args[0])
    graph.erase_node(wait)
    assert losses_of(model, simulation).isnan().all()
