"""Optimizers that step in the backward: the numbers are those of a step after it, to the last bit."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only

from fsdp_compile import CommunicationDtype, ConfigError, fsdp_compile, shard
from fsdp_compile.compiler.options import CompileConfig
from fsdp_compile.module.sharding import sharding_of
from fsdp_compile.passes import ops
from fsdp_compile.passes.update_in_backward import UpdateInBackward
from tests.distributed.test_tensor_parallel import Net, by_sequence, by_tensor, root_mesh
from tests.distributed.test_tensor_parallel import batch as batch_of_tensor_parallelism
from tests.distributed.training import (
    assert_same_parameters,
    batch_of_rank,
    compiled,
    global_batch,
    hybrid_mesh,
    mean_over_ranks,
    saved_and_loaded,
    take_step,
)
from tests.models import DEVICE, MODELS, build
from tests.ranks import on_ranks

STEPS = 20


def groups_of(model):
    """Matrices decay, the rest does not, and learns at a rate of its own."""
    parameters = list(model.parameters())
    return [
        {"params": [each for each in parameters if each.dim() > 1], "weight_decay": 0.1},
        {"params": [each for each in parameters if each.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


OPTIMIZERS = {
    "AdamW fused": lambda model: torch.optim.AdamW(groups_of(model), lr=1e-3, fused=True),
    "AdamW foreach": lambda model: torch.optim.AdamW(groups_of(model), lr=1e-3, foreach=True, amsgrad=True),
    "Adam loop": lambda model: torch.optim.Adam(groups_of(model), lr=1e-3, foreach=False),
    "SGD momentum": lambda model: torch.optim.SGD(groups_of(model), lr=1e-2, momentum=0.9, nesterov=True),
    "RMSprop": lambda model: torch.optim.RMSprop(groups_of(model), lr=1e-3, centered=True),
}


def first_rows_alone(model, step):
    """Where there is no process group."""
    return model.inputs(4, seed=step)


def trained(
    model,
    make_optimizer,
    *,
    in_backward,
    steps=STEPS,
    max_norm=None,
    scaler=None,
    micro_batches=1,
    batch=batch_of_rank,
):
    """Losses and norms of every step, by scripts with and without a step in the backward; and the optimizer."""
    optimizer = make_optimizer(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    handle = None
    if in_backward:
        handle = model.optimizer_in_backward(optimizer, max_norm=max_norm, scaler=scaler)
    losses, norms = [], []
    for step in range(steps):
        for micro in range(micro_batches):
            is_last = micro == micro_batches - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = model(*batch(model, step * micro_batches + micro))
            (loss if scaler is None else scaler.scale(loss)).backward()
            losses.append(loss.detach().clone())
        if handle is None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            if max_norm is not None:
                norms.append(model.clip_grad_norm_(max_norm))
            optimizer.step() if scaler is None else scaler.step(optimizer)
        elif max_norm is not None:
            norms.append(handle.norm)
        if scaler is not None:
            scaler.update()
        if handle is not None:
            assert all(parameter.grad is None for parameter in model.parameters())
        optimizer.zero_grad()
        schedule.step()
    return losses, norms, optimizer


def assert_same_training(model, make_optimizer, **options):
    """To the last bit, with and without a step in the backward: losses, norms, parameters and states."""
    other = copy.deepcopy(model)
    scaler = options.pop("scaler", None)
    found = trained(model, make_optimizer, in_backward=True, scaler=copy.deepcopy(scaler), **options)
    expected = trained(other, make_optimizer, in_backward=False, scaler=scaler, **options)
    assert_identical(found[0], expected[0])
    assert_identical(found[1], expected[1])
    assert_identical(model.state_dict(), other.state_dict())
    assert_identical(found[2].state_dict()["state"], expected[2].state_dict()["state"])
    return found


def assert_identical(found, expected):
    found, expected = (tree_map_only(DTensor, DTensor.to_local, tree) for tree in (found, expected))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def updates_of(model):
    """The units that the last compiled backward updates, in order."""
    graph = model.graphs[-1].backward.graph
    return [ops.unit_of_bucket(ops.argument(node, "bucket")) for node in graph.nodes if ops.is_call(node, ops.UPDATE)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@on_ranks(2)
def test_a_step_in_the_backward_is_the_step_after_it(world_size, optimizer):
    assert_same_training(compiled(build("odd_mlp")), OPTIMIZERS[optimizer])


@pytest.mark.parametrize("num_calls", [1, 2])
@on_ranks(2)
def test_each_unit_is_updated_by_itself_in_the_last_backward_that_reads_it(world_size, num_calls):
    """Of two calls, the backward of the first would read what an update in that of the second has changed."""
    steps = []
    noting = register_optimizer_step_pre_hook(
        lambda optimizer, args, kwargs: steps.append([len(group["params"]) for group in optimizer.param_groups])
    )
    model, expected = compiled(build("odd_mlp")), build("odd_mlp")
    model.optimizer_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(3):
        steps.clear()
        sum(model(*batch_of_rank(model, step + call)) for call in range(num_calls)).backward()
        units = updates_of(model)
        assert len(units) == len(set(units)) > 2
        everything = [len(list(model.parameters()))]
        assert steps[-1] == everything
        assert [sum(step) for step in zip(*steps[:-1], strict=True)] == everything
        assert len(steps) == len(units) + 1
        sum(expected(*global_batch(expected, step + call)) for call in range(num_calls)).backward()
        take_step([optimizer])
    noting.remove()
    assert_same_parameters(model, expected)


@on_ranks(2)
def test_it_trains_as_the_unsharded_model(world_size):
    """A hook that keeps a gradient has it, though Inductor's code takes its memory for others."""
    model, expected = fsdp_compile(build("gpt")), build("gpt")
    kept = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda each, name=name: kept.update({name: each.grad}))
    losses, _, _ = trained(model, OPTIMIZERS["AdamW fused"], in_backward=True)
    optimizer = OPTIMIZERS["AdamW fused"](expected)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for step, found in enumerate(losses):
        loss = expected(*global_batch(expected, step))
        torch.testing.assert_close(mean_over_ranks(found), loss.detach(), rtol=1e-3, atol=1e-4)
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in expected.named_parameters()}
        take_step([optimizer])
        schedule.step()
    for name, gradient in gradients.items():
        torch.testing.assert_close(kept[name].full_tensor(), gradient, rtol=5e-2, atol=1e-3)
    for name, parameter in expected.named_parameters():
        found = model.get_parameter(name).full_tensor()
        torch.testing.assert_close(found, parameter, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "front_end"),
    [*((name, compiled) for name in sorted(MODELS.keys() - {"gpt"})), ("odd_mlp", shard), ("called_twice", shard)],
    ids=lambda value: value if isinstance(value, str) else "compiled" if value is compiled else "eager",
)
@on_ranks(2)
def test_every_model(world_size, name, front_end):
    model = front_end(build(name))
    assert_same_training(model, OPTIMIZERS["SGD momentum"], steps=3)


@pytest.mark.parametrize(
    "options",
    [
        {"sharding_strategy": ShardingStrategy.NO_SHARD},
        {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        {"reshard_after_forward": 2, "collective_lowering": "grouped"},
        {"mesh": hybrid_mesh},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        {"backward_prefetch": 0, "gradient_reduction": "sum"},
        {"communication_dtype": CommunicationDtype(reduce=torch.bfloat16)},
        {"communication_dtype": CommunicationDtype(reduce="int4", all_reduce="int8"), "mesh": hybrid_mesh},
    ],
    ids=lambda options: ",".join(options),
)
@on_ranks(4)
def test_every_schedule(world_size, options):
    options = {name: value() if name == "mesh" else value for name, value in options.items()}
    model = compiled(build("odd_mlp"), **options)
    assert_same_training(model, OPTIMIZERS["AdamW foreach"], steps=4)
    assert updates_of(model)


@pytest.mark.parametrize("name", ["odd_mlp", "graph_break"])
@on_ranks(2)
def test_clipping_scaling_and_accumulation_are_exact(world_size, name):
    for options in (
        {"max_norm": 0.05},
        {"scaler": torch.amp.GradScaler(DEVICE.type, init_scale=256.0, growth_interval=3)},
        {"max_norm": 0.05, "scaler": torch.amp.GradScaler(DEVICE.type, init_scale=256.0), "micro_batches": 2},
        {"micro_batches": 3},
    ):
        model = compiled(build(name))
        _, norms, _ = assert_same_training(model, OPTIMIZERS["AdamW fused"], **options)
        assert len(norms) == (STEPS if "max_norm" in options else 0)
        assert all(norm > 0.05 for norm in norms[:3])


@on_ranks(2)
def test_a_scaler_skips_the_step_on_all_ranks_if_one_overflows(world_size):
    model = compiled(build("odd_mlp"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=256.0)
    model.optimizer_in_backward(optimizer, scaler=scaler)
    before = copy.deepcopy(model.state_dict())
    loss = model(*batch_of_rank(model, 0)) * (float("inf") if dist.get_rank() == 1 else 1.0)
    scaler.scale(loss).backward()
    scaler.update()
    assert scaler.get_scale() == 128.0
    assert_identical(model.state_dict(), before)


@on_ranks(2)
def test_a_forward_without_a_backward_does_no_harm(world_size):
    model, expected = compiled(build("odd_mlp")), build("odd_mlp")
    optimizer, expected_optimizer = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, expected))
    model.optimizer_in_backward(optimizer)
    for step in range(3):
        model(*batch_of_rank(model, step + 10))
        model(*batch_of_rank(model, step)).backward()
        expected(*global_batch(expected, step)).backward()
        take_step([expected_optimizer])
    assert_same_parameters(model, expected)


@on_ranks(2)
def test_frozen_parameters_and_those_of_no_optimizer(world_size):
    """What the optimizer does not have keeps its gradient."""
    model, expected = compiled(build("gpt")), build("gpt")
    names = [name for name, _ in expected.named_parameters()]
    frozen, left = names[1], names[3]
    for each in (model, expected):
        each.get_parameter(frozen).requires_grad_(False)
    model.optimizer_in_backward(
        torch.optim.AdamW([value for name, value in model.named_parameters() if name not in (frozen, left)], lr=1e-3)
    )
    optimizer = torch.optim.AdamW([value for name, value in expected.named_parameters() if name != left], lr=1e-3)
    for step in range(3):
        model(*batch_of_rank(model, step)).backward()
        expected(*global_batch(expected, step)).backward()
        optimizer.step()
        for name, parameter in expected.named_parameters():
            parameter.grad = parameter.grad if name == left else None
        found = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
        assert list(found) == [left]
        torch.testing.assert_close(found[left].full_tensor(), expected.get_parameter(left).grad, rtol=1e-4, atol=1e-5)
    assert_same_parameters(model, expected)


@on_ranks(2)
def test_several_optimizers_and_muon(world_size):
    def optimizers_of(model):
        matrices = [each for name, each in model.named_parameters() if each.dim() == 2 and "blocks" in name]
        others = [each for each in model.parameters() if not any(each is matrix for matrix in matrices)]
        return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-3)]

    model = compiled(build("gpt"))
    other = copy.deepcopy(model)
    model.optimizer_in_backward(optimizers_of(model))
    optimizers = optimizers_of(other)
    assert optimizers[0].param_groups[0]["params"]
    for step in range(3):
        loss = model(*batch_of_rank(model, step))
        loss.backward()
        expected = other(*batch_of_rank(other, step))
        expected.backward()
        take_step(optimizers)
        assert_identical(loss, expected)
    assert_identical(model.state_dict(), other.state_dict())


@on_ranks(2)
def test_copies_and_files_have_no_optimizer_and_remove_ends_it(world_size):
    model = compiled(build("odd_mlp"))
    handle = model.optimizer_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    model(*batch_of_rank(model, 0)).backward()
    for each in (copy.deepcopy(model), saved_and_loaded(model)):
        each(*batch_of_rank(each, 0)).backward()
        assert all(parameter.grad is not None for parameter in each.parameters())
        assert not updates_of(each)
    handle.remove()
    model(*batch_of_rank(model, 0)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()
    model.optimizer_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    handle.remove()  # a second time: it has attached nothing since
    model(*batch_of_rank(model, 0)).backward()
    assert all(parameter.grad is None for parameter in model.parameters())


@on_ranks(2)
def test_what_cannot_step_in_a_backward_is_refused(world_size):
    model = compiled(build("odd_mlp"), ignored_params=None)
    parameters = list(model.parameters())

    class Own(torch.optim.SGD):
        pass

    hooked = torch.optim.SGD(parameters, lr=0.1)
    hooked.register_step_post_hook(test_what_cannot_step_in_a_backward_is_refused)
    sgd = torch.optim.SGD(parameters, lr=0.1)
    for optimizer, options, words in (
        (Own(parameters, lr=0.1), {}, "Own cannot step in the backward"),
        (torch.optim.LBFGS(parameters), {}, "LBFGS cannot step in the backward"),
        ("adam", {}, "optimizer is an iterable of optimizers, not 'adam'"),
        ([3], {}, "one of torch.optim, or several, not int"),
        (torch.optim.SGD(parameters, lr=0.1, differentiable=True), {}, "SGD is differentiable"),
        (hooked, {}, "hooks of its step"),
        (torch.optim.SGD([*parameters, nn.Parameter(torch.ones(3))], lr=0.1), {}, r"shape \(3,\) is not one of"),
        ([sgd, torch.optim.SGD(parameters[:1], lr=0.1)], {}, "is in two of the optimizers"),
        (sgd, {"max_norm": 0}, "max_norm is a positive number, not 0"),
        (sgd, {"scaler": 3}, "scaler is a torch.amp.GradScaler, not 3"),
    ):
        with pytest.raises(ConfigError, match=words):
            model.optimizer_in_backward(optimizer, **options)
    model(*batch_of_rank(model, 0)).backward()
    assert all(parameter.grad is not None for parameter in parameters)
    model.optimizer_in_backward(sgd)
    with pytest.raises(ConfigError, match="steps in the backward of this model already"):
        model.optimizer_in_backward(sgd)
    guarded = compiled(build("odd_mlp"), check_gradients=True)
    with pytest.raises(ConfigError, match="check_gradients"):
        guarded.optimizer_in_backward(torch.optim.SGD(guarded.parameters(), lr=0.1))


def test_a_single_rank_steps_at_the_end_of_its_backward():
    batch = first_rows_alone
    for options in ({}, {"max_norm": 0.05}, {"micro_batches": 2}):
        assert_same_training(compiled(build("gpt")), OPTIMIZERS["AdamW fused"], steps=4, batch=batch, **options)


@pytest.mark.parametrize("parallelize", [by_tensor, by_sequence])
@on_ranks(4)
def test_parameters_of_tensor_parallelism(world_size, parallelize):
    mesh = root_mesh()
    model, other = (compiled(parallelize(Net(), mesh["tp"]), mesh["dp"]) for _ in range(2))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, other)]
    model.optimizer_in_backward(optimizers[0])
    for step in range(4):
        for each in (model, other):
            each(batch_of_tensor_parallelism(step)).square().mean().backward()
        take_step(optimizers[1:])
        assert_identical(model.state_dict(), other.state_dict())


@pytest.mark.usefixtures("two_ranks")
def test_with_cuda_graphs_no_step_is_a_part_of_the_backward():
    model = shard(build("odd_mlp"))
    model.optimizer_in_backward(torch.optim.AdamW(model.parameters()))
    sharding, graphs = sharding_of(model), CompileConfig(options={"triton.cudagraphs": True})
    pipelines = [sharding.pipeline(config)(None) for config in (CompileConfig(), graphs)]
    assert [any(isinstance(found, UpdateInBackward) for found in each.backward) for each in pipelines] == [True, False]
