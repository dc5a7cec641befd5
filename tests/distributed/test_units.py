"""Every kind of policy: the same training, and the units that it names."""

import functools

import pytest
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from fsdp_compile import rewrite
from tests.distributed.training import assert_trains_as, compiled
from tests.models import Block, build
from tests.ranks import on_ranks


def blocks_by_callable(module, recurse, nonwrapped_numel):
    return recurse or isinstance(module, Block)


POLICIES = {
    "auto": lambda model: "auto",
    "module_wrap": lambda model: ModuleWrapPolicy({Block}),
    "custom": lambda model: CustomPolicy(lambda module: isinstance(module, Block)),
    "size_based": lambda model: functools.partial(size_based_auto_wrap_policy, min_num_params=2000),
    "transformer": lambda model: functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "lambda": lambda model: functools.partial(
        lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, Block)
    ),
    "callable": lambda model: blocks_by_callable,
    "classes": lambda model: [Block],
    "modules": lambda model: list(model.blocks),
    "fqn_globs": lambda model: ["blocks.?"],
}
BY_BLOCK = [name for name in POLICIES if name not in ("auto", "size_based")]


@pytest.mark.parametrize("policy", ["auto", "size_based", "module_wrap"])
@on_ranks(2)
def test_every_kind_of_policy_trains_equal(world_size, policy):
    """One of those that name the blocks stands for all: their graphs are the same."""
    model = build("gpt")
    compiled(model, auto_wrap_policy=POLICIES[policy](model))
    assert_trains_as(model, build("gpt"))


def test_policies_that_name_the_blocks_give_the_same_graphs(fresh_compiler):
    def forward_text(policy):
        model = build("gpt")
        inputs = model.inputs(4, seed=0)
        return str(rewrite(model, *inputs, world_size=2, auto_wrap_policy=POLICIES[policy](model)).forward)

    text = forward_text("module_wrap")
    assert "fsdp.all_gather(blocks.0)" in text
    assert "fsdp.all_gather(blocks.1)" in text
    assert [policy for policy in BY_BLOCK if forward_text(policy) != text] == []
