"""Formulas against the model that they are formulas of: one trace with symbols, and one for every set of numbers."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, ShardingStrategy

from fsdp_compile import rewrite
from fsdp_compile.costs import DEFINITIONS, HARDWARE, formulas_of, predict
from fsdp_compile.costs.nodes import full_bytes
from fsdp_compile.costs.optimizers import gradient_bytes
from fsdp_compile.errors import ConfigError
from fsdp_compile.passes import ops
from tests.costs.test_collectives import SMALL

NODES_OF_FOUR = dataclasses.replace(SMALL, contention=1.2, kernel_start=1e-6, reduce_scatter_factor=1.3)
TRACED = 3, 5  # rows, and tokens of a row


class Mixer(nn.Module):
    """Tokens f32[batch, seq, 6] are mixed with each other; no number of rows divides by many world sizes."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 7)
        self.norm = nn.LayerNorm(7)
        self.down = nn.Linear(7, 6, bias=False)

    def forward(self, x):
        x = self.norm(torch.tanh(self.up(x)))
        return self.down((x @ x.transpose(1, 2)) @ x).square().sum()


class Tempered(Mixer):
    """With a parameter that every rank keeps whole."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return super().forward(x) * self.temperature


def graphs_of(model=Mixer, batch=TRACED[0], seq=TRACED[1], world_size=2, is_dynamic=False, **options):
    torch._dynamo.reset()
    x = torch.randn(batch, seq, 6)
    if is_dynamic:
        torch._dynamo.mark_dynamic(x, (0, 1))
    return rewrite(model(), x, world_size=world_size, **{"auto_wrap_policy": nn.Linear, **options})


def numbers_of(graphs, compiler):
    """What `predict` says, by the names of formulas."""
    found = predict(graphs, NODES_OF_FOUR, compiler=compiler)
    sides = [side.graph for side in (graphs.forward, graphs.backward) if side is not None]
    backward = [moment for moment in found.memory.moments if moment.side == "backward"]
    return {
        "shard_bytes": found.memory.peak.held["shards"],
        "gradient_bytes": gradient_bytes(found.work),
        "optimizer_bytes": found.memory.peak.held["optimizer"],
        "saved_bytes": backward[0].held["activations"] if backward else 0,
        "bytes_moved": sum(sent(node) for graph in sides for node in graph.nodes if ops.is_collective(node)),
        "flops": found.flops,
        "compute_time": found.timeline.compute,
        "communication_time": sum(found.timeline.communication.values()),
        "exposed_time": found.exposed,
        "optimizer_time": found.optimizer_seconds,
        "step_time": found.seconds,
        "lower_bound": found.lower_bound,
    }


def sent(node):
    size = ops.argument(node, "world_size")
    return full_bytes(node) * (size - 1) / size * (2 if ops.is_call(node, ops.ALL_REDUCE) else 1)


def symbols_of(ranks):
    return dict(zip("RN", ranks, strict=True)) if isinstance(ranks, tuple) else {"N": ranks}


def assert_numbers_agree(*, model=Mixer, world_size, others, compiler="aot_eager", **options):
    symbolic = graphs_of(model, world_size=world_size, is_dynamic=True, **options)
    formulas = formulas_of(symbolic, compiler=compiler, names=("batch", "seq"))
    assert formulas.keys() == DEFINITIONS.keys()
    for batch, seq, ranks in [(*TRACED, world_size), *others]:
        expected = numbers_of(graphs_of(model, batch, seq, ranks, **options), compiler)
        sizes = {"batch": batch, "seq": seq, **symbols_of(ranks)}
        found = {name: formula.at(NODES_OF_FOUR, **sizes) for name, formula in formulas.items()}
        assert found == pytest.approx(expected, rel=1e-9), sizes


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("lowering", ["packed", "grouped"])
def test_other_sizes_and_numbers_of_ranks(lowering, compiler):
    others = [(4, 7, 3), (64, 100, 8)]
    assert_numbers_agree(world_size=2, others=others, collective_lowering=lowering, compiler=compiler)


def test_parts_that_are_aligned_for_some_numbers_of_ranks_only():
    """The gradients of the norm are 64 bytes: 2 and 4 ranks reduce whole 16 of them each, 3 ranks do not."""
    others = [(4, 7, 3), (2, 9, 4)]
    assert_numbers_agree(world_size=2, others=others, sharding_strategy=ShardingStrategy.NO_SHARD)


def test_hybrid_sharding_with_a_parameter_that_is_not_sharded():
    assert_numbers_agree(model=Tempered, world_size=(2, 2), others=[(4, 7, (3, 4))])


def test_parameters_that_stay_gathered_are_not_activations():
    assert_numbers_agree(world_size=2, others=[(4, 7, 5)], sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)


def test_parts_that_are_kept_for_a_gather_by_fewer_ranks():
    assert_numbers_agree(world_size=4, others=[(4, 7, 8)], reshard_after_forward=2)


def test_shards_that_are_cast():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert_numbers_agree(world_size=2, others=[(4, 7, 3)], mp_policy=policy)


@pytest.mark.parametrize("units", [{nn.Linear, nn.LayerNorm}, {Mixer}])
def test_parameters_that_are_cast_before_they_are_gathered(units):
    with torch.autocast("cpu", torch.bfloat16):
        graphs = graphs_of(auto_wrap_policy=units)
        gathers = [node for node in graphs.forward.graph.nodes if ops.is_all_gather(node)]
        assert gathers[0].meta["val"].dtype == torch.bfloat16
        assert_numbers_agree(world_size=2, others=[(4, 7, 3), (4, 7, 8)], auto_wrap_policy=units)


@pytest.mark.parametrize("lowering", ["packed", "grouped"])
def test_a_plan_that_gathers_all_buckets_at_once(lowering):
    options = {"hardware": NODES_OF_FOUR, "memory_budget": 1 << 30, "collective_lowering": lowering}
    assert [gather.buckets for gather in graphs_of(**options).plan.forward] == [("up", "norm", "down")]
    assert_numbers_agree(world_size=2, others=[(4, 7, 3)], **options)


def test_a_forward_without_gradients():
    with torch.no_grad():
        assert_numbers_agree(world_size=2, others=[(4, 7, 3)])


def test_predicting_dynamic_graphs_takes_the_traced_sizes_and_specialises_nothing():
    dynamic, static = (graphs_of(is_dynamic=is_dynamic) for is_dynamic in (True, False))
    assert numbers_of(dynamic, "inductor") == pytest.approx(numbers_of(static, "inductor"), rel=1e-9)
    saved = predict(dynamic, SMALL).formula("saved_bytes", names=("batch", "seq"))
    assert str(saved) == "saved_bytes = 4*batch*seq*(seq + 27)"


def test_formulas_by_hand():
    """A weight f32[7, 6] alone, on x f32[batch, 6]: one gather, and one reduction of its gradient.

    Inputs on the meta device keep their marks.
    """
    torch._dynamo.reset()
    x = torch.randn(3, 6, device="meta")
    torch._dynamo.mark_dynamic(x, 0)
    graphs = rewrite(nn.Linear(6, 7, bias=False), x, world_size=2)
    formulas = formulas_of(graphs, names=("batch",), optimizer="sgd")
    assert str(formulas["shard_bytes"]) == "shard_bytes = 16*ceiling(3*ceiling(7/N)/2)"
    assert str(formulas["bytes_moved"]) == "bytes_moved = 32*(N - 1)*ceiling(3*ceiling(7/N)/2)"
    assert formulas["optimizer_bytes"].expression == 0
    two_products = 2 * 2 * 6 * 7
    assert formulas["flops"].at(batch=10) == 10 * two_products
    exposed = formulas["exposed_time"]
    assert [str(symbol) for symbol in exposed.where][:4] == ["ranks_of_a_node", "nodes", "hops", "bandwidth"]
    assert exposed.written_out.free_symbols.isdisjoint(exposed.where)


def test_what_cannot_be_a_formula_is_refused():
    graphs = graphs_of(is_dynamic=True)
    assert str(formulas_of(graphs, names=("side", "side"))["saved_bytes"].expression) == "4*side**2*(side + 27)"
    with pytest.raises(ConfigError, match="3 dimensions, a, b, c; the graphs have 2"):
        formulas_of(graphs, names=("a", "b", "c"))
    with pytest.raises(ConfigError, match="N would stand for two things"):
        formulas_of(graphs, names=("N",))
    with pytest.raises(ConfigError, match="there is no formula 'seconds'; there are shard_bytes"):
        predict(graphs, SMALL).formula("seconds")
    with pytest.raises(ConfigError, match="bytes_moved depends on N: pass"):
        formulas_of(graphs)["bytes_moved"].at(HARDWARE["h100"])


class HalfUsed(Mixer):
    def __init__(self):
        super().__init__()
        self.up.unused = nn.Parameter(torch.ones(64))


def test_parameters_that_the_graphs_do_not_show_are_refused():
    with pytest.raises(ConfigError, match="parameters of up that take .* of the .* elements of its shard"):
        formulas_of(graphs_of(HalfUsed))
