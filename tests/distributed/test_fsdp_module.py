"""FSDP2's methods, on every module that was sharded by a call of its own: each does what it says, or refuses."""

import copy
import functools
import inspect
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, UnshardHandle, share_comm_ctx
from torch.distributed.fsdp import fully_shard as fully_shard_of_torch
from torch.distributed.tensor import DTensor

from fsdp_compile import ConfigError, compat, shard
from fsdp_compile.module.sharding import sharding_of
from fsdp_compile.passes import ops
from tests.distributed.training import (
    STEPS,
    adamw,
    assert_close,
    assert_same_gradients,
    assert_same_parameters,
    assert_trains_as,
    batch_of_rank,
    both_front_ends,
    compiled,
    gathered_units,
    global_batch,
    hybrid_mesh,
    mean_over_ranks,
    take_step,
)
from tests.models import build
from tests.ranks import on_ranks

fully_shard = functools.partial(compat.fully_shard, backend="aot_eager")


def sharded_blocks(name="gpt", **options):
    """Every block, then the whole."""
    model = build(name)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def are_sharded(module):
    return {isinstance(parameter, DTensor) for parameter in module.parameters()} == {True}


def step(model, number=0):
    loss = model(*batch_of_rank(model, number))
    loss.backward()
    return loss


def test_every_method_of_torch_has_its_signature():
    model = shard(build("odd_mlp"))
    for name, method in vars(FSDPModule).items():
        if not callable(method) or name in ("__new__", "_apply"):
            continue
        expected = inspect.signature(getattr(FSDPModule, name)).parameters
        found = inspect.signature(getattr(type(model), name)).parameters
        assert [(p.name, p.kind, p.default) for p in found.values()] == [
            (p.name, p.kind, p.default) for p in expected.values()
        ], name
        assert getattr(type(model), name) is not method, f"{name} is torch's own"


def test_fully_shard_has_the_parameters_of_torch():
    ours, theirs = inspect.signature(compat.fully_shard).parameters, inspect.signature(fully_shard_of_torch).parameters
    assert set(theirs) <= set(ours)


@on_ranks(2)
def test_models_share_their_streams_whoever_asks(world_size):
    models = [fully_shard(build("odd_mlp")) for _ in range(2)]
    share_comm_ctx(models)
    for model in models:
        step(model)


class Forwarding(nn.Module):
    """As those of torch.compile and peft: it also has what the model inside has."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args):
        return self.inner(*args)


@on_ranks(1, 2)
def test_a_module_that_forwards_to_the_one_inside_has_methods_of_its_own(world_size):
    model = fully_shard(Forwarding(fully_shard(build("odd_mlp"))))
    model.set_requires_gradient_sync(False)
    model(*batch_of_rank(model, 0)).backward()
    model.set_requires_gradient_sync(True)
    assert (model.inner.layers[0].weight.grad is None) == (world_size > 1)
    model.zero_grad()
    assert model.graphs and not hasattr(type(model.inner), "graphs")


@on_ranks(1, 2)
def test_sharded_modules_are_fsdp_modules_of_torch(world_size):
    model = sharded_blocks()
    assert compat.FSDPModule is FSDPModule
    held = [model, *model.blocks]
    assert [each for each in model.modules() if isinstance(each, FSDPModule)] == held
    assert isinstance(compiled(build("odd_mlp")), FSDPModule) and isinstance(shard(build("odd_mlp")), FSDPModule)
    together = build("gpt")
    fully_shard([together.norm, together.head])
    fully_shard(together)
    assert isinstance(together.norm, FSDPModule) and isinstance(together.head, FSDPModule)
    assert type(model.blocks[0]).__name__ == type(build("gpt").blocks[0]).__name__

    buffer = io.BytesIO()
    step(model)
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(model), torch.load(buffer, weights_only=False)]
    for each in copies:
        assert sum(isinstance(inner, FSDPModule) for inner in each.modules()) == len(held)
        each.blocks[0].set_gradient_divide_factor(3.0)
        each.zero_grad()
        step(each)
        assert not torch.equal(full_gradient(each.blocks[0].up.weight), full_gradient(model.blocks[0].up.weight))
        assert_close(full_gradient(each.head.weight), full_gradient(model.head.weight))


def full_gradient(parameter):
    gradient = parameter.grad
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


class Sliced(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x):
        for layer in self.layers[1:]:
            x = layer(x)
        return self.body[:2](x).square().sum()


@both_front_ends
@on_ranks(2)
def test_slices_of_containers_are_plain_modules(world_size, front_end):
    torch.manual_seed(0)
    expected = Sliced()
    model = copy.deepcopy(expected)
    fully_shard(model.body)
    model = front_end(model)
    x = torch.ones(2, 4)
    assert_close(model(x), expected(x))
    assert isinstance(model.body, FSDPModule) and not isinstance(model.body[:2], FSDPModule)
    assert type(model.layers[1:]) is nn.ModuleList
    model(x).backward()
    expected(x).backward()
    assert_same_gradients(model, expected)


@pytest.mark.parametrize("async_op", [False, True])
@on_ranks(2)
def test_unshard_gathers_the_own_units_until_reshard(world_size, async_op):
    model, expected = sharded_blocks(), build("gpt")
    block, other = model.blocks
    handle = block.unshard(async_op)
    if async_op:
        assert isinstance(handle, UnshardHandle) and are_sharded(block)
        handle.wait()
    else:
        assert handle is None
    assert are_sharded(other)
    for (name, parameter), wanted in zip(block.named_parameters(), expected.blocks[0].parameters(), strict=True):
        assert isinstance(parameter, nn.Parameter) and not isinstance(parameter, DTensor), name
        assert torch.equal(parameter, wanted)
    assert block.unshard() is None  # they are there
    with torch.no_grad():
        block.up.weight.zero_()
    block.reshard()
    block.reshard()
    assert are_sharded(model)
    assert_same_parameters(model, expected)  # what was written is lost, as in FSDP2


@both_front_ends
@on_ranks(1, 2)
def test_a_call_of_an_unsharded_model_gathers_by_itself(world_size, front_end):
    """Also where an optimizer has stepped in between, which updates the sharded parameters."""
    expected, model = build("gpt"), build("gpt")
    for block in model.blocks:
        fully_shard(block)
    model = front_end(model)
    optimizer, expected_optimizer = adamw(model.parameters()), adamw(expected.parameters())
    for number in STEPS:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard(async_op=number % 2 == 0)
        loss, wanted = model(*batch_of_rank(model, number)), expected(*global_batch(expected, number))
        assert_close(mean_over_ranks(loss.detach()), wanted.detach())
        loss.backward()
        wanted.backward()
        model.unshard()
        take_step([optimizer, expected_optimizer])
    model.reshard()
    assert_same_parameters(model, expected)


@on_ranks(2)
def test_unshard_follows_mixed_precision(world_size):
    model = sharded_blocks(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32))
    model.blocks[0].unshard()
    assert {parameter.dtype for parameter in model.blocks[0].parameters()} == {torch.bfloat16}
    model.blocks[0].reshard()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@on_ranks(2)
def test_what_needs_sharded_parameters_brings_them_back(world_size):
    model = sharded_blocks()
    expected = {name: tuple(value.shape) for name, value in build("gpt").state_dict().items()}
    step(model)

    def summoned():
        with model.summon_full_params():
            pass

    for use in (
        model.state_dict,
        lambda: model.load_state_dict(model.state_dict()),
        lambda: model.clip_grad_norm_(1.0),
        lambda: copy.deepcopy(model),
        lambda: torch.save(model, io.BytesIO()),
        summoned,
        model.float,
        model.zero_grad,
        model.reset_iter_state,
    ):
        model.blocks[0].unshard()
        use()
        assert are_sharded(model)
    assert {name: tuple(value.shape) for name, value in model.state_dict().items()} == expected
    model.blocks[0].unshard()
    model.blocks[0].up.weight.requires_grad_(False)
    model.blocks[0].reshard()
    assert not model.blocks[0].up.weight.requires_grad


@on_ranks(2)
def test_uses_of_unsharded_parameters_that_would_be_lost_are_refused(world_size):
    model = sharded_blocks()
    block = model.blocks[0]
    block.unshard()
    block.up.weight.sum().backward()
    with pytest.raises(RuntimeError, match=r"up\.weight|weight of a unit|weight .* has a gradient"):
        block.reshard()
    block.unshard()
    with torch.no_grad():
        block.up.weight.zero_()
    with pytest.raises(RuntimeError, match=r"was written to between unshard\(\) and a call"):
        step(model)
    with model.summon_full_params(), pytest.raises(RuntimeError, match="unshard was called inside summon_full_params"):
        block.unshard()
    model.zero_grad()
    assert_trains_as(model, build("gpt"))


class Prefetching(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        if isinstance(self.second, FSDPModule):
            handle = self.second.unshard(async_op=True)
            handle.wait()
        x = self.second(self.first(x).relu())
        if isinstance(self.second, FSDPModule):
            self.second.reshard()
        return x.square().sum()


@both_front_ends
@on_ranks(2)
def test_unshard_inside_a_forward_leaves_the_schedule_alone(world_size, front_end):
    torch.manual_seed(0)
    expected = Prefetching()
    model = copy.deepcopy(expected)
    fully_shard(model.second)
    front_end(model)
    x = torch.ones(2, 4)
    model(x).backward()
    expected(x).backward()
    assert_same_gradients(model, expected)
    assert are_sharded(model)
    if front_end is compiled:
        assert len(model.graphs) == 1


@on_ranks(2)
def test_gradients_of_some_modules_are_kept(world_size):
    model, expected = sharded_blocks(), build("gpt")
    kept, other = model.blocks
    for number, syncs in enumerate((False, False, True)):
        kept.set_requires_gradient_sync(syncs)
        step(model, number)
        expected(*global_batch(expected, number)).backward()
        assert (kept.up.weight.grad is not None) == syncs
        assert_close(full_gradient(other.up.weight), expected.blocks[1].up.weight.grad)
    assert_same_gradients(model, expected)
    model.zero_grad()
    expected.zero_grad()
    model.set_requires_gradient_sync(False, recurse=False)
    step(model)
    assert model.head.weight.grad is None and kept.up.weight.grad is not None
    model.set_requires_gradient_sync(False)
    step(model, 1)
    model.set_requires_gradient_sync(True)
    step(model, 2)
    for number in range(3):
        expected(*global_batch(expected, number)).backward()
    assert_same_gradients(model, expected)


@both_front_ends
@on_ranks(2)
def test_a_backward_reduces_if_that_was_said_after_its_forward(world_size, front_end):
    model, expected = front_end(build("odd_mlp")), build("odd_mlp")
    model.set_requires_gradient_sync(False)
    step(model)
    loss = model(*batch_of_rank(model, 1))
    model.set_requires_gradient_sync(True)
    loss.backward()
    for number in range(2):
        expected(*global_batch(expected, number)).backward()
    assert_same_gradients(model, expected)


@on_ranks(2, 4)
def test_all_reduces_are_kept_back_where_there_are_replicas(world_size):
    mesh = hybrid_mesh() if world_size == 4 else None
    model, expected = fully_shard(build("odd_mlp"), mesh=mesh), build("odd_mlp")
    for number, reduces in enumerate((False, True)):
        model.set_requires_all_reduce(reduces, recurse=True)
        step(model, number)
        expected(*global_batch(expected, number)).backward()
        assert (next(model.parameters()).grad is None) == (world_size == 4 and not reduces)
    assert_same_gradients(model, expected)


@on_ranks(2)
def test_reshard_after_forward_changes_the_schedule(world_size):
    model = sharded_blocks(reshard_after_forward=True)
    everything = set(gathered_units(first_graphs(model).backward))
    model.blocks[0].set_reshard_after_forward(False)
    assert set(gathered_units(first_graphs(model).backward)) == everything - {"blocks.0"}
    model.set_reshard_after_forward(False)
    assert not gathered_units(first_graphs(model).backward)
    for value in (True, False):  # as it was before
        model.set_reshard_after_forward(value)
        step(model)
    assert len(model.graphs) == 3
    with pytest.raises(ConfigError, match="reshard_after_forward is a bool"):
        model.set_reshard_after_forward(2)
    model.zero_grad()
    assert_trains_as(model, build("gpt"))


def first_graphs(model):
    """Those of one more step."""
    step(model)
    return model.graphs[-1]


@on_ranks(2)
def test_lists_of_modules_to_prefetch_start_gathers(world_size):
    model = sharded_blocks(reshard_after_forward=True)
    plain = first_graphs(model)
    model.set_modules_to_forward_prefetch(list(model.blocks))
    model.set_modules_to_backward_prefetch([model.blocks[1], model.blocks[0]])
    graphs = first_graphs(model)
    assert num_started(plain.forward, "root") == 2 and num_started(graphs.forward, "root") == 3
    assert gathered_units(graphs.forward) == gathered_units(plain.forward)
    assert num_started(plain.backward, "root") == 2 and num_started(graphs.backward, "root") == 3
    model.set_modules_to_forward_prefetch([])
    assert num_started(first_graphs(model).forward, "root") == 2
    with pytest.raises(ConfigError, match="a list of FSDPModules"):
        model.set_modules_to_forward_prefetch([model.norm])
    with pytest.raises(ConfigError, match="between modules of one model"):
        model.set_modules_to_backward_prefetch([fully_shard(build("odd_mlp"))])
    model.zero_grad()
    assert_trains_as(model, build("gpt"))


def num_started(graph, unit):
    """How many gathers have started before the first of the unit is waited for."""
    count = 0
    for node in graph.graph.nodes:
        count += ops.is_all_gather(node)
        waited = node.args[0] if ops.is_call(node, ops.WAIT) else node
        if waited is not node and ops.is_all_gather(waited):
            bucket = ops.argument(waited, "bucket")
            if ops.unit_of_bucket(bucket) == unit:
                return count
    raise AssertionError(f"{unit} is not gathered")


@on_ranks(2)
def test_more_reductions_may_be_under_way(world_size):
    model = sharded_blocks()
    step(model)
    model.blocks[0].set_reduce_scatter_max_input_buffers(1)
    model.set_reduce_scatter_max_input_buffers(3, recurse=False)
    step(model)
    before, after = (most_reductions(graphs.backward) for graphs in (model.graphs[0], model.graphs[-1]))
    assert (before, after) == (1, 3)
    with pytest.raises(ConfigError, match="max_input_buffers is a positive int"):
        model.set_reduce_scatter_max_input_buffers(0)
    model.zero_grad()
    assert_trains_as(model, build("gpt"))


def most_reductions(graph):
    most = running = 0
    for node in graph.graph.nodes:
        running += ops.is_reduction(node)
        running -= ops.is_call(node, ops.WAIT) and ops.is_reduction(node.args[0])
        most = max(most, running)
    return most


@on_ranks(1, 2)
def test_a_factor_is_of_the_own_units(world_size):
    model, expected = sharded_blocks(), build("gpt")
    model.blocks[0].set_gradient_divide_factor(2.0 * world_size)
    model.blocks[1].set_reduce_scatter_divide_factor(4.0 * world_size)
    model.set_force_sum_reduction_for_comms(True)
    step(model)
    expected(*global_batch(expected, 0)).backward()
    for index, factor in enumerate((2.0, 4.0)):
        assert_close(full_gradient(model.blocks[index].up.weight) * factor, expected.blocks[index].up.weight.grad)
    assert_close(full_gradient(model.head.weight), expected.head.weight.grad)
    if world_size > 1:
        operators = {str(shard.layout.bucket): shard.layout.reduction.operator for shard in sharding_of(model).shards}
        assert operators == {"root": "sum", "blocks.0": "sum", "blocks.1": "sum"}
        model.set_force_sum_reduction_for_comms(False)
        assert sharding_of(model).shards[0].layout.reduction.operator == "avg"


@on_ranks(2)
def test_an_iteration_that_raised_is_forgotten(world_size):
    model, expected = fully_shard(build("odd_mlp")), build("odd_mlp")
    model.set_requires_gradient_sync(False)
    step(model)
    model.set_requires_gradient_sync(True)
    model.reset_iter_state()
    step(model, 1)
    expected(*global_batch(expected, 1)).backward()
    assert_same_gradients(model, expected)
    with pytest.raises(RuntimeError, match="for the outermost"):
        sharded_blocks().blocks[0].reset_iter_state()


class Event:
    def __init__(self):
        self.num_waits = 0

    def wait(self):
        self.num_waits += 1


@on_ranks(2)
def test_an_event_is_waited_for_once_before_the_next_forward(world_size):
    model, event = sharded_blocks(), Event()
    model.set_post_optim_event(event)
    step(model)
    step(model)
    assert event.num_waits == 1
    with pytest.raises(ConfigError, match="event is a torch.Event"):
        model.set_post_optim_event("later")
    with pytest.raises(ConfigError, match="for the outermost"):
        model.blocks[0].set_post_optim_event(event)


@on_ranks(1, 2)
def test_what_makes_no_difference_is_checked_and_makes_none(world_size):
    model = sharded_blocks()
    for module in (model, model.blocks[0]):
        for value in (False, True):
            module.set_is_last_backward(value)
            module.set_reshard_after_backward(value, recurse=False)
            module.set_unshard_in_backward(value)
            module.set_reduce_scatter_unused_params(value, recurse=True)
            module._set_unshard_async_op(value)
        module.set_separate_reduce_scatter_group(False)
        module.set_allocate_memory_from_process_group_for_comm(False)
        module.set_modules_to_forward_prefetch([model.blocks[1]])
        for name in (
            "set_is_last_backward",
            "set_reshard_after_backward",
            "set_unshard_in_backward",
            "set_reduce_scatter_unused_params",
            "set_requires_gradient_sync",
            "set_requires_all_reduce",
            "set_force_sum_reduction_for_comms",
        ):
            with pytest.raises(ConfigError, match="is a bool, not 1"):
                getattr(module, name)(1)
    model.zero_grad()
    assert_trains_as(model, build("gpt"))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("set_custom_all_gather", [object()]),
        ("set_custom_reduce_scatter", [object()]),
        ("set_all_reduce_hook", [print]),
        ("set_separate_reduce_scatter_group", []),
        ("set_allocate_memory_from_process_group_for_comm", [True]),
        ("set_symm_mem_for_comm", []),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_reason(name, arguments):
    model = shard(build("odd_mlp"))
    with pytest.raises(ConfigError, match=f"{name} is not supported: "):
        getattr(model, name)(*arguments)


@on_ranks(2)
def test_a_pipeline_reduces_what_was_kept(world_size):
    """As torch's pipelines do at the end of a step."""
    model, expected = sharded_blocks(), build("gpt")
    model.set_requires_gradient_sync(False)
    step(model)
    expected(*global_batch(expected, 0)).backward()
    model.set_requires_gradient_sync(True)
    states = model._get_fsdp_state()._state_ctx.all_states
    assert len(set(states)) == len(states)
    assert model._get_fsdp_state() in states
    for group in {group for state in states for group in state._fsdp_param_groups}:
        group.post_backward()
    assert_same_gradients(model, expected)
    assert dist.get_world_size() == world_size
