"""What `model.explain()` says of the graphs that run."""

import dataclasses

import pytest
import torch
from torch import nn

from fsdp_compile import ConfigError, fsdp_compile
from fsdp_compile.costs import HARDWARE, Link
from tests.distributed.training import batch_of_rank
from tests.models import build
from tests.ranks import on_ranks


@pytest.mark.parametrize("dynamic", [None, True])
@on_ranks(2)
def test_the_explanation_has_a_part_for_every_graph(world_size, dynamic):
    model = fsdp_compile(build("gpt"), backend="aot_eager", dynamic=dynamic)
    assert str(model.explain("h100")) == "nothing was compiled so far: call the model once"
    model(*batch_of_rank(model, 0)).backward()
    with torch.no_grad():
        model(*batch_of_rank(model, 0))
    found = model.explain("h100")
    assert len(found.predictions) == len(model.graphs) == 2
    training, evaluation = found.predictions
    assert training.seconds > evaluation.seconds > 0
    assert training.memory.peak.held["optimizer"] > 0 == evaluation.memory.peak.held["optimizer"]
    text = str(found)
    for said in ("graph 1 of 2", "graph 2 of 2", "on h100", "lower bound", "at the peak", "exposed"):
        assert said in text
    gathers = [node for node in model.graphs[0].forward.graph.nodes if "all_gather" in str(node.target)]
    assert f"forward {len(gathers)} gathers of" in text
    static = fsdp_compile(build("gpt"), backend="aot_eager", dynamic=False)
    static(*batch_of_rank(model, 0)).backward()
    assert training.memory.peak.held == static.explain("h100").predictions[0].memory.peak.held
    model(*[rows[1:] for rows in batch_of_rank(model, 1)]).backward()
    assert len(model.graphs) == (2 if dynamic else 3)


@on_ranks(2)
def test_planning_for_sizes_that_vary_compiles_once(world_size):
    model = fsdp_compile(build("gpt"), backend="aot_eager", dynamic=True, hardware="h100")
    for num in (4, 3, 2):
        model(*[rows[:num] for rows in batch_of_rank(model, 0)]).backward()
    assert len(model.graphs) == 1


@on_ranks(2)
def test_what_could_be_changed_follows_from_the_hardware(world_size):
    model = fsdp_compile(build("gpt"), backend="aot_eager")
    model(*batch_of_rank(model, 0)).backward()
    small = dataclasses.replace(HARDWARE["h100"], name="small", memory=1000)
    assert "too much for small: more ranks" in str(model.explain(small))
    slow = dataclasses.replace(HARDWARE["h100"], within_node=Link(1e6, 0.0))
    assert "communication takes" in str(model.explain(slow)) and "would not gather" in str(model.explain(slow))
    instant = dataclasses.replace(HARDWARE["h100"], collective_start=0.0, kernel_start=1.0)
    (line,) = [line for line in str(model.explain(instant)).splitlines() if "could change" in line]
    assert line.endswith("nothing that is predicted to help")


@on_ranks(2)
def test_the_part_of_a_batch_norm_and_frozen_parameters(world_size):
    model = build("conv_net")
    next(model.parameters()).requires_grad_(False)
    model = fsdp_compile(model, backend="aot_eager")
    model(*batch_of_rank(model, 0)).backward()
    assert "graph 1 of 1" in str(model.explain("a100-80", optimizer="sgd"))


def test_hardware_and_optimizers_that_are_not_known():
    model = fsdp_compile(nn.Linear(2, 2), backend="aot_eager")
    model(torch.ones(1, 2)).sum().backward()
    assert "none" in str(model.explain("h100"))
    with pytest.raises(ConfigError, match="optimizer is one of sgd, momentum, adam, not 'lion'"):
        model.explain("h100", optimizer="lion")
    with pytest.raises(ConfigError, match="'k80' is neither a file nor one of"):
        model.explain("k80")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU at hand is the hardware")
@on_ranks(2)
def test_without_hardware_it_is_said_what_is_decided_and_moves(world_size):
    model = fsdp_compile(build("gpt"), backend="aot_eager")
    assert str(model.explain()) == "nothing was compiled so far: call the model once"
    model(*batch_of_rank(model, 0)).backward()
    found, known = model.explain(), model.explain("h100")
    shown = str(found).splitlines()
    assert not found.predictions and " ms" not in str(found)
    for title in ("units", "graph 1 of 1", "  schedule", "  collectives", "  memory"):
        (line,) = [line for line in shown if line.startswith(title)]
        assert line in str(known)
    assert "seconds       are predicted for hardware that is known: explain(NAME) with one of a100-40" in str(found)
    assert "blocks.0, blocks.1" in shown[0], shown[0]
    with pytest.raises(ConfigError, match="optimizer is one of sgd, momentum, adam, not 'lion'"):
        model.explain(optimizer="lion")
    with pytest.raises(ConfigError, match="say for which hardware: explain"):
        model.explain(html="page.html")


@on_ranks(2)
def test_what_was_planned_for_is_what_is_explained(world_size):
    model = fsdp_compile(build("gpt"), backend="aot_eager", hardware="h100")
    model(*batch_of_rank(model, 0)).backward()
    assert str(model.explain()) == str(model.explain("h100"))
    assert "on h100" in str(model.explain())


def test_a_single_rank_has_no_units_and_sends_nothing():
    model = fsdp_compile(nn.Linear(2, 2), backend="aot_eager")
    model(torch.ones(1, 2)).sum().backward()
    text = str(model.explain())
    assert "units" not in text and "collectives   forward none; backward none" in text
