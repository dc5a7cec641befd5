"""One trace for several layouts: the graphs are those that a trace of its own would have given."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, ShardingStrategy
from torch.distributed.tensor import Shard

from fsdp_compile import rewrite, rewriting, traced_call
from fsdp_compile.costs import HARDWARE
from fsdp_compile.costs.predict import predict
from fsdp_compile.options import Options
from tests.models import build

pytestmark = pytest.mark.usefixtures("fresh_compiler")

FULL, GRAD_OP, WHOLE, HYBRID = (
    ShardingStrategy[name] for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
)
LAYOUTS = [(2, FULL), (7, FULL), (3, GRAD_OP), (4, WHOLE), ((2, 3), HYBRID), (1, FULL), (2, FULL)]
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Mixed(nn.Module):
    """Frozen and scalar parameters, one that is read twice if it `is_tied`, and two results."""

    def __init__(self, is_tied=False):
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.layers[1].weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        self.out = nn.Linear(6, 10, bias=False)
        if is_tied:
            self.out.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.out(x).square().mean(), self.scale * x.mean()


IDS, ROWS = torch.arange(4), torch.ones(4, 6)
CALLS = {  # model, its input, options, and how many traces the layouts above need
    "mixed": (Mixed, IDS, {}, 2),
    "tied, in bfloat16": (lambda: Mixed(is_tied=True), IDS, {"mp_policy": BF16}, 2),
    "planned": (lambda: build("odd_mlp"), None, {"hardware": "h100", "collective_lowering": "auto"}, 2),
    "parts of columns": (lambda: nn.Linear(6, 42), ROWS, {"shard_placement_fn": lambda _: Shard(-1)}, 7),
}


def text_of(graphs):
    lowered = [gm for gm in (graphs.lowered.forward, graphs.lowered.backward) if gm is not None]
    shapes = [[(node.name, str(node.meta.get("val"))) for node in gm.graph.nodes] for gm in lowered]
    return [str(graphs), graphs.schedule(), [gm.code for gm in lowered], shapes, str(graphs.dependence)]


@pytest.fixture
def num_traces(monkeypatch):
    """How often a call has been traced, as a list that grows."""
    found = []
    trace = traced_call.trace
    monkeypatch.setattr(traced_call, "trace", lambda *args: found.append(args) or trace(*args))
    return found


@pytest.mark.parametrize("with_gradients", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", CALLS)
def test_graphs_are_those_of_a_trace_of_their_own(name, with_gradients, num_traces):
    make, given, options, expected = CALLS[name]
    model = make()
    inputs = model.inputs(4, 0) if given is None else (given,)
    hardware = options.get("hardware")
    with torch.set_grad_enabled(with_gradients):
        common = Options(**{"collective_lowering": "packed", "hardware": None, **options})
        rewriter = rewriting.Rewriter(model, inputs, {}, common)
        found = []
        for size, strategy in LAYOUTS:
            found.append(text_of(rewriter(world_size=size, sharding_strategy=strategy, hardware=hardware)))
        number = len(num_traces)
        for (size, strategy), text in zip(LAYOUTS, found, strict=True):
            own = rewrite(model, *inputs, world_size=size, sharding_strategy=strategy, **options)
            assert text == text_of(own), (size, strategy)
    assert number == expected
    assert len(num_traces) == number + len(LAYOUTS)


def test_other_activations_are_split_from_the_same_trace(num_traces):
    model, hardware = build("gpt"), HARDWARE["h100"]
    inputs, options = model.inputs(8, 0), {"collective_lowering": "auto"}
    free = predict(rewrite(model, *inputs, world_size=2, hardware=hardware, **options), hardware).memory.peak
    hardware = dataclasses.replace(hardware, memory=int(0.85 * free.total))
    rewriter = rewriting.Rewriter(model, inputs, {}, Options(hardware=hardware, **options))
    for size in (3, 2):  # what the partitioner saves for 3 is not what it saves for 2
        shared = rewriter(world_size=size, sharding_strategy=FULL, hardware=hardware)
        own = rewrite(model, *inputs, world_size=size, hardware=hardware, **options)
        assert text_of(shared) == text_of(own)
        assert shared.plan == own.plan and shared.plan.activations < 1
    assert len(num_traces) == 1 + 1 + 2


def test_a_memory_budget_for_activations_that_the_user_has_set(num_traces):
    model = build("gpt")
    inputs, options = model.inputs(8, 0), {"collective_lowering": "packed", "hardware": None}
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        rewriter = rewriting.Rewriter(model, inputs, {}, Options(**options))
        for size in (3, 2):
            shared = rewriter(world_size=size, sharding_strategy=FULL)
            assert text_of(shared) == text_of(rewrite(model, *inputs, world_size=size, **options))
    assert len(num_traces) == 1 + 2
