"""Everything a training loop does with a sharded model equals the unsharded model, compiled or not."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile import ConfigError, fsdp_compile, shard
from tests.distributed.training import (
    adamw,
    assert_close,
    assert_same_gradients,
    assert_same_parameters,
    assert_same_tensors,
    assert_trains_as,
    backward_of_both,
    batch_of_rank,
    both_front_ends,
    compiled,
    full,
    full_gradients,
    global_batch,
    mean_over_ranks,
    train,
)
from tests.models import MODELS, build, seeded
from tests.ranks import on_ranks


@pytest.mark.parametrize("name", [name for name in MODELS if name != "conv_net"])
@on_ranks(2, 3)
def test_a_sharded_model_trains_without_compilation(world_size, name):
    model = shard(build(name))
    assert_trains_as(model, build(name))


@on_ranks(2)
def test_torch_compile_with_the_backend_gives_the_same_graphs(world_size):
    model = fsdp_compile(build("gpt"))
    model(*batch_of_rank(model, 0)).backward()

    sharded = shard(build("gpt"))
    torch.compile(sharded, backend="fsdp")(*batch_of_rank(sharded, 0)).backward()

    (graphs,), (sharded_graphs,) = model.graphs, sharded.graphs
    assert str(sharded_graphs.forward) == str(graphs.forward)
    assert str(sharded_graphs.backward) == str(graphs.backward)
    assert sharded_graphs.schedule() == graphs.schedule()
    assert_same_tensors(full_gradients(sharded), full_gradients(model))


@on_ranks(2)
def test_a_compiled_model_that_is_compiled_again_stays_as_it_is(world_size):
    model, expected = compiled(build("gpt")), compiled(build("gpt"))
    model.compile()
    expected(*batch_of_rank(expected, 0)).backward()
    for again in (torch.compile(model), model):
        again(*batch_of_rank(model, 0)).backward()
        assert_same_tensors(full_gradients(model), full_gradients(expected))
        model.zero_grad()
    assert len(model.graphs) == 1
    with pytest.raises(ConfigError, match="is compiled already: give fsdp_compile the options"):
        model.compile(dynamic=True)
    sharded = shard(build("gpt"))
    sharded.compile(backend="fsdp")
    sharded(*batch_of_rank(sharded, 0)).backward()
    assert len(sharded.graphs) == 1


@on_ranks(2)
def test_two_models_of_one_class_compiled_by_the_same_backend_train_each_its_own(world_size):
    expected, model = build("gpt"), shard(build("gpt"))
    other = shard(build("gpt", seed=1))
    for found in (model, other):
        torch.compile(found, backend="fsdp")(*batch_of_rank(found, 0)).backward()
    expected(*global_batch(expected, 0)).backward()
    assert_same_gradients(model, expected)
    expected = build("gpt", seed=1)
    expected(*global_batch(expected, 0)).backward()
    assert_same_gradients(other, expected)


def evaluate(model, batch):
    """The losses of calls without gradients, as they come between training steps."""
    model.eval()
    with torch.no_grad():
        losses = [model(*batch)]
    with torch.inference_mode():
        losses.append(model(*batch).clone())
    model.train()
    with torch.no_grad():
        losses.append(model(*batch))
    return torch.stack([loss.detach() for loss in losses]).clone()


@on_ranks(2)
def test_calls_without_gradients_between_steps(world_size):
    """Of generated code; test_programs.py has modes in any order of the other front ends."""
    expected = build("called_twice")
    expected_optimizer = adamw(expected.parameters())
    model = fsdp_compile(build("called_twice"))
    optimizer = adamw(model.parameters())

    for step in range(3):
        held_out = batch_of_rank(expected, 100 + step)
        assert_close(evaluate(model, held_out), evaluate(expected, held_out))
        train(expected, expected_optimizer, [step], batch=global_batch)
        train(model, optimizer, [step])
    assert_same_parameters(model, expected)


@on_ranks(2)
def test_two_forwards_before_two_backwards(world_size):
    expected = build("gpt")
    model = compiled(build("gpt"))
    (expected(*global_batch(expected, 0)) * expected(*global_batch(expected, 1))).backward()
    first, second = (model(*batch_of_rank(model, step)) for step in (0, 1))
    # d(ab) = b da + a db, with the means over ranks as a and b: what the unsharded model differentiates
    (first * mean_over_ranks(second.detach()) + mean_over_ranks(first.detach()) * second).backward()
    assert_same_gradients(model, expected)


@pytest.mark.parametrize("set_to_none", [True, False])
@both_front_ends
@on_ranks(2)
def test_zero_grad_in_both_modes(world_size, front_end, set_to_none):
    expected = build("odd_mlp")
    model = front_end(build("odd_mlp"))
    model(*batch_of_rank(model, 0)).backward()
    model.zero_grad(set_to_none=set_to_none)
    for parameter in model.parameters():
        assert parameter.grad is None if set_to_none else not full(parameter.grad).any()

    backward_of_both(model, expected, 1)
    assert_same_gradients(model, expected)


@both_front_ends
@on_ranks(2)
def test_gradients_are_dtensors_laid_out_as_their_parameters(world_size, front_end):
    model = front_end(build("odd_parameters"))
    model(*batch_of_rank(model, 0)).backward()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor), name
        assert parameter.grad.placements == parameter.placements, name
        assert parameter.grad.shape == parameter.shape, name
        assert parameter.grad.to_local().shape == parameter.to_local().shape, name


class SometimesUsed(nn.Module):
    """Which of two layers takes part depends on an argument."""

    def __init__(self):
        super().__init__()
        self.left = nn.Linear(5, 3)
        self.right = nn.Linear(5, 3)

    def forward(self, x, use_left):
        return (self.left(x) if use_left else self.right(x)).square().mean()


@both_front_ends
@on_ranks(2)
def test_a_parameter_gets_a_gradient_in_the_steps_that_use_it(world_size, front_end):
    expected = SometimesUsed()
    model = front_end(copy.deepcopy(expected))
    for step, use_left in enumerate([True, False, True]):
        x = torch.randn(8, 5, generator=seeded(step))
        expected.zero_grad()
        model.zero_grad()
        expected(x, use_left).backward()
        model(x.chunk(2)[dist.get_rank()], use_left).backward()
        assert_same_gradients(model, expected)


@pytest.mark.parametrize("are_from_before", [False, True])
@both_front_ends
@on_ranks(2)
def test_hooks_of_the_user_run_on_the_parameters(world_size, front_end, are_from_before):
    """Gradient hooks change what is stored; hooks after it may step: an optimizer in the backward."""
    expected, model = build("odd_mlp"), build("odd_mlp")
    if not are_from_before:
        front_end(model)
    for network in (expected, model):
        for parameter in network.parameters():
            parameter.register_hook(lambda gradient: gradient * 2)
            parameter.register_post_accumulate_grad_hook(step_and_clear)
    if are_from_before:
        front_end(model)
    for step in range(3):
        backward_of_both(model, expected, step)
    assert_same_parameters(model, expected)
    assert all(parameter.grad is None for parameter in model.parameters())


@both_front_ends
@on_ranks(2)
def test_a_gradient_that_was_kept_is_not_written_again(world_size, front_end):
    model = front_end(build("odd_mlp"))
    model(*batch_of_rank(model, 0)).backward()
    kept = next(model.parameters()).grad
    values = kept.to_local().clone()
    model.zero_grad()
    model(*batch_of_rank(model, 1)).backward()
    assert torch.equal(kept.to_local(), values)


def step_and_clear(parameter):
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=0.05)
    parameter.grad = None


@both_front_ends
@on_ranks(2)
def test_gradients_reach_the_inputs(world_size, front_end):
    expected, model = build("odd_mlp"), front_end(build("odd_mlp"))
    x, target = global_batch(expected, 0)
    x.requires_grad_()
    expected(x, target).backward()

    part, part_of_target = (tensor.detach() for tensor in batch_of_rank(model, 0))
    part.requires_grad_()
    model(part, part_of_target).backward()
    assert_close(part.grad / world_size, x.grad.chunk(world_size)[dist.get_rank()])


@on_ranks(2)
def test_dynamic_says_whether_sizes_are_symbols(world_size):
    def num_graphs(dynamic):
        model = compiled(build("odd_mlp"), dynamic=dynamic)
        for num_rows in (2, 3, 5):
            model(*model.inputs(num_rows, seed=0)).backward()
        return len(model.graphs)

    assert [num_graphs(dynamic) for dynamic in (True, None, False)] == [1, 2, 3]


@on_ranks(2)
def test_options_reach_inductor(world_size):
    seen = []
    model = fsdp_compile(build("odd_mlp"), options={"post_grad_custom_post_pass": CountGraphs(seen)})
    model(*batch_of_rank(model, 0)).backward()
    assert len(seen) == 2  # forward and backward


class CountGraphs(torch._inductor.custom_graph_pass.CustomGraphPass):
    def __init__(self, seen):
        self.seen = seen

    def __call__(self, graph):
        self.seen.append(graph)

    def uuid(self):
        return None  # what it is applied to is not taken from Inductor's cache


@on_ranks(2)
def test_fullgraph_compiles_one_graph_and_refuses_a_break(world_size):
    model = compiled(build("gpt"), fullgraph=True)
    model(*batch_of_rank(model, 0)).backward()
    assert len(model.graphs) == 1

    broken = compiled(build("graph_break"), fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        broken(*batch_of_rank(broken, 0))
