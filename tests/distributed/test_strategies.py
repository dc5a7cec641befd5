"""Sharding strategies and resharding after the forward: one result, by different communication."""

import dataclasses
import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, ShardingStrategy
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_compile import ConfigError, fsdp_compile, shard
from fsdp_compile.costs import HARDWARE
from fsdp_compile.passes import ops
from tests.distributed.training import (
    ROWS,
    assert_close,
    assert_same_gradients,
    assert_trains_as,
    batch_of_rank,
    both_front_ends,
    compiled,
    full,
    global_batch,
    hybrid_mesh,
)
from tests.models import DEVICE, build
from tests.ranks import on_ranks


def num_collectives(graph, *targets):
    return sum(ops.is_call(node, *targets) for node in graph.graph.nodes)


def groups_of(graph, target):
    """The sizes of the groups that gather or reduce, in order."""
    return [ops.argument(node, "world_size") for node in graph.graph.nodes if ops.is_call(node, target)]


@pytest.mark.parametrize("name", ["odd_parameters", "adapted", "unused"])
@both_front_ends
@on_ranks(3)
def test_no_shard_keeps_parameters_whole_and_reduces_each_bucket_once(world_size, front_end, name):
    model = front_end(build(name), sharding_strategy=ShardingStrategy.NO_SHARD)
    assert all(parameter.placements == (Replicate(),) for parameter in model.parameters())
    assert_trains_as(model, build(name))
    if isinstance(front_end, functools.partial):  # compiled
        [graphs] = model.graphs
        assert num_collectives(graphs.forward, ops.ALL_GATHER) == num_collectives(graphs.backward, ops.ALL_GATHER) == 0
        reduced = [ops.argument(n, "bucket") for n in graphs.backward.graph.nodes if ops.is_call(n, ops.ALL_REDUCE)]
        assert len(reduced) == len(set(reduced)) > 1


@on_ranks(2)
def test_no_shard_under_inductor_overlaps_reductions_with_the_backward(world_size):
    model = fsdp_compile(build("gpt"), sharding_strategy=ShardingStrategy.NO_SHARD)
    assert_trains_as(model, build("gpt"))
    nodes = [node for node in model.graphs[0].backward.graph.nodes if node.op == "call_function"]
    first = next(index for index, node in enumerate(nodes) if ops.is_call(node, ops.ALL_REDUCE))
    assert any("mm" in str(node.target) for node in nodes[first:])


@on_ranks(2)
def test_shard_grad_op_gathers_each_unit_once(world_size):
    model = compiled(build("gpt"), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    assert_trains_as(model, build("gpt"))
    [graphs] = model.graphs
    assert num_collectives(graphs.backward, ops.ALL_GATHER) == 0
    assert num_collectives(graphs.forward, ops.ALL_GATHER) == num_collectives(graphs.backward, ops.REDUCE_SCATTER)


@pytest.mark.parametrize("strategy", [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2])
@on_ranks(4)
def test_hybrid_strategies_on_a_mesh(world_size, strategy):
    model = compiled(build("gpt"), hybrid_mesh(), sharding_strategy=strategy)
    assert_trains_as(model, build("gpt"))
    [graphs] = model.graphs
    assert num_collectives(graphs.backward, ops.ALL_REDUCE) == num_collectives(graphs.backward, ops.REDUCE_SCATTER)
    is_zero2 = strategy is ShardingStrategy._HYBRID_SHARD_ZERO2
    assert (num_collectives(graphs.backward, ops.ALL_GATHER) == 0) == is_zero2


@on_ranks(4)
def test_hybrid_sharding_on_a_pair_of_groups(world_size):
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    pair = rows[rank // 2], columns[rank % 2]
    model = compiled(build("odd_mlp"), process_group=pair, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    weight = next(model.parameters())
    assert weight.placements == (Replicate(), Shard(0))
    assert weight.device_mesh.mesh.tolist() == [[0, 1], [2, 3]]
    assert_trains_as(model, build("odd_mlp"))


@on_ranks(4)
def test_hybrid_sharding_by_the_ranks_of_a_node(world_size):
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LOCAL_WORLD_SIZE", raising=False)
        with pytest.raises(ConfigError, match="needs to know the ranks of a node"):
            shard(build("gpt"), sharding_strategy=ShardingStrategy.HYBRID_SHARD)
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        model = compiled(build("odd_mlp"), sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    assert next(model.parameters()).device_mesh.shape == (2, 2)
    assert_trains_as(model, build("odd_mlp"))


@pytest.mark.parametrize("lowering", ["packed", "grouped"])
@pytest.mark.parametrize("name", ["odd_mlp", "adapted"])
@on_ranks(4)
def test_a_number_of_ranks_gathers_the_backward_over_groups_of_that_size(world_size, name, lowering):
    model = compiled(build(name), reshard_after_forward=2, collective_lowering=lowering)
    assert_trains_as(model, build(name))
    [graphs] = model.graphs
    gathers = ops.ALL_GATHER_GROUPED if lowering == "grouped" else ops.ALL_GATHER
    assert set(groups_of(graphs.forward, gathers) + groups_of(graphs.forward, ops.ALL_GATHER)) == {4}
    assert set(groups_of(graphs.backward, ops.ALL_GATHER)) == {2}  # parts travel packed


@on_ranks(4)
def test_smaller_groups_of_a_hybrid_mesh_for_some_units(world_size):
    mesh = init_device_mesh(DEVICE.type, (1, 4), mesh_dim_names=("replicate", "shard"))
    model = compiled(build("gpt"), mesh, reshard_after_forward={"*": True, "blocks.0": 2})
    assert_trains_as(model, build("gpt"))
    buckets = {
        ops.unit_of_bucket(ops.argument(node, "bucket")): ops.argument(node, "world_size")
        for node in model.graphs[0].backward.graph.nodes
        if ops.is_all_gather(node)
    }
    assert (buckets["blocks.0"], buckets["blocks.1"]) == (2, 4)


@on_ranks(4)
def test_numbers_that_mean_all_or_none(world_size):
    one, all_ = (compiled(build("odd_mlp"), reshard_after_forward=number) for number in (1, 4))
    for model in (one, all_):
        model(*batch_of_rank(model, 0)).backward()
    assert num_collectives(one.graphs[0].backward, ops.ALL_GATHER) == 0
    assert set(groups_of(all_.graphs[0].backward, ops.ALL_GATHER)) == {4}


@on_ranks(3)
def test_sharding_over_some_of_the_ranks(world_size):
    """Ranks 0 and 1 train; rank 2 does something else meanwhile."""
    group = dist.new_group([0, 1])
    model = build("gpt")
    if dist.get_rank() == 2:
        return
    model = compiled(model, process_group=group)
    expected = build("gpt")
    parts = [batch_of_rank(expected, 0, rank) for rank in (0, 1)]
    model(*parts[dist.get_rank()]).backward()
    expected(*map(torch.cat, zip(*parts, strict=True))).backward()
    assert_same_gradients(model, expected)


# NO_SHARD starts fewest collectives. The parameters of "odd_mlp", their gradients and states are 3360 bytes.
ROOM = dataclasses.replace(HARDWARE["h100"], collective_start=1e-3)
LITTLE = dataclasses.replace(ROOM, memory=3150)


@pytest.mark.parametrize(("hardware", "strategy"), [(ROOM, "NO_SHARD"), (LITTLE, "FULL_SHARD")], ids=["room", "little"])
@on_ranks(2)
def test_auto_chooses_one_strategy_for_all_ranks_and_says_why(world_size, hardware, strategy):
    model = build("odd_mlp")
    rows = ROWS + 1 if dist.get_rank() == 0 else 64  # what the first rank says counts
    inputs = [tensor.to("meta") for tensor in model.inputs(rows, seed=0)]
    model = compiled(model, sharding_strategy="auto", example_inputs=inputs, hardware=hardware)
    assert_trains_as(model, build("odd_mlp"))
    gathers = [node for node in model.graphs[0].forward.graph.nodes if ops.is_all_gather(node)]
    assert (not gathers) == (strategy == "NO_SHARD")
    numel = sum(parameter.numel() for parameter in build("odd_mlp").parameters())
    local = sum(parameter.to_local().numel() for parameter in model.parameters())
    assert (local == numel) == (strategy == "NO_SHARD")
    text = str(model.explain(hardware))
    assert text.startswith("strategy ") and f"{strategy} is the" in text and "The others: " in text
    assert f": f32[{ROWS},5]" in str(model.graphs[0].forward)  # those of example_inputs have left no trace


@on_ranks(1, 2)
def test_gradients_are_summed_or_divided_by_a_number(world_size):
    expected = build("odd_mlp")
    expected(*global_batch(expected, 0)).backward()
    for reduction, factor in (("mean", 1.0), ("sum", world_size), (8, world_size / 8), (0.5, 2 * world_size)):
        for front_end in (compiled, shard):
            model = front_end(build("odd_mlp"), gradient_reduction=reduction)
            model(*batch_of_rank(model, 0)).backward()
            for name, parameter in model.named_parameters():
                gradient = dict(expected.named_parameters())[name].grad
                assert_close(full(parameter.grad), gradient * factor)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sharding_strategy": "auto"}, "needs example_inputs, .* they are missing"),
        ({"sharding_strategy": "auto", "example_inputs": "tokens"}, "they are of type str"),
        (
            {"sharding_strategy": "auto", "example_inputs": [], "reshard_after_forward": 2},
            "reshard_after_forward=2 says",
        ),
        ({"sharding_strategy": "auto", "example_inputs": [], "offload_policy": CPUOffloadPolicy()}, "give a strategy"),
        ({"example_inputs": []}, "example_inputs are what sharding_strategy='auto' is chosen for"),
        ({"sharding_strategy": 1}, "sharding_strategy is a ShardingStrategy"),
        ({"reshard_after_forward": 3}, "does not divide the 2 ranks"),
        ({"reshard_after_forward": 0}, "reshard_after_forward is None, a bool, a number of ranks"),
        ({"reshard_after_forward": -2}, "reshard_after_forward is None, a bool, a number of ranks"),
        ({"reshard_after_forward": True, "sharding_strategy": ShardingStrategy.NO_SHARD}, "nothing is sharded"),
        ({"process_group": [1, 2]}, "process_group is a ProcessGroup, or a pair"),
        ({"gradient_reduction": 0}, "gradient_reduction is"),
        ({"gradient_reduction": True}, "gradient_reduction is"),
    ],
    ids=str,
)
@on_ranks(2)
def test_options_that_mean_nothing_are_refused_and_change_nothing(world_size, options, words):
    model = build("gpt")
    with pytest.raises(ConfigError, match=words):
        fsdp_compile(model, **options)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    mesh = init_device_mesh(DEVICE.type, (2,), mesh_dim_names=("shard",))
    with pytest.raises(ConfigError, match="HYBRID_SHARD needs a mesh of two dimensions"):
        fsdp_compile(model, mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


@pytest.mark.parametrize("front_end", [compiled, shard], ids=["compiled", "eager"])
def test_a_parameter_that_took_the_place_of_another_is_divided_as_that(front_end):
    """On a single rank; load_state_dict(assign=True) puts tensors in the place of parameters."""
    model, expected = front_end(build("odd_mlp"), gradient_reduction=4), build("odd_mlp")
    model.load_state_dict({name: value.clone() for name, value in expected.state_dict().items()}, assign=True)
    for one in (model, expected):
        one(*one.inputs(4, seed=0)).backward()
    for parameter, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(4 * parameter.grad, wanted.grad)
