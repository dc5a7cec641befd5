"""Random models on simulated ranks: outputs and gradients are those of the unsharded model.

Every pass is verified. `--hypothesis-profile=thorough --timeout=0` draws 2,000 of them.
"""

import copy
import dataclasses
import operator
import os
import re
from functools import partial
from unittest.mock import patch

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile import CommunicationDtype, ConfigError, rewrite
from fsdp_compile.costs import HARDWARE, Link, predict
from fsdp_compile.options import Options
from fsdp_compile.passes import forms, ops, outline_blocks
from fsdp_compile.passes.padding import shard_rows
from fsdp_compile.planning.step_plans import Goal
from fsdp_compile.rewriting import Rewriter
from tests.distributed.test_communication_dtype import rounded
from tests.passes.tracing import copy_of
from tests.random_models import HeadedModel, RandomModel, Tiny, TinyUnit, schedules, tiny_units, trees
from tests.simulation import Simulation

NUM_EXAMPLES = 2000 if settings.get_current_profile_name() == "thorough" else 240


def options():
    """Options of `rewrite`, each of which changes the graphs and none what they compute."""
    fixed = st.fixed_dictionaries(
        {},
        optional={
            **schedules(),
            "reshard_after_forward": st.booleans(),
            "gradient_reduction": st.sampled_from(["mean", "sum", 3.0]),
        },
    )
    planned = st.fixed_dictionaries(
        {"hardware": st.sampled_from([HARDWARE["h100"], HARDWARE["a100-40"]])},
        optional={"memory_budget": st.just("1 GiB"), "gradient_reduction": st.just("sum")},
    )
    unsharded = st.just({"sharding_strategy": ShardingStrategy.NO_SHARD})
    return fixed | planned | unsharded


WORLD_SIZES = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 2)]


# For examples that have failed.
AGAIN = ("sum", ("sequence", (("dropout",),)), ("checkpoint", ("again", 0)))
DOUBLE = (
    "sequence",
    (
        ("mlp", 1),
        ("double",),
        ("sum", ("frozen", ("checkpoint", ("double",))), ("frozen", ("checkpoint", ("double",)))),
        ("residual", ("double",)),
    ),
)
PLANNED = {"hardware": HARDWARE["h100"]}
SLOW_LINK = dataclasses.replace(HARDWARE["h100"], name="slow link", within_node=Link(5e7, 1e-6), collective_start=1e-3)
NORMED = ("sequence", (("adapter", 2), ("norm",), ("embedding", 2), ("residual", ("mlp", 7))))
COUNTED = ("sum", ("counted",), ("named", "a,b", ("mlp", 3)))
ADAPTERS = ("sequence", (("adapter", 3), ("linear", False), ("adapter", 3), ("adapter", 3)))


@settings(max_examples=NUM_EXAMPLES)
@given(
    trees(with_rounding=True),
    st.booleans(),
    st.sampled_from(WORLD_SIZES),
    options(),
    st.integers(1, 3),
    st.booleans(),
)
@example(("sum", ("narrow", 7), ("norm",)), False, (1, 3), {"auto_wrap_policy": {RandomModel}}, 2, True)  # one message
@example(("linear", False), False, (2, 2), PLANNED, 1, False)  # two reductions under way, each over both axes
@example(AGAIN, False, (1, 1), {"sharding_strategy": ShardingStrategy.NO_SHARD}, 1, False)  # random in a checkpoint
@example(NORMED, True, (2, 2), {"reshard_after_forward": False}, 3, True)  # rows were looked up by rounding
@example(DOUBLE, False, (1, 2), {"collective_lowering": "packed"}, 1, False)  # an f64 gradient of f32 precision
@example(("residual", ADAPTERS), False, (1, 3), PLANNED, 1, True)  # two gathers right before the first kernel
@example(COUNTED, False, (1, 2), {"collective_lowering": "grouped"}, 2, False)  # a buffer was read after it was written
def test_a_random_model_computes_what_it_does_unsharded(tree, is_double, world_size, options, rows, poison):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = RandomModel(tree, is_double)
    num_ranks = world_size[0] * world_size[1]
    inputs = [model.inputs(rows, rank) for rank in range(num_ranks)]
    seeds = list(range(num_ranks))
    with patch.dict(os.environ, FSDP_COMPILE_POISON=str(int(poison))):
        simulation = Simulation.of(model, inputs[0], world_size, **options)
    found = simulation.step(dict(model.named_parameters()), inputs, seeds)

    expected, gradients = unsharded(model, inputs, seeds)
    for rank in range(num_ranks):
        torch.testing.assert_close(found.outputs[rank][: len(expected[rank])], expected[rank])
    reduction = options.get("gradient_reduction", "mean") if num_ranks > 1 else "sum"  # a single rank reduces nothing
    divisor = {"mean": num_ranks, "sum": 1}.get(reduction, 3.0)
    reduced = {name: sum(each[name] for each in gradients) / divisor for name in gradients[0]}
    for rank, of_rank in enumerate(found.gradients):
        compare_gradients(model, simulation, of_rank, reduced, rank % world_size[1])


MESSAGES = st.builds(
    CommunicationDtype,
    st.sampled_from([None, "int8", "int4"]),
    st.sampled_from([None, "int8", "int4", torch.bfloat16, torch.float16]),
    all_reduce=st.sampled_from([None, "int8", "int4", torch.bfloat16, torch.float16]),
)


@settings(max_examples=NUM_EXAMPLES // 12)
@given(
    trees(with_dropout=False),
    st.sampled_from(WORLD_SIZES[1:]),
    MESSAGES,
    st.fixed_dictionaries({}, optional=schedules()),
)
def test_a_random_model_computes_with_what_arrives_of_its_parameters(tree, world_size, asked, options):
    """Gradients are as near as a message is, which of each block keeps a part of the largest element.

    Rows of any length are sent as integers, in several blocks.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    if world_size[0] == 1:
        asked = dataclasses.replace(asked, all_reduce=None)
    model, num_ranks = RandomModel(tree), world_size[0] * world_size[1]
    inputs, seeds = [model.inputs(2, rank) for rank in range(num_ranks)], list(range(num_ranks))
    placement = options.get("shard_placement_fn", lambda parameter: None)
    arrived = copy.deepcopy(model)
    with patch.object(forms, "SHORTEST", 2), patch.object(forms, "BLOCK", 3):
        simulation = Simulation.of(model, inputs[0], world_size, communication_dtype=asked, **options)
        found = simulation.step(dict(model.named_parameters()), inputs, seeds)
        for parameter, own in zip(arrived.parameters(), model.parameters(), strict=True):
            dim = getattr(placement(own), "dim", 0)
            parameter.data = arriving(own.detach(), asked.gather_form, dim, world_size[1])
    outputs, gradients = unsharded(arrived, inputs, seeds)
    for of_rank, expected in zip(found.outputs, outputs, strict=True):
        torch.testing.assert_close(of_rank[: len(expected)], expected)
    reduced = {name: sum(each[name] for each in gradients) / num_ranks for name in gradients[0]}
    lost = {name: lost_of_all([each[name] for each in gradients], asked, world_size[1]) for name in gradients[0]}
    shard_of_key = {id(shard.stand_in): shard for shard in simulation.shards}
    for rank, of_rank in enumerate(found.gradients):
        for key, gradient in of_rank:
            if gradient is not None and (shard := shard_of_key.get(id(key))) is not None:
                expected, bound = (shard.of_rank(each, rank % world_size[1]) for each in (reduced, lost))
                assert ((gradient - expected).abs() <= bound + 1e-5 + 1e-5 * expected.abs()).all(), shard.slots


def arriving(tensor, form, dim, num_ranks):
    """What arrives of a parameter that is gathered in a form: rows are those of what each rank holds."""
    if dim == 0:
        return rounded(tensor, form)
    length = tensor.numel() // tensor.shape[dim]
    parts = tensor.split(shard_rows(tensor.shape[dim:], num_ranks), dim)
    return torch.cat([rounded(part.reshape(-1, length), form).view(part.shape) for part in parts], dim)


def lost_of_all(gradients, asked, num_shards):
    """At most, of the mean of a parameter's gradients: of all ranks, and then of the mean of each replica's."""
    lost = [lost_of(gradient, asked.reduce) for gradient in gradients]
    largest = [gradient.abs() + own for gradient, own in zip(gradients, lost, strict=True)]
    replicas = [sum(largest[first : first + num_shards]) / num_shards for first in range(0, len(largest), num_shards)]
    return sum(lost) / len(lost) + sum(lost_of(each, asked.all_reduce) for each in replicas) / len(replicas)


def lost_of(gradient, form):
    """At most, of each element of a gradient that is sent in a form."""
    if isinstance(form, torch.dtype):
        return gradient.abs() * torch.finfo(form).eps
    largest = gradient.abs().max() if gradient.numel() else 0
    return torch.full_like(gradient, 0.0 if form is None else largest / (2 * forms.most(f"{form}_blocks")))


@settings(max_examples=NUM_EXAMPLES // 25)
@given(
    trees(with_rounding=True),
    st.lists(st.sampled_from(WORLD_SIZES), min_size=2, max_size=3, unique=True),
    options(),
    st.sampled_from([1.0, 0.5]),
)
def test_a_random_model_is_laid_out_for_other_ranks_as_it_is_traced_for_them(tree, world_sizes, options, activations):
    model = RandomModel(tree)
    inputs, given = model.inputs(2, 0), {"collective_lowering": "packed", "hardware": None, **options}
    strategy = given.pop("sharding_strategy", ShardingStrategy.FULL_SHARD)
    given.pop("memory_budget", None)  # for a rewriter, the memory of the hardware is the budget
    rewriter = Rewriter(model, inputs, {}, Options(**given))
    with torch._functorch.config.patch(activation_memory_budget=activations):
        for world_size in world_sizes:
            torch._dynamo.reset()
            found = rewriter(world_size=world_size, sharding_strategy=strategy, hardware=given["hardware"])
            own = rewrite(model, *inputs, world_size=world_size, sharding_strategy=strategy, **given)
            assert str(found) == str(own)


@settings(max_examples=NUM_EXAMPLES // 4)
@given(trees(), st.integers(1, 4), st.sampled_from(WORLD_SIZES))
def test_a_random_graph_knows_which_outputs_lead_to_which_gradients(tree, num_heads, world_size):
    torch._dynamo.reset()
    model = HeadedModel(tree, num_heads)
    found = Simulation.of(model, model.inputs(2, 0), world_size).outputs_leading_to(model)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    expected = {name: set() for name in trained}
    for index, output in enumerate(model(*model.inputs(2, 0))):
        given = torch.autograd.grad(output.sum(), trained.values(), retain_graph=True, allow_unused=True)
        for name, gradient in zip(trained, given, strict=True):
            expected[name] |= {index} if gradient is not None else set()
    assert {name: found[name] for name in trained} == expected


@settings(max_examples=NUM_EXAMPLES // 80)
@given(trees(with_dropout=False), st.integers(2, 3), st.sampled_from(WORLD_SIZES), options(), st.booleans())
def test_random_layers_compute_as_blocks_what_they_do_as_a_whole(tree, num, world_size, options, poison):
    torch._dynamo.reset()
    model = RandomModel(("sequence", (tree,) * num))
    with patch.dict(os.environ, FSDP_COMPILE_POISON=str(int(poison))):
        graphs = Simulation.of(model, model.inputs(2, 0), world_size, **options).graphs.lowered
    for whole in filter(None, (graphs.forward, graphs.backward)):
        outlined = copy_of(whole)
        with patch.object(outline_blocks, "_FEWEST", 1):
            outline_blocks.OutlineBlocks()(outlined)
        outlined.graph.lint()
        numbers = {}
        assert computed(outlined, numbers) == computed(whole, numbers)


_CALLED = ("_c10d_functional", "fsdp")


def computed(gm, numbers, inputs=None):
    """What a graph returns, and what it calls outside of blocks that no block may hold, in order: values by number.

    Equal values have equal numbers: the same operator on the same values.
    """
    values, calls = {}, []
    inputs = iter(inputs or [node.name for node in gm.graph.nodes if node.op == "placeholder"])
    for node in list(gm.graph.nodes)[:-1]:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "placeholder":
            values[node] = next(inputs)
        elif node.op == "get_attr":
            values[node] = node.target
        elif node.target is torch.ops.higher_order.invoke_subgraph:
            values[node], _ = computed(gm.get_submodule(args[1]), numbers, args[2:])
        elif node.target is operator.getitem and isinstance(args[0], list):
            values[node] = args[0][args[1]]
        elif node.target is ops.STORE:
            values[node] = args[0]
        else:
            values[node] = numbers.setdefault((node.target, repr(args), repr(kwargs)), f"%{len(numbers)}")
            is_operator = isinstance(node.target, torch._ops.OpOverload)
            if is_operator and (node.target.namespace in _CALLED or node.target._schema.is_mutable):
                calls.append(values[node])
    return [values.get(value) for value in gm.graph.output_node().args[0]], calls


@settings(max_examples=NUM_EXAMPLES // 10)
@given(trees(), st.sampled_from(WORLD_SIZES), st.floats(0.5, 1.2))
def test_a_random_budget_is_kept_or_refused(tree, world_size, part):
    torch._dynamo.reset()
    model, hardware = RandomModel(tree), HARDWARE["a100-40"]
    options = {"world_size": world_size, "hardware": hardware}
    budget = int(part * predict(rewrite(model, *model.inputs(2, 0), **options), hardware).memory.peak.total)
    torch._dynamo.reset()
    try:
        graphs = rewrite(model, *model.inputs(2, 0), memory_budget=budget, **options)
    except ConfigError as e:
        assert re.search(r"memory_budget of .* are missing", str(e))
    else:
        assert predict(graphs, hardware).memory.peak.total <= budget


@settings(max_examples=NUM_EXAMPLES // 10)
@given(trees(), st.sampled_from(WORLD_SIZES), st.sampled_from([HARDWARE["h100"], SLOW_LINK]))
def test_a_plan_for_the_hardware_at_hand_is_no_slower_and_holds_no_more(tree, world_size, hardware):
    model = RandomModel(tree)
    found = []
    for planned in (True, False):
        torch._dynamo.reset()
        options = (
            {"hardware": hardware, "collective_lowering": "auto"} if planned else {"collective_lowering": "grouped"}
        )
        with patch("fsdp_compile.rewriting.Goal", partial(Goal, is_within_plain=True)):
            graphs = rewrite(model, *model.inputs(2, 0), world_size=world_size, **options)
        found.append(predict(graphs, hardware))
    plan, plain = found
    assert plan.graphs.plan is None or 1.03 * plan.seconds < plain.seconds
    assert plan.seconds <= plain.seconds
    assert plan.memory.peak.total <= plain.memory.peak.total


@settings(max_examples=NUM_EXAMPLES // 20)
@given(tiny_units(), st.sampled_from(WORLD_SIZES), st.sampled_from([2, 10**7]), st.sampled_from([None, 100, 10**9]))
@example([((), torch.float64, True), ((1,), torch.float32, False)], (1, 2), 10**7, None)  # planning never ended
def test_units_of_a_few_bytes_are_planned(units, world_size, rows, budget):
    torch._dynamo.reset()
    options = {"auto_wrap_policy": {TinyUnit}, "hardware": HARDWARE["h100"], "memory_budget": budget}
    try:
        graphs = rewrite(Tiny(units), torch.empty(rows, device="meta"), world_size=world_size, **options)
    except ConfigError as e:
        assert budget is not None and re.search(r"memory_budget of .* are missing", str(e))
    else:
        assert budget is None or predict(graphs, HARDWARE["h100"]).memory.peak.total <= budget


def unsharded(model, inputs, seeds):
    """Outputs and gradients of each rank's rows, by eager; zeros for parameters that have none."""
    outputs, gradients = [], []
    buffers = [buffer.clone() for buffer in model.buffers()]
    for own, seed in zip(inputs, seeds, strict=True):
        torch.manual_seed(seed)
        model.zero_grad()
        load_buffers(model, buffers)
        found = model(*own)
        found = list(found) if isinstance(found, tuple) else [found]
        outputs.append([each.detach() for each in found])
        if found[0].requires_grad:
            torch.autograd.backward(found, [torch.ones_like(each) for each in found])
        grads = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}
        gradients.append({name: grad.clone() for name, grad in grads.items()})
    model.zero_grad()
    return outputs, gradients


def load_buffers(model, values):
    for buffer, value in zip(model.buffers(), values, strict=True):
        buffer.copy_(value)


def compare_gradients(model, simulation, found, reduced, index):
    shard_of_key = {id(shard.stand_in): shard for shard in simulation.shards}
    name_of_parameter = {id(parameter): name for name, parameter in model.named_parameters()}
    compared = set()
    for key, gradient in found:
        if id(key) in shard_of_key:
            shard = shard_of_key[id(key)]
            names, expected = [name for name, *_ in shard.slots], shard.of_rank(reduced, index)
        elif id(key) in name_of_parameter:
            names = [name_of_parameter[id(key)]]
            expected = reduced[names[0]]
        else:
            assert gradient is None
            continue
        compared |= set(names)
        actual = torch.zeros_like(expected) if gradient is None else gradient
        of_features = {"rtol": 1.3e-6, "atol": 1e-5}  # f32, also where the parameter is f64
        torch.testing.assert_close(actual, expected, **of_features, msg=lambda text, names=names: f"{names}: {text}")
    for name, gradient in reduced.items():
        assert name in compared or not gradient.any(), f"{name} has no gradient"
