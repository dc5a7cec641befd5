"""FSDP2's class and methods: what they do to the module that they are called on, and to those below it."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle
from torch.distributed.tensor import DTensor

from fsdp_compile import ConfigError, compat, fsdp_compile, shard
from fsdp_compile.passes import ops
from tests.distributed.training import (
    assert_same_gradients,
    assert_trains_as,
    backward_of_both,
    batch_of_rank,
    gathered_units,
    hybrid_mesh,
)
from tests.models import build
from tests.ranks import on_ranks

fully_shard = functools.partial(compat.fully_shard, backend="aot_eager")
REFUSED = {
    "set_custom_all_gather": (None,),
    "set_custom_reduce_scatter": (None,),
    "set_all_reduce_hook": (print,),
    "set_separate_reduce_scatter_group": (True,),
    "set_allocate_memory_from_process_group_for_comm": (True,),
    "set_symm_mem_for_comm": (),
    "set_reduce_scatter_max_input_buffers": (2,),
    "set_reduce_scatter_unused_params": (True,),
}
BOOLS = {
    "set_is_last_backward": "is_last_backward",
    "set_requires_gradient_sync": "requires_gradient_sync",
    "set_requires_all_reduce": "requires_all_reduce",
    "set_reshard_after_forward": "reshard_after_forward",
    "set_reshard_after_backward": "reshard_after_backward",
    "set_unshard_in_backward": "unshard_in_backward",
    "set_force_sum_reduction_for_comms": "enable",
    "_set_unshard_async_op": "async_op",
}


def sharded(**options):
    """A GPT of which every block is a module of FSDP2's, and the unsharded one."""
    model, expected = build("gpt"), build("gpt")
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options), expected


def step_of(model):
    model(*batch_of_rank(model, 0)).backward()


def is_sharded(module):
    return all(isinstance(parameter, DTensor) for parameter in module.parameters())


@on_ranks(1, 2)
def test_every_module_that_was_sharded_by_a_call_is_one_of_torchs(world_size):
    model, _ = sharded()
    found = {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    assert found == {"", *(f"blocks.{index}" for index in range(len(model.blocks)))}
    for made in (fsdp_compile(build("gpt")), shard(build("gpt")), copy.deepcopy(model)):
        assert isinstance(made, FSDPModule)
    assert isinstance(copy.deepcopy(model).blocks[0], FSDPModule)


@on_ranks(1, 2)
def test_a_slice_of_a_sharded_container_is_a_plain_one(world_size):
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    fully_shard(layers)
    part = layers[:2]
    assert type(part) is nn.Sequential and part[0] is layers[0]


@on_ranks(2)
def test_unshard_is_of_the_modules_own_parameters_and_ends_with_the_next_call(world_size):
    model, expected = sharded()
    first, second, *_ = model.blocks
    assert first.unshard() is None
    full = dict(first.named_parameters())
    for name, parameter in expected.blocks[0].named_parameters():
        assert type(full[name]) is nn.Parameter and torch.equal(full[name], parameter)
    assert is_sharded(second)
    assert all(isinstance(model.state_dict()[f"blocks.0.{name}"], DTensor) for name in full)
    assert is_sharded(first)  # state_dict() has resharded it

    handle = second.unshard(async_op=True)
    assert isinstance(handle, UnshardHandle) and is_sharded(second)
    handle.wait()
    handle.wait()
    assert not is_sharded(second)
    second.unshard()  # again: there is nothing left to do
    second.reshard()
    assert is_sharded(second)

    model.unshard()  # the root's own: what is in no block
    assert is_sharded(model.blocks) and not is_sharded(model)
    first.unshard(async_op=True)  # never waited for
    backward_of_both(model, expected)
    assert is_sharded(model)
    assert_same_gradients(model, expected)


@on_ranks(2)
def test_what_is_lost_between_unshard_and_reshard_is_said(world_size):
    model, _ = sharded()
    first = model.blocks[0]
    first.unshard()
    name, parameter = next(iter(first.named_parameters()))
    with torch.no_grad():
        parameter.zero_()
    with pytest.warns(UserWarning, match=f"written to {name.rpartition('.')[2]}"):
        first.reshard()
    assert next(first.parameters()).full_tensor().abs().sum() > 0

    first.unshard()
    next(first.parameters()).sum().backward()
    with pytest.raises(RuntimeError, match="got gradients between unshard and reshard"):
        first.reshard()
    assert is_sharded(first)
    with model.summon_full_params(), pytest.raises(RuntimeError, match="inside summon_full_params"):
        first.unshard()


@on_ranks(2)
def test_gradients_are_kept_of_the_modules_that_are_named(world_size):
    model, expected = sharded()
    first = model.blocks[0]
    first.set_requires_gradient_sync(False, recurse=False)
    backward_of_both(model, expected)
    kept = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert kept == {name for name, _ in model.named_parameters() if name.startswith("blocks.0.")}
    model.set_requires_gradient_sync(True)
    backward_of_both(model, expected)
    assert_same_gradients(model, expected)


@on_ranks(4)
def test_gradients_wait_for_the_replicas(world_size):
    model, expected = sharded(mesh=hybrid_mesh())
    model.set_requires_all_reduce(False)
    backward_of_both(model, expected)
    assert {parameter.grad for parameter in model.parameters()} == {None}
    model.set_requires_all_reduce(True)
    backward_of_both(model, expected)
    assert_same_gradients(model, expected)


@on_ranks(2)
def test_without_replicas_requires_all_reduce_says_nothing(world_size):
    model, expected = sharded()
    model.set_requires_all_reduce(False)
    backward_of_both(model, expected)
    assert_same_gradients(model, expected)


@on_ranks(2)
def test_reshard_after_forward_is_of_the_next_graphs_and_old_ones_are_found_again(world_size):
    model, expected = sharded()

    def gathered_by_backward():
        return set(gathered_units(model.graphs[-1].backward))

    backward_of_both(model, expected)
    assert "blocks.0" in gathered_by_backward()
    model.set_reshard_after_forward(False)
    backward_of_both(model, expected, 1)
    assert gathered_by_backward() == set() and len(model.graphs) == 2
    model.blocks[0].set_reshard_after_forward(True)
    backward_of_both(model, expected, 2)
    assert gathered_by_backward() == {"blocks.0"} and len(model.graphs) == 3
    model.blocks[0].set_reshard_after_forward(False)
    backward_of_both(model, expected, 3)
    assert len(model.graphs) == 3
    assert_same_gradients(model, expected)


@on_ranks(2)
def test_modules_are_gathered_where_another_is_used_first(world_size):
    """As FSDP2's scripts say it: each layer names the two that come after it."""

    def sharded_layers():
        layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
        for layer in layers:
            fully_shard(layer, reshard_after_forward=True)
        return fully_shard(layers)

    def started_before_waits(side):
        """For every wait how many gathers have started."""
        nodes = list(side.graph.nodes)
        counts = [sum(map(ops.is_all_gather, nodes[:index])) for index, node in enumerate(nodes)]
        return [count for count, node in zip(counts, nodes, strict=True) if ops.is_call(node, ops.WAIT)][: counts[-1]]

    torch.manual_seed(0)
    layers = sharded_layers()
    torch.manual_seed(0)
    expected = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    x = torch.ones(2, 8)
    layers(x).sum().backward()
    assert started_before_waits(layers.graphs[-1].forward) == [2, 3, 4, 5, 5]
    for index in range(3):
        layers[index].set_modules_to_forward_prefetch(list(layers)[index + 1 : index + 3])
        layers[4 - index].set_modules_to_backward_prefetch(list(layers)[3 - index : 1 - index or None : -1])
    layers(x).sum().backward()
    assert started_before_waits(layers.graphs[-1].forward) == [3, 4, 5, 5, 5]
    gathers = gathered_units(layers.graphs[-1].backward)
    assert started_before_waits(layers.graphs[-1].backward)[0] == 3 and len(gathers) == 4
    for index in range(3):
        layers[index].set_modules_to_forward_prefetch([])
        layers[4 - index].set_modules_to_backward_prefetch([])
    layers(x).sum().backward()
    assert len(layers.graphs) == 3  # the lists are empty, not absent: a third key
    for _ in range(3):
        expected(x).sum().backward()
    assert_same_gradients(layers, expected)


@on_ranks(2)
def test_divisors_are_of_the_modules_own_parameters(world_size):
    model, expected = sharded()
    model.blocks[0].set_gradient_divide_factor(world_size * 4.0)
    model.set_force_sum_reduction_for_comms(True)  # sums, divided by the ranks: means
    backward_of_both(model, expected)
    for name, parameter in model.named_parameters():
        factor = 0.25 if name.startswith("blocks.0.") else 1.0
        gradient = expected.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad.full_tensor(), gradient * factor)
    operators = {shard.layout.bucket: shard.layout.reduction.operator for shard in model._fsdp_sharding.shards}
    assert operators == {"blocks.0": "sum", "blocks.1": "avg", "root": "sum"}
    model.set_force_sum_reduction_for_comms(False)
    assert model._fsdp_sharding.shards[-1].layout.reduction.operator in ("avg", "sum")


@on_ranks(2)
def test_what_pipelines_call_leads_to_the_same_numbers(world_size):
    model, expected = sharded()

    for _ in range(2):
        for part in filter(lambda module: isinstance(module, FSDPModule), model.modules()):
            part.unshard(async_op=True)
            part.set_is_last_backward(False)
            part._set_unshard_async_op(True)
            with pytest.warns(UserWarning, match="the next forward gathers again"):
                part.set_reshard_after_backward(False)
        backward_of_both(model, expected)
    assert_same_gradients(model, expected)


@on_ranks(1, 2)
def test_what_is_not_supported_is_refused_and_odd_values_too(world_size):
    model, _ = sharded()
    for name, arguments in REFUSED.items():
        with pytest.raises(ConfigError, match=name):
            getattr(model, name)(*arguments)
    for name, argument in BOOLS.items():
        with pytest.raises(ConfigError, match=f"{argument} is"):
            getattr(model, name)("yes")
    with pytest.raises(ConfigError, match="recurse is"):
        model.set_requires_gradient_sync(True, recurse=1)
    with pytest.raises(RuntimeError, match="outermost"):
        model.blocks[0].reset_iter_state()
    with pytest.raises(ValueError, match="fully_shard was applied to"):
        model.set_modules_to_forward_prefetch([nn.Linear(1, 1)])
    with pytest.raises(ConfigError, match="no part of the same sharded model"):
        model.set_modules_to_backward_prefetch([fully_shard(nn.Linear(1, 1))])


def test_every_public_method_of_torchs_class_is_ours():
    ours = type(fsdp_compile(build("odd_mlp"))).__mro__[1:]
    mixin = next(each for each in ours if each.__name__ == "ShardedUnit")
    public = {name for name in vars(FSDPModule) if not name.startswith("_")}
    assert public - set(vars(mixin)) == set()


@on_ranks(2)
def test_after_an_exception_nothing_of_the_step_is_left(world_size):
    model, expected = sharded()
    with model.no_sync():
        step_of(model)
    model.reset_iter_state()
    backward_of_both(model, expected)
    assert_same_gradients(model, expected)


@on_ranks(2)
def test_an_event_is_waited_for_once(world_size):
    class Event:
        waits = 0

        def wait(self):
            self.waits += 1

    model, expected = sharded()
    event = Event()
    model.set_post_optim_event(event)
    assert_trains_as(model, expected)
    assert event.waits == 1
