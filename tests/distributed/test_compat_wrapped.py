"""What FSDP1's users do with wrapped modules besides training: find them, look at full parameters, save and load."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.algorithms._comm_hooks.default_hooks import (
    LowPrecisionState,
    bf16_compress_hook,
    fp16_compress_hook,
    reduce_scatter_hook,
)
from torch.distributed.fsdp import (
    FullStateDictConfig,
    MixedPrecision,
    OptimStateKeyType,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from fsdp_compile import ConfigError, RankError
from fsdp_compile.compat import FullyShardedDataParallel as FSDP
from fsdp_compile.compat import fully_shard
from tests.distributed.training import (
    STEPS,
    adamw,
    assert_close,
    assert_same_parameters,
    assert_trains_as,
    batch_of_rank,
    full,
    global_batch,
    train,
)
from tests.models import build
from tests.ranks import on_ranks, run_until_parted

wrapped = functools.partial(FSDP, backend="aot_eager")


def nested(name="gpt", **options):
    model = build(name)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = wrapped(block, **options)
    return wrapped(model, **options)


def by_policy():
    model = build("gpt")
    return wrapped(model, auto_wrap_policy=ModuleWrapPolicy({type(model.blocks[0])}))


@pytest.mark.parametrize("make", [nested, by_policy])
@on_ranks(1, 2)
def test_modules_that_were_wrapped_are_found(world_size, make):
    model = make()
    blocks = list(model.blocks)
    assert FSDP.fsdp_modules(model) == [model, *blocks] == model.fsdp_modules(model)
    assert FSDP.fsdp_modules(model, root_only=True) == [model]
    assert all(isinstance(block, FSDP) for block in blocks) and not isinstance(model.norm, FSDP)
    assert FSDP.fsdp_modules(nn.ModuleList([nn.Linear(2, 2), model]), root_only=True) == [model]
    assert model.check_is_root()
    assert [isinstance(part, FSDP) for part in copy.deepcopy(model).blocks] == [True] * len(blocks)
    strategy = ShardingStrategy.FULL_SHARD if world_size > 1 else ShardingStrategy.NO_SHARD
    assert {part.sharding_strategy for part in FSDP.fsdp_modules(model)} == {strategy}


@on_ranks(2)
def test_an_inner_module_is_no_root_any_more(world_size):
    model = build("gpt")
    inner = wrapped(model.blocks[0])
    assert inner.check_is_root()
    wrapped(model)
    assert not inner.check_is_root() and isinstance(inner, FSDP)
    for method in (functools.partial(inner.clip_grad_norm_, 1.0), inner.no_sync):
        with pytest.raises(RuntimeError, match="should only be called on the root FSDP instance"):
            method()
    with pytest.warns(UserWarning, match="with no gradients"):
        assert model.clip_grad_norm_(1.0) == 0


@on_ranks(1)
def test_a_single_rank_shards_nothing_and_says_so(world_size):
    with pytest.warns(UserWarning, match="NO_SHARD"):
        wrapped(build("odd_mlp"))


@on_ranks(2)
def test_full_parameters_of_a_part_and_of_what_holds_several(world_size):
    expected, model = build("gpt"), nested()
    with FSDP.summon_full_params(model.blocks[0]):
        assert_close(dict(model.blocks[0].named_parameters()), dict(expected.blocks[0].named_parameters()))
        assert isinstance(next(model.blocks[1].parameters()), DTensor)
        with torch.no_grad():
            model.blocks[0].up.weight.fill_(3)
    assert full(model.blocks[0].up.weight).eq(3).all()
    with model.summon_full_params(model, recurse=False, writeback=False):
        own = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    assert own == [name for name, _ in expected.named_parameters() if not name.startswith("blocks.")]
    several = nn.ModuleList([nn.Linear(2, 2), wrapped(nn.Linear(4, 4)), wrapped(nn.Linear(3, 3))])
    with FSDP.summon_full_params(several):
        assert not any(isinstance(parameter, DTensor) for parameter in several.parameters())
    assert sum(isinstance(parameter, DTensor) for parameter in several.parameters()) == 4
    with pytest.raises(ConfigError, match="rank0_only=True"):
        model.summon_full_params(rank0_only=True)


@on_ranks(2)
def test_apply_sees_full_parameters_and_keeps_what_it_writes(world_size):
    def initialise(module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)

    expected, model = build("gpt"), nested()
    for each in (expected, model):
        torch.manual_seed(5)
        assert each.apply(initialise) is each
    assert_same_parameters(model, expected)


@on_ranks(2)
def test_the_type_of_state_dicts_holds_until_it_is_set_again(world_size):
    expected, model = build("gpt"), nested()
    assert_close(dict(model.state_dict()), dict(expected.state_dict()))
    before = FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True))
    assert before.state_dict_config == FullStateDictConfig()
    assert FSDP.get_state_dict_type(model.blocks[0]).state_dict_config == FullStateDictConfig(rank0_only=True)
    for part, whole in ((model, expected), (model.blocks[0], expected.blocks[0])):
        state = part.state_dict()
        assert_close(dict(state), dict(whole.state_dict()) if dist.get_rank() == 0 else {})
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=True)):
        assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    assert FSDP.get_state_dict_type(model).state_dict_type is StateDictType.FULL_STATE_DICT
    FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())


def loaded_by_shard(state, model, optimizer):
    return FSDP.shard_full_optim_state_dict(state, model, optim=optimizer)


def loaded_by_scatter(state, model, optimizer):
    state = state if dist.get_rank() == 0 else None
    return FSDP.scatter_full_optim_state_dict(state, model, optim_input=list(model.parameters()))


def loaded_by_flatten(state, model, optimizer):
    return FSDP.flatten_sharded_optim_state_dict(state, model, optimizer)


def loaded_by_rekeying(state, model, optimizer):
    numbered = FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, model, optim=optimizer)
    assert set(numbered["state"]) == set(range(len(numbered["state"])))
    named = FSDP.rekey_optim_state_dict(numbered, OptimStateKeyType.PARAM_NAME, model, optim=optimizer)
    assert list(named["state"]) == list(state["state"])
    return FSDP.shard_full_optim_state_dict(named, model, optim=optimizer)


@pytest.mark.parametrize("load", [loaded_by_shard, loaded_by_scatter, loaded_by_flatten, loaded_by_rekeying])
@on_ranks(2)
def test_an_optimizer_resumes_from_each_kind_of_state(world_size, load):
    expected = build("odd_mlp")
    expected_optimizer = adamw(expected.parameters())
    train(expected, expected_optimizer, STEPS, batch=global_batch)
    model = wrapped(build("odd_mlp"))
    optimizer = adamw(model.parameters())
    train(model, optimizer, STEPS)
    state = (
        FSDP.sharded_optim_state_dict(model, optimizer)
        if load is loaded_by_flatten
        else FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    )
    for name, parameter in expected.named_parameters():
        for key, value in state["state"][name].items():
            assert_close(full(value), expected_optimizer.state[parameter][key])
    other = wrapped(build("odd_mlp", seed=1))
    other.load_state_dict(model.state_dict())
    other_optimizer = adamw(other.parameters())
    other_optimizer.load_state_dict(load(state, other, other_optimizer))
    assert_close(train(other, other_optimizer, STEPS), train(model, optimizer, STEPS))
    assert_same_parameters(other, model)


@on_ranks(2)
def test_optimizers_of_two_ranks_may_list_parameters_in_another_order(world_size):
    model = wrapped(build("odd_mlp"))
    order = reversed if dist.get_rank() else list
    optimizer = adamw(list(order(list(model.parameters()))))
    train(model, optimizer, STEPS)
    expected = build("odd_mlp")
    expected_optimizer = adamw(expected.parameters())
    train(expected, expected_optimizer, STEPS, batch=global_batch)
    names = [name for name, _ in expected.named_parameters()]
    for state in (
        FSDP.full_optim_state_dict(model, optimizer, rank0_only=False),
        FSDP.sharded_optim_state_dict(model, optimizer),
    ):
        assert list(state["state"]) == names
        assert state["param_groups"][0]["params"] == list(order(names))
        for name, parameter in expected.named_parameters():
            for key, value in state["state"][name].items():
                assert_close(full(value), expected_optimizer.state[parameter][key])


@on_ranks(2)
def test_buffers_of_parts_that_were_wrapped_before_have_the_dtype_of_those(world_size):
    """A part without a policy, one that ignores itself, and one with a policy of its own."""
    parts = nn.ModuleList([nn.BatchNorm1d(4) for _ in range(4)])

    def casting_to(dtype):
        return MixedPrecision(buffer_dtype=dtype, _module_classes_to_ignore=())

    FSDP(parts[0], backend="aot_eager")
    FSDP(parts[1], ignored_modules=[parts[1]], backend="aot_eager")
    FSDP(parts[2], mixed_precision=casting_to(torch.float16), backend="aot_eager")
    model = FSDP(parts, mixed_precision=casting_to(torch.bfloat16), backend="aot_eager")
    found = [part.running_mean.dtype for part in model]
    assert found == [torch.float32, torch.float32, torch.float16, torch.bfloat16]


@on_ranks(2)
def test_full_states_are_on_the_first_rank_alone(world_size):
    model = wrapped(build("odd_mlp"))
    optimizer = adamw(model.parameters())
    assert FSDP.sharded_optim_state_dict(model, optimizer)["state"] == {}
    train(model, optimizer, STEPS)
    assert bool(FSDP.full_optim_state_dict(model, optimizer)) == (dist.get_rank() == 0)
    named = FSDP.optim_state_dict_to_load(
        model, optimizer, FSDP.optim_state_dict(model, optimizer, optimizer.state_dict()), is_named_optimizer=True
    )
    assert all(isinstance(values["exp_avg"], DTensor) for values in named["state"].values())
    strange = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    with pytest.raises(ConfigError, match=r"of shape \(2,\), is not in the model"):
        FSDP.optim_state_dict(model, strange)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@on_ranks(2)
def test_communication_hooks_of_torch_are_what_reductions_cast_to(world_size, dtype):
    hooks = {None: reduce_scatter_hook, torch.bfloat16: bf16_compress_hook, torch.float16: fp16_compress_hook}
    policy = MixedPrecision(reduce_dtype=dtype)
    expected, model = nested(mixed_precision=policy), nested()
    train(model, adamw(model.parameters()), STEPS[:1])  # compiled without a hook
    train(expected, adamw(expected.parameters()), STEPS[:1])
    model.load_state_dict(expected.state_dict())
    model.register_comm_hook(LowPrecisionState(dist.group.WORLD), hooks[dtype])
    for each in (expected, model):
        each.zero_grad()
        each(*batch_of_rank(each, 1)).backward()
    for parameter, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        assert parameter.grad.dtype == torch.float32 and torch.equal(full(parameter.grad), full(wanted.grad))


@on_ranks(2)
def test_communication_hooks_that_a_compiled_backward_cannot_run(world_size):
    model = nested()
    with pytest.raises(ConfigError, match="register_comm_hook takes allreduce_hook"):
        model.register_comm_hook(None, lambda state, gradient: None)
    with pytest.raises(AssertionError, match="can only be called on a root instance"):
        model.blocks[0].register_comm_hook(None, reduce_scatter_hook)


class Casting(nn.Module):
    """Casts what the second layer is called with, if it is told to."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, dtype=None):
        x = self.first(x)
        return self.second(x if dtype is None else x.to(dtype))


@on_ranks(2)
def test_a_part_casts_its_inputs_only_if_it_says_so(world_size):
    x = torch.ones(2, 4)
    for casts in (False, True):
        model = Casting()
        wrapped(model.second, mixed_precision=MixedPrecision(param_dtype=torch.float16, cast_forward_inputs=casts))
        wrapped(model)
        assert model(x, None if casts else torch.float16).dtype == torch.float16
        if not casts:
            with pytest.raises(RuntimeError, match="same dtype"):
                model(x)
    root = wrapped(nn.Linear(4, 4), mixed_precision=MixedPrecision(param_dtype=torch.float16))
    assert root(x).dtype == torch.float16


@on_ranks(1, 2)
def test_what_is_on_the_meta_device_gets_the_values_of_reset_parameters(world_size):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        nameless = nn.Sequential(nn.Linear(2, 2), Scale())
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    torch.manual_seed(0)
    wrapped(model)
    assert_close(dict(model.state_dict()), dict(expected.state_dict()))
    with pytest.raises(ConfigError, match="a Scale has tensors on the meta device and no reset_parameters"):
        wrapped(nameless)
    assert all(parameter.is_meta and not isinstance(parameter, DTensor) for parameter in nameless.parameters())


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))


@on_ranks(2)
def test_states_have_the_names_from_before_checkpoint_wrappers(world_size):
    model = build("gpt")
    wrapped(model)
    apply_activation_checkpointing(model, check_fn=lambda module: module in set(model.blocks))
    optimizer = adamw(model.parameters())
    train(model, optimizer, STEPS[:1])
    state = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    assert list(state["state"]) == [name for name, _ in build("gpt").named_parameters()]
    loadable = model.optim_state_dict_to_load(model, optimizer, state)
    assert loadable["param_groups"][0]["params"] == list(range(len(state["state"])))


def full_state_of_some():
    model = nested()
    parameters = list(model.parameters())
    optimizer = adamw(parameters[: len(parameters) - dist.get_rank()])
    train(model, optimizer, STEPS[:1])
    with pytest.raises(RankError, match="rank 0 and rank 1 differ(.|\n)*the state of norm.bias"):
        FSDP.full_optim_state_dict(model, optimizer)


class Tables(nn.Module):
    """A dense part, and a table of each rank's own, as models of torchrec have them."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(4, 4)
        self.add_module(f"table{dist.get_rank()}", nn.Linear(4, 4))

    @property
    def own(self):
        return self.get_submodule(f"table{dist.get_rank()}")

    def forward(self, x):
        return self.dense(x) + self.own(x)


@on_ranks(2)
def test_a_full_state_has_what_a_rank_holds_alone(world_size):
    model = Tables()
    wrapped = FSDP(model, ignored_modules=[model.own], backend="aot_eager")
    optimizer = adamw(wrapped.parameters())
    wrapped(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = FSDP.full_optim_state_dict(wrapped, optimizer, rank0_only=False)["state"]
    assert set(state) == {name for name, _ in Tables().named_parameters()}
    for name, values in state.items():
        assert values["exp_avg"].shape == model.get_parameter(name).shape


def test_a_full_state_that_ranks_have_not_in_common_is_refused_on_all():
    run_until_parted(2, full_state_of_some)


@on_ranks(1, 2)
def test_gradients_stay_in_the_precision_of_their_reduction(world_size):
    policy = {"param_dtype": torch.float16, "reduce_dtype": torch.bfloat16}
    expected = nested(mixed_precision=MixedPrecision(**policy))
    model = nested(mixed_precision=MixedPrecision(**policy, keep_low_precision_grads=True))
    for each in (expected, model):
        for _ in range(2):
            each(*batch_of_rank(each, 0)).backward()
    for (name, parameter), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert parameter.dtype == torch.float32 and parameter.grad.dtype == torch.bfloat16, name
        torch.testing.assert_close(full(parameter.grad).float(), full(wanted.grad), rtol=0.02, atol=1e-5)
    with model.summon_full_params(with_grads=True):
        pass
    assert model.clip_grad_norm_(1e-3).dtype == torch.bfloat16
    assert expected.clip_grad_norm_(1e-3).dtype == torch.float32


@on_ranks(2)
def test_a_policy_gives_options_to_single_modules(world_size):
    expected, model = build("gpt"), build("gpt")
    first, second, *_ = model.blocks
    options = {first: {"sharding_strategy": ShardingStrategy.NO_SHARD}, second: {"forward_prefetch": True}}
    wrapped(model, auto_wrap_policy=CustomPolicy(lambda module: options.get(module, module in set(model.blocks))))
    assert [module.sharding_strategy for module in (model, first, second)] == [
        ShardingStrategy.FULL_SHARD,
        ShardingStrategy.NO_SHARD,
        ShardingStrategy.FULL_SHARD,
    ]
    assert (second.forward_prefetch, model.forward_prefetch) == (True, False)
    assert all(parameter.placements[0].is_replicate() for parameter in first.parameters())
    assert all(parameter.placements[0].is_shard() for parameter in second.parameters())
    assert_trains_as(model, expected)


@on_ranks(2)
def test_a_policy_that_gives_a_module_an_option_of_another_name_changes_nothing(world_size):
    model = build("gpt")
    before = list(model.parameters())
    with pytest.raises(ConfigError, match="auto_wrap_policy returned 'strategy' for a Block"):
        wrapped(
            model, auto_wrap_policy=CustomPolicy(lambda module: {"strategy": 1} if module in model.blocks else False)
        )
    assert all(parameter is old for parameter, old in zip(model.parameters(), before, strict=True))


@on_ranks(1, 2)
def test_what_is_wrapped_is_wrapped_again_in_the_same_way_only(world_size):
    model = by_policy()
    loss = model(*batch_of_rank(model, 0))
    assert wrapped(model) is model and torch.equal(model(*batch_of_rank(model, 0)), loss)
    with pytest.raises(ConfigError, match="wrapped already, .* another mixed_precision"):
        wrapped(model, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    with pytest.raises(ConfigError, match="wrapped already, .* options that decide about parameters"):
        wrapped(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    by_another = fully_shard(build("odd_mlp"), backend="aot_eager")
    with pytest.raises(ConfigError, match="the model is sharded already"):
        wrapped(by_another)


class Ignoring(nn.Module):
    """Has one layer more on the second rank, which is ignored on both."""

    def __init__(self, *, is_in_between):
        super().__init__()
        torch.manual_seed(0)
        first, last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.own = [nn.Linear(4, 4) for _ in range(dist.get_rank())]
        self.layers = nn.Sequential(first, *self.own, last) if is_in_between else nn.Sequential(first, last, *self.own)

    def forward(self, x):
        return self.layers(x)


@on_ranks(2)
def test_ranks_may_ignore_layers_that_others_do_not_have(world_size):
    model = Ignoring(is_in_between=False)
    expected = copy.deepcopy(model)
    wrapped(model, ignored_modules=model.own)
    x = torch.randn(8, 4)
    assert torch.equal(model(x), expected(x))
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def sharding_what_has_other_names():
    model = Ignoring(is_in_between=True)
    with pytest.raises(RankError, match="layers.1.weight(.|\n)*layers.2.weight"):
        wrapped(model, ignored_modules=model.own)


def test_ranks_that_shard_parameters_of_other_names_are_refused():
    """As they would be if they had the same shapes by chance: each rank would hold a part of another parameter."""
    run_until_parted(2, sharding_what_has_other_names)
