"""Plans of models with equal units: searched for in a program with few of them, as good as those of the full search."""

import dataclasses
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile import api, rewrite
from fsdp_compile.compiler import traces
from fsdp_compile.costs import predict
from fsdp_compile.options import Options
from fsdp_compile.passes import ops
from fsdp_compile.planning import step_plans
from tests.models import Gpt
from tests.passes.tiny import rows
from tests.test_scheduling import BALANCED, COSTLY, SLOW

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import llama

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def gpt(num_blocks):
    model = Gpt()
    model.blocks.extend(type(model.blocks[0])(Gpt.dim, num_heads=2) for _ in range(num_blocks - 2))
    return model, model.inputs(4, seed=0)


def llama_like(num_layers):
    return llama.on_meta(dataclasses.replace(llama.SMALL, layers=num_layers), None), llama.inputs(2, 32)


def uneven(num_layers):
    widths = [64 + 4 * (index % 3) for index in range(num_layers + 1)]
    return nn.Sequential(*map(nn.Linear, widths, widths[1:])), (rows(64, 16),)


MODELS = {"gpt": gpt, "llama": llama_like, "uneven": uneven}


@pytest.fixture
def shortened(monkeypatch):
    """For every search, whether there was a shorter program to search in, as a list that grows."""
    found = []
    shorten = traces.Trace.shorten

    def noted(trace, num_units):
        short = shorten(trace, num_units)
        found.append(short is not None)
        return short

    monkeypatch.setattr(traces.Trace, "shorten", noted)
    return found


def traced(name, num_layers):
    """A model's trace, and what makes pipelines for it."""
    found = []
    with patch.object(
        traces.Trace, "rewritten", lambda trace, pipeline, *_, **__: found.append((trace, pipeline(None)))
    ):
        model, inputs = MODELS[name](num_layers)
        rewrite(model, *inputs, world_size=2)
    return found[0]


def num_gathers(graphs):
    return sum(map(ops.is_all_gather, graphs.forward.graph.nodes))


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_a_program_with_fewer_units_is_that_of_a_model_with_fewer_layers(name):
    trace, pipeline = traced(name, 14)
    whole, short = trace.draft(pipeline, None), trace.shorten(6)
    assert trace.shorten(8) is None
    found = short.draft(pipeline, None)
    num_skipped = num_gathers(whole) - num_gathers(found)
    assert num_skipped >= 6 and short.part == pytest.approx(num_gathers(found) / num_gathers(whole))
    trace, pipeline = traced(name, 14 - num_skipped)
    for activations in (None, 0.5):
        shown = [predict(draft(pipeline, activations), BALANCED) for draft in (short.draft, trace.draft)]
        assert shown[0].seconds == pytest.approx(shown[1].seconds, rel=0.005)
        # The shards that nobody reads are among the inputs.
        held = [sum(bytes for name, bytes in p.memory.peak.held.items() if name != "inputs") for p in shown]
        assert held[0] == pytest.approx(held[1], rel=0.05)


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_is_predicted_to_take_what_that_of_the_full_search_does(name, shortened):
    model, inputs = MODELS[name](14)
    rewriter = api.Rewriter(model, inputs, {}, Options(collective_lowering="auto", hardware=BALANCED))

    def planned(hardware, num_units):
        with patch.object(step_plans, "EQUAL_UNITS", num_units):
            graphs = rewriter(world_size=2, sharding_strategy=ShardingStrategy.FULL_SHARD, hardware=hardware)
        return predict(graphs, hardware)

    asked = (BALANCED,) if name == "llama" else (BALANCED, SLOW, COSTLY)
    for hardware in asked:
        found, full = planned(hardware, 6), planned(hardware, 1000)
        assert found.seconds <= 1.005 * full.seconds, hardware.name
    assert shortened == [name != "uneven", False] * len(asked)
    if name == "gpt":  # where memory limits the speed, nothing is left out
        limited = dataclasses.replace(COSTLY, memory=int(0.85 * full.memory.peak.total / 0.95))
        assert planned(limited, 6).graphs.plan == planned(limited, 1000).graphs.plan
