"""sharding_strategy="auto": which strategy the cost model chooses for a model on described hardware, and why."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile import ConfigError, rewrite
from fsdp_compile.costs import HARDWARE
from fsdp_compile.costs.hardware import Link
from fsdp_compile.costs.predict import predict
from fsdp_compile.options import Options
from fsdp_compile.passes import ops
from fsdp_compile.planning.step_plans import Goal
from fsdp_compile.planning.strategies import best_strategy, candidates
from fsdp_compile.rewriting import Rewriter
from tests.models import build

H100 = HARDWARE["h100"]
SLOW = Link(1e9, 1e-6)
MIB = 2**20


class Layers(nn.Module):
    """1 MiB of parameters each."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(512, 512, bias=False) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def on_meta(module, *inputs):
    return module.to("meta"), [tensor.to("meta") for tensor in inputs]


def choose(model, inputs, world_size, hardware, kind=Rewriter):
    goal = Goal(hardware, None, "inductor")
    rewriter = kind(model, tuple(inputs), {}, Options(collective_lowering="auto"))
    return best_strategy(candidates(rewriter, world_size, goal, hardware.ranks_per_node), goal)


def test_a_small_convolution_net_with_much_to_compute_keeps_its_parameters_whole():
    model, inputs = on_meta(build("conv_net"), torch.ones(1, 1, 6, 6), torch.ones(1, dtype=torch.int64))
    inputs = [tensor.expand(2**20, *tensor.shape[1:]) for tensor in inputs]
    choice = choose(model, inputs, 8, H100)
    assert choice.strategy is ShardingStrategy.NO_SHARD
    graphs = rewrite(
        model, *inputs, world_size=8, sharding_strategy="auto", hardware="h100", collective_lowering="auto"
    )
    assert str(graphs) == str(choice.prediction.graphs)
    assert not any(ops.is_all_gather(node) for node in graphs.forward.graph.nodes)
    seconds = predict(graphs, H100).seconds * 1e3
    why, others = choice.reason.split(". The others: ")
    assert why.startswith("NO_SHARD is the ") and f"{seconds:.3g} ms a step, " in why
    assert why.endswith(" GiB at the peak")
    assert [text.split()[0] for text in others.split("; ")] == ["SHARD_GRAD_OP", "FULL_SHARD"]


@pytest.mark.parametrize(
    ("memory", "strategy"), [(None, "NO_SHARD"), (12, "SHARD_GRAD_OP"), (5, "FULL_SHARD")], ids=str
)
def test_what_is_kept_depends_on_the_memory(memory, strategy):
    """Of 16 MiB of parameters, gradients and the optimizer's states, and 4 MiB of gathered parameters."""
    few_hops = dataclasses.replace(H100, within_node=Link(1e9, 0.0), collective_start=0.0)
    hardware = few_hops if memory is None else dataclasses.replace(few_hops, memory=memory * MIB)
    choice = choose(Layers(), [torch.ones(64, 512)], 8, hardware)
    assert choice.strategy is ShardingStrategy[strategy], choice.reason
    assert choice.reason.count("does not fit") == {"NO_SHARD": 0, "SHARD_GRAD_OP": 1, "FULL_SHARD": 2}[strategy]


@pytest.mark.parametrize(("memory", "rewritten"), [(13, 3), (12, 2), (1, 3)])
def test_what_has_no_room_for_shards_and_states_is_not_rewritten(memory, rewritten):
    """4 MiB of parameters and 8 of states in 13 or 12 MiB, of which 5 % are left; in 1 MiB nothing fits."""
    hardware, seen = dataclasses.replace(H100, memory=memory * MIB), []

    class Noting(Rewriter):
        def __call__(self, *, sharding_strategy, **options):
            seen.append(sharding_strategy)
            return super().__call__(sharding_strategy=sharding_strategy, **options)

    choice = choose(Layers(), [torch.ones(64, 512)], 8, hardware, Noting)
    assert len(seen) == rewritten
    assert choice.strategy is not ShardingStrategy.NO_SHARD
    left_out = "NO_SHARD 12 MiB of shards and states, does not fit" in choice.reason
    assert left_out == (ShardingStrategy.NO_SHARD not in seen)


@pytest.mark.parametrize("strategy", list(ShardingStrategy)[:3], ids=lambda strategy: strategy.name)
def test_what_a_rank_always_holds_is_what_the_prediction_says(strategy):
    rewriter = Rewriter(Layers(), (torch.ones(64, 512),), {}, Options(collective_lowering="packed"))
    least = candidates(rewriter, 8, Goal(H100, None, "inductor"), 8)[strategy].least
    graphs = rewriter(world_size=8, sharding_strategy=strategy)
    held = predict(graphs, H100).memory.moments[0].held
    assert held["shards"] + held["optimizer"] == least


def test_slow_links_between_nodes_want_shards_within_them():
    nodes = dataclasses.replace(H100, ranks_per_node=2, between_nodes=Link(1e9, 1e-5), memory=64 * MIB)
    model, inputs = on_meta(Layers(), torch.ones(4096, 512))
    choice = choose(model, inputs, 4, nodes)
    assert choice.strategy is ShardingStrategy.HYBRID_SHARD, choice.reason
    by_hand = rewrite(
        model,
        *inputs,
        world_size=(2, 2),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        hardware=nodes,
        collective_lowering="auto",
    )
    assert str(choice.prediction.graphs) == str(by_hand)


def test_hybrid_sharding_is_for_several_whole_nodes():
    def strategies(world_size, ranks_per_node):
        rewriter = Rewriter(Layers(), (), {}, Options())
        return [each.name for each in candidates(rewriter, world_size, Goal(H100, None, "inductor"), ranks_per_node)]

    anywhere = ["NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD"]
    assert strategies(16, 8) == [*anywhere, "HYBRID_SHARD"]
    for world_size, ranks_per_node in ((8, 8), (12, 8), (8, 1), (16, None), ((2, 8), 8)):
        assert strategies(world_size, ranks_per_node) == anywhere


def test_without_room_it_is_what_needs_least_or_an_error_with_a_budget():
    model, inputs = on_meta(Layers(), torch.ones(64, 512))
    choice = choose(model, inputs, 8, dataclasses.replace(H100, memory=MIB))
    assert choice.strategy is ShardingStrategy.FULL_SHARD
    assert "FULL_SHARD needs least, and none fits into the 972.8 KiB" in choice.reason
    options = {"world_size": 8, "sharding_strategy": "auto", "hardware": "h100"}
    with pytest.raises(ConfigError, match=r"memory_budget of 1 MiB: .* They need: NO_SHARD .* FULL_SHARD .*does not"):
        rewrite(model, *inputs, memory_budget="1 MiB", **options)
    graphs = rewrite(model, *inputs, memory_budget="5 MiB", collective_lowering="auto", **options)
    assert predict(graphs, H100).memory.peak.total <= 5 * MIB


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "sharding_strategy='auto' needs hardware= to choose for"),
        ({"hardware": "h100", "reshard_after_forward": True}, "reshard_after_forward=True says what is"),
        ({"hardware": "h100", "auto_wrap_policy": ["encoder.*"]}, "encoder"),
    ],
    ids=str,
)
def test_what_it_cannot_be_chosen_with(options, words):
    with pytest.raises(ConfigError, match=words):
        rewrite(Layers(), torch.ones(4, 512), world_size=2, sharding_strategy="auto", **options)


def test_sizes_of_one_rewrite_are_no_symbols_in_the_next():
    for rows in (4, 8):
        assert f": f32[{rows},512]" in str(rewrite(Layers(), torch.ones(rows, 512), world_size=2).forward)
