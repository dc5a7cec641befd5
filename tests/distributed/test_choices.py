"""Prefetch depth, bucket lowering and resharding decide when and how bytes move, never what is computed.

Bitwise: the gradients of a choice are torch.equal to those of the defaults, after two steps have used them.
"""

import functools

import pytest
import torch

from fsdp_compile import fsdp_compile, rewrite
from tests.distributed.training import batch_of_rank, full_gradients, sgd, train
from tests.models import build
from tests.ranks import on_ranks

CHOICES = {
    "no_prefetch": {"forward_prefetch": 0, "backward_prefetch": 0},
    "prefetch_3": {"forward_prefetch": 3, "backward_prefetch": 3},
    "reshard_all": {"reshard_after_forward": True},
    "reshard_none": {"reshard_after_forward": False},
    "reshard_some": {"reshard_after_forward": {"blocks.0": False, "blocks.1": True}},
}
LOWERINGS = {
    "packed": {"collective_lowering": "packed"},
    "grouped": {"collective_lowering": "grouped"},
    "grouped_no_prefetch": {"collective_lowering": "grouped", "forward_prefetch": 0, "backward_prefetch": 0},
    "grouped_reshard_none": {"collective_lowering": "grouped", "reshard_after_forward": False},
}


def named(choices):
    return pytest.mark.parametrize("choice", list(choices.values()), ids=list(choices))


def gradients_of(backend, choice):
    model = fsdp_compile(build("gpt"), backend=backend, **choice)
    train(model, sgd(model.parameters()), range(2))
    model(*batch_of_rank(model, 2)).backward()
    return full_gradients(model)


@functools.cache  # in each worker: the same reference for every choice
def gradients_by_default(backend, world_size):
    return gradients_of(backend, {})


def assert_same_bits(backend, world_size, choice):
    gradients = gradients_of(backend, choice)
    expected = gradients_by_default(backend, world_size)
    assert list(gradients) == list(expected)
    different = [name for name in expected if not torch.equal(gradients[name], expected[name])]
    assert not different, f"not the same bits: {different}"


@named(CHOICES)
@on_ranks(4)
def test_schedule_changes_no_gradient(world_size, choice):
    assert_same_bits("aot_eager", world_size, choice)


# Two ranks: a sum of two does not depend on its order. With more, a backend may add the pieces of a message
# in another order than those of a shorter one, and the two lowerings send different messages.
@named(LOWERINGS)
@on_ranks(2)
def test_lowering_changes_no_gradient(world_size, choice):
    assert_same_bits("aot_eager", world_size, choice)


@named({name: (CHOICES | LOWERINGS)[name] for name in ("no_prefetch", "reshard_none", "grouped")})
@on_ranks(2)
def test_choices_change_no_gradient_under_inductor(world_size, choice):
    assert_same_bits("inductor", world_size, choice)


def test_each_choice_changes_the_schedule(fresh_compiler):
    def schedule(**choice):
        model = build("gpt")
        return rewrite(model, *model.inputs(4, seed=0), world_size=2, **choice).schedule()

    by_default, *depths = (
        schedule(**({} if depth is None else {"forward_prefetch": depth, "backward_prefetch": depth}))
        for depth in (None, 1, 0, 2)
    )
    resharding = [schedule(reshard_after_forward=value) for value in (True, False, {"blocks.0": False})]
    assert by_default == depths[0]
    assert len({*depths}) == 3
    assert len({by_default, *resharding}) == 4  # by default the last unit stays, and only that one
