"""Gradient accumulation: every micro-batch reduced, or all of them at once at the end, equal to the large batch."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, ShardingStrategy
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_compile import ConfigError, fsdp_compile
from fsdp_compile.module.sharding import sharding_of
from fsdp_compile.passes import ops
from tests.distributed.training import (
    ROWS,
    Collectives,
    adamw,
    assert_close,
    assert_same_gradients,
    assert_same_parameters,
    both_front_ends,
    compiled,
    full_gradients,
    hybrid_mesh,
)
from tests.models import build, made, seeded
from tests.ranks import on_ranks

NUM = 4  # micro-batches in a step
REDUCTIONS = "reduce", "all_reduce"


def micro_batch(model, step, index, rank=None):
    """One of the micro-batches that a rank sees in a step."""
    rank = dist.get_rank() if rank is None else rank
    rows = model.inputs(ROWS * dist.get_world_size() * NUM, seed=step)
    begin = (index * dist.get_world_size() + rank) * ROWS
    return tuple(tensor[begin : begin + ROWS] for tensor in rows)


def backward(model, step, index):
    (model(*micro_batch(model, step, index)) / NUM).backward()


def backward_unsharded(model, step, index):
    """The mean over the ranks of what `backward` gives each of them."""
    for rank in range(dist.get_world_size()):
        (model(*micro_batch(model, step, index, rank)) / NUM / dist.get_world_size()).backward()


def accumulate(model, step, *, syncs):
    """The gradients of one step; without `syncs` only the last micro-batch reduces."""
    for index in range(NUM):
        is_last = index == NUM - 1
        with contextlib.nullcontext() if syncs or is_last else model.no_sync():
            backward(model, step, index)


def reference(name, steps):
    model = build(name)
    optimizer = adamw(model.parameters())
    for step in range(steps):
        model(*model.inputs(ROWS * dist.get_world_size() * NUM, seed=step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def num_reductions(graphs):
    return sum(ops.is_reduction(node) for node in graphs.backward.graph.nodes)


@pytest.mark.parametrize(
    ("name", "syncs"),
    [("adapted", False), ("graph_break", False), ("odd_parameters", False), ("gpt", True)],
)
@both_front_ends
@on_ranks(2)
def test_four_micro_batches_equal_one_large_batch(world_size, front_end, name, syncs):
    expected = reference(name, 3)
    model = front_end(build(name))
    optimizer = adamw(model.parameters())
    for step in range(3):
        accumulate(model, step, syncs=syncs)
        optimizer.step()
        optimizer.zero_grad()
    assert_same_parameters(model, expected)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@on_ranks(2)
def test_no_sync_reduces_once_and_otherwise_every_micro_batch_does(world_size, backend):
    model = fsdp_compile(build("odd_mlp"), backend=backend, auto_wrap_policy={torch.nn.Linear})
    accumulate(model, 0, syncs=True)
    expected = full_gradients(model)
    model.zero_grad()
    accumulate(model, 0, syncs=False)
    for name, gradient in full_gradients(model).items():
        assert_close(gradient, expected[name])
    num_buckets = num_reductions(model.graphs[0])
    assert num_buckets == 3
    assert [num_reductions(graphs) for graphs in model.graphs] == [num_buckets, 0, num_buckets]

    with Collectives(*REDUCTIONS) as every:
        accumulate(model, 1, syncs=True)
    with Collectives(*REDUCTIONS) as last:
        accumulate(model, 1, syncs=False)
    assert (every.num, last.num) == (NUM * num_buckets, num_buckets)
    assert len(model.graphs) == 3  # nothing was compiled again


@on_ranks(2)
def test_gradients_that_were_kept_are_gone_when_they_are_reduced(world_size):
    model = compiled(build("odd_mlp"))
    with model.no_sync():
        backward(model, 0, 0)
    kept = [StorageWeakRef(shard.accumulation.leaf.grad.untyped_storage()) for shard in sharding_of(model).shards]
    assert not any(reference.expired() for reference in kept)
    backward(model, 0, 1)
    assert all(reference.expired() for reference in kept)


@pytest.mark.parametrize(
    "options",
    [
        {"sharding_strategy": ShardingStrategy.NO_SHARD},
        {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        {"collective_lowering": "grouped"},
        {"mesh": "of two dimensions"},
        {"reshard_after_forward": 2},
    ],
    ids=str,
)
@on_ranks(4)
def test_no_sync_under_every_strategy(world_size, options):
    if "mesh" in options:
        options = {"mesh": hybrid_mesh()}
    model, expected = compiled(build("odd_mlp"), **options), build("odd_mlp")
    accumulate(model, 0, syncs=False)
    for index in range(NUM):
        backward_unsharded(expected, 0, index)
    assert_same_gradients(model, expected)


@both_front_ends
@on_ranks(2)
def test_gradients_accumulate_in_the_dtype_of_the_masters(world_size, front_end):
    """In bf16 the small addends would be lost."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = front_end(build("odd_mlp"), mp_policy=policy)
    backward(model, 0, 0)
    once = full_gradients(model)
    model.zero_grad()
    with model.no_sync():
        for _ in range(99):
            backward(model, 0, 0)
    backward(model, 0, 0)
    for name, gradient in full_gradients(model).items():
        torch.testing.assert_close(gradient, 100 * once[name], rtol=1e-5, atol=1e-6)


@both_front_ends
@on_ranks(2)
def test_what_is_kept_does_not_show_and_zero_grad_drops_it(world_size, front_end):
    model, expected = front_end(build("unused")), build("unused")
    with model.no_sync():
        backward(model, 0, 0)
    assert all(parameter.grad is None for parameter in model.parameters())
    model.zero_grad()
    backward(model, 0, 1)
    backward_unsharded(expected, 0, 1)
    assert_same_gradients(model, expected)


class Switch(torch.nn.Module):
    """Uses one of two layers."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.head = torch.nn.Linear(5, 5), torch.nn.Linear(5, 5), torch.nn.Linear(5, 1)

    def forward(self, x, uses_left):
        return self.head(torch.tanh(self.left(x) if uses_left else self.right(x))).mean()


@both_front_ends
@on_ranks(2)
def test_what_the_last_micro_batch_does_not_use_is_reduced_all_the_same(world_size, front_end):
    expected, model = made(Switch), front_end(made(Switch))
    x = torch.randn(6, 5, generator=seeded(0))
    rows = x.chunk(2)[dist.get_rank()]
    with model.no_sync():
        model(rows, True).backward()
    model(rows, False).backward()
    (expected(x, True) + expected(x, False)).backward()
    assert_same_gradients(model, expected)
    assert model.left.weight.grad is not None


@both_front_ends
@on_ranks(2)
def test_evaluation_an_exception_and_two_losses_in_between(world_size, front_end):
    model, expected = front_end(build("odd_mlp")), build("odd_mlp")
    model.set_requires_gradient_sync(False)
    backward(model, 0, 0)
    with torch.no_grad():
        model(*micro_batch(model, 0, 1))
    with pytest.raises(ZeroDivisionError):
        loss = model(*micro_batch(model, 0, 1))
        loss.register_hook(lambda gradient: 1 / 0)
        loss.backward()
    model.set_requires_gradient_sync(True)
    losses = [model(*micro_batch(model, 0, index)) for index in (1, 2)]
    (sum(losses) / NUM).backward()
    for index in (0, 1, 2):
        backward_unsharded(expected, 0, index)
    assert_same_gradients(model, expected)
    backward(model, 0, 3)
    backward_unsharded(expected, 0, 3)
    assert_same_gradients(model, expected)


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = (torch.nn.Linear(5, 5) for _ in range(3))

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x))))).square().mean()


def freeze(model, *beginnings):
    for name, parameter in model.named_parameters():
        if name.startswith(beginnings):
            parameter.requires_grad_(False)


def freeze_and_thaw(model):
    freeze(model, "first", "middle")
    model.requires_grad_(True)


def drop_and_freeze(model):
    model.zero_grad()
    freeze(model, "middle")


IN_BETWEEN = {
    "a unit": lambda model: freeze(model, "middle"),
    "a part of a unit": lambda model: freeze(model, "middle.weight", "first.bias"),
    "all": lambda model: model.requires_grad_(False),
    "frozen and thawed": freeze_and_thaw,
    "dropped, then frozen": drop_and_freeze,
    "frozen and moved": lambda model: (freeze(model, "middle"), model.double()),
    "loaded": lambda model: model.load_state_dict(model.state_dict()),
    "copied": copy.deepcopy,
}


@pytest.mark.parametrize("is_one_unit", [False, True], ids=["units", "one unit"])
@both_front_ends
@on_ranks(2)
def test_what_is_kept_is_reduced_whatever_happens_to_the_model_in_between(world_size, front_end, is_one_unit):
    policy = (lambda recurse, **_: recurse) if is_one_unit else {torch.nn.Linear}
    for name, change in IN_BETWEEN.items():
        expected = made(Layers)
        model = front_end(copy.deepcopy(expected), auto_wrap_policy=policy)
        for index in range(2):
            dtype = model.first.weight.dtype
            rows = torch.randn(world_size, 3, 5, generator=seeded(index)).to(dtype)
            rows.requires_grad_()  # a backward runs through a model that is frozen as a whole
            with model.no_sync() if index == 0 else contextlib.nullcontext():
                model(rows[dist.get_rank()]).backward()
            torch.stack([expected(each) for each in rows]).mean().backward()
            if index == 0:
                change(model)
                change(expected)
        print(name)  # in the log of a failure
        assert_same_gradients(model, expected)


def test_a_single_process_has_nothing_to_keep():
    model, expected = compiled(build("odd_mlp")), build("odd_mlp")
    with model.no_sync():
        model(*model.inputs(4, seed=0)).backward()
    expected(*expected.inputs(4, seed=0)).backward()
    assert_same_gradients(model, expected)
    with pytest.raises(ConfigError, match="requires_gradient_sync is a bool"):
        model.set_requires_gradient_sync("no")
