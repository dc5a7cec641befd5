"""torch's names: scripts written for FSDP1 and FSDP2 train to the same numbers after a change of the import."""

import copy
import functools
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import enable_wrap, size_based_auto_wrap_policy, wrap
from torch.distributed.tensor import DTensor

from fsdp_compile import ConfigError, compat, fsdp_compile, rewrite, shard
from fsdp_compile.compat import FullyShardedDataParallel as FSDP
from fsdp_compile.passes import ops
from tests.distributed.training import (
    STEPS,
    adamw,
    assert_close,
    assert_same_gradients,
    assert_same_parameters,
    assert_trains_as,
    batch_of_rank,
    compiled,
    full,
    gathered_units,
    global_batch,
    mean_over_ranks,
    train,
    train_unsharded,
)
from tests.models import DEVICE, build, made
from tests.ranks import on_ranks

fully_shard = functools.partial(compat.fully_shard, backend="aot_eager")
wrapped = functools.partial(FSDP, backend="aot_eager")


def sharded_bottom_up(name="gpt", **options):
    """As FSDP2's scripts do it: every block, then the whole."""
    model = build(name)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


@on_ranks(2)
def test_fully_shard_from_the_bottom_up_is_one_program(world_size):
    expected = build("gpt")
    model = sharded_bottom_up()
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in expected.named_parameters()]
    assert_trains_as(model, expected)
    [graphs] = model.graphs
    assert gathered_units(graphs.forward) == ["root", "blocks.0", "blocks.1"]


@on_ranks(2)
def test_options_of_parts_stay_theirs(world_size):
    model = build("gpt")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    fully_shard(model.blocks[0], mp_policy=policy, reshard_after_forward=False)
    fully_shard(model.blocks[1], reshard_after_forward=True)
    fully_shard(model)
    model(*batch_of_rank(model, 0)).backward()
    [graphs] = model.graphs
    gathered = {
        ops.argument(n, "bucket"): n.meta["val"].dtype for n in graphs.forward.graph.nodes if ops.is_all_gather(n)
    }
    assert gathered["blocks.0"] == torch.bfloat16 and gathered["blocks.1"] == torch.float32
    assert "blocks.1" in gathered_units(graphs.backward)
    assert "blocks.0" not in gathered_units(graphs.backward)


@on_ranks(2)
def test_an_optimizer_built_between_and_a_part_used_by_itself(world_size):
    expected = build("odd_mlp")
    model = build("odd_mlp")
    fully_shard(model.layers)
    x = batch_of_rank(model, 0)[0]
    assert_close(model.layers(x), expected.layers(x))
    optimizer = adamw(model.parameters())
    fully_shard(model)
    expected_optimizer = adamw(expected.parameters())
    losses = train(model, optimizer, STEPS)
    assert_close(mean_over_ranks(losses), train(expected, expected_optimizer, STEPS, batch=global_batch))
    assert_same_parameters(model, expected)


@on_ranks(2)
def test_a_list_of_modules_is_one_unit(world_size):
    """As in scripts that shard the last norm and the head together; the head is tied to the embedding here."""
    expected = build("gpt")
    model = build("gpt")
    for block in model.blocks:
        fully_shard(block)
    last = [model.norm, model.head]
    assert fully_shard(last) is last
    x = torch.randn(2, 32)
    assert_close(model.head(model.norm(x)), expected_head(x))
    fully_shard(model)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in expected.named_parameters()]
    assert_trains_as(model, expected)
    [graphs] = model.graphs
    assert gathered_units(graphs.forward) == ["norm+head", "root", "blocks.0", "blocks.1"]
    assert copy.deepcopy(model).state_dict().keys() == expected.state_dict().keys()


def expected_head(x):
    model = build("gpt")
    return model.head(model.norm(x))


@on_ranks(2)
def test_parts_of_modules_in_a_list_keep_their_units(world_size):
    model = build("gpt")
    fully_shard(model.blocks[0].up, reshard_after_forward=False)
    fully_shard([model.blocks, model.blocks[1], model.norm])
    fully_shard([model.tokens, model.positions])
    model.tokens.set_unshard_in_backward(False)
    with pytest.raises(ConfigError, match="unshard_in_backward is a bool"):
        model.tokens.set_unshard_in_backward(0)
    fully_shard(model)
    assert_trains_as(model, build("gpt"))
    [graphs] = model.graphs
    assert gathered_units(graphs.forward) == ["tokens+positions", "blocks+norm", "blocks.0.up"]
    assert not {"blocks.0.up", "tokens+positions"} & set(gathered_units(graphs.backward))


@on_ranks(2)
def test_modules_in_a_list_cast_what_they_are_called_with(world_size):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    found = []
    for together in (False, True):
        model = build("odd_mlp")
        parts = [model.layers[0], model.layers[2]] if together else []
        if together:
            fully_shard(parts, mp_policy=policy)
            y = parts[1](parts[0](torch.ones(2, parts[0].in_features)))
            assert y.dtype == torch.bfloat16
        fully_shard(model, mp_policy=policy)
        found.append(train(model, adamw(model.parameters()), STEPS))
    assert_close(*found)


@on_ranks(2)
def test_modules_in_a_list_that_were_sharded_with_one_around_them_stay_there(world_size):
    """As accelerate's policy by size and the last norm and head, which it shards together afterwards."""
    model = build("gpt")
    fully_shard(model.blocks)
    block = model.blocks[0]
    for parts in ([block.mlp_norm, model.norm], [block.up, block.down]):
        with pytest.warns(UserWarning, match="sharded with a module around them, and left there"):
            assert fully_shard(parts, reshard_after_forward=False) is parts
    fully_shard(model)
    assert_trains_as(model, build("gpt"))
    assert gathered_units(model.graphs[0].forward) == ["root", "blocks", "norm"]


@on_ranks(1, 2)
def test_what_was_sharded_with_a_module_around_it_is_not_sharded_again(world_size):
    model = build("gpt")
    fully_shard(model.blocks[0])
    for again in (fully_shard, fsdp_compile):
        with pytest.raises(ConfigError, match="bias is sharded already, with a module around Linear: shard modules"):
            again(model.blocks[0].up)
    fully_shard(model)
    assert_trains_as(model, build("gpt"))


@on_ranks(2)
def test_lists_that_are_refused(world_size):
    model = build("gpt")
    with pytest.raises(ConfigError, match="a module or a list of modules"):
        fully_shard([])
    with pytest.raises(ConfigError, match="a module or a list of modules"):
        fully_shard([model.norm, "head"])
    fully_shard([model.norm, model.blocks[0]])
    with pytest.raises(ConfigError, match="LayerNorm of the list is sharded already"):
        fully_shard([model.blocks[1], model.norm])
    with pytest.raises(ConfigError, match="0 was sharded together with a LayerNorm that is not in the model"):
        fully_shard(model.blocks)
    with pytest.raises(ConfigError, match="together with others: copy the model that holds all"):
        copy.deepcopy(model.norm)
    with pytest.raises(ConfigError, match="together with others: pickle the model that holds all"):
        pickle.dumps(model.norm)
    fully_shard(model)
    assert_same_parameters(model, build("gpt"))


@on_ranks(1, 2)
def test_gradients_are_divided_by_a_factor_from_the_next_forward_on(world_size):
    """As scripts do it that sum gradients: for every FSDPModule of the model."""
    expected = build("odd_mlp")
    expected(*global_batch(expected, 0)).backward()
    for front_end in (compiled, shard):
        model = front_end(build("odd_mlp"))
        for factor in (world_size, 1.0, 8):
            for module in model.modules():
                if isinstance(module, compat.FSDPModule):
                    module.set_gradient_divide_factor(factor)
            for reduces in (False, True):
                model.set_requires_gradient_sync(reduces)
                model(*batch_of_rank(model, 0)).backward()
            for name, parameter in model.named_parameters():
                gradient = dict(expected.named_parameters())[name].grad
                assert_close(full(parameter.grad), gradient * 2 * world_size / factor)
            model.zero_grad()
        for refused in ("mean", 0, True):
            with pytest.raises(ConfigError, match="factor is a positive number that divides the sum"):
                model.set_gradient_divide_factor(refused)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8)
        self.head.weight = self.embed.weight

    def forward(self, ids, target):
        return nn.functional.cross_entropy(self.head(self.mix(self.embed(ids))), target)


@on_ranks(2)
def test_tied_weights_across_units_stay_one_weight(world_size):
    """FSDP2 raises here; SimpleFSDP unties them (PEERS 7). The bias of the head is its own."""
    expected, model = made(Tied), made(Tied)
    fully_shard(model.embed)
    fully_shard(model.head)
    fully_shard(model)
    assert model.head._parameters["weight"] is model.embed._parameters["weight"]
    ids = torch.arange(8).chunk(2)[dist.get_rank()]
    model(ids, ids.flip(0)).backward()
    halves = torch.arange(8).chunk(2)
    (sum(expected(half, half.flip(0)) for half in halves) / 2).backward()
    assert_same_gradients(model, expected)


@pytest.mark.parametrize("signature", ["1.11", "1.11-keywords", "today", "nested", "wrap"])
@on_ranks(2)
def test_fully_sharded_data_parallel_by_every_signature(world_size, signature):
    expected, model = build("gpt"), build("gpt")
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=100)
    if signature == "1.11":
        model = wrapped(model, None, CPUOffload(offload_params=False), policy, BackwardPrefetch.BACKWARD_POST)
    elif signature == "1.11-keywords":
        model = wrapped(model, process_group=dist.group.WORLD, fsdp_auto_wrap_policy=policy_of_1_11)
    elif signature == "today":
        strategy = ShardingStrategy.SHARD_GRAD_OP
        model = wrapped(model, dist.group.WORLD, strategy, auto_wrap_policy=policy, use_orig_params=True)
    elif signature == "nested":
        for index, block in enumerate(model.blocks):
            model.blocks[index] = wrapped(block)
        model = wrapped(model)
    else:
        with enable_wrap(wrapper_cls=FSDP, backend="aot_eager"):
            model.blocks[0] = wrap(model.blocks[0])
            model = wrap(model)
    assert isinstance(model, FSDP) and not isinstance(expected, FSDP)
    assert model.module is model
    assert_trains_as(model, expected)
    if signature == "today":
        assert gathered_units(model.graphs[0].backward) == []
    with FSDP.summon_full_params(model):
        assert_close(dict(model.named_parameters()), dict(expected.named_parameters()))


def policy_of_1_11(module, recurse, unwrapped_params):
    return recurse or unwrapped_params > 100


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3)
        self.register_buffer("offset", torch.ones(1))

    def forward(self, x):
        self.seen = [x.dtype]
        x = self.conv(x)
        self.seen.append(x.dtype)
        x = self.norm(x)
        self.seen += [x.dtype, self.offset.dtype]
        return x + self.offset


@on_ranks(2)
def test_mixed_precision_of_fsdp1_keeps_batch_norm_in_fp32(world_size):
    bf16 = torch.bfloat16
    model = wrapped(Normed(), mixed_precision=MixedPrecision(param_dtype=bf16, buffer_dtype=bf16, reduce_dtype=bf16))
    model(torch.randn(2, 2, 5)).float().sum().backward()
    assert model.seen == 4 * [bf16]
    assert model.norm.running_mean.dtype == torch.float32
    buckets = {
        ops.argument(n, "bucket"): n.meta["val"].dtype
        for n in model.graphs[0].forward.graph.nodes
        if ops.is_all_gather(n)
    }
    assert sorted(map(str, buckets.values())) == ["torch.bfloat16", "torch.float32"]
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


@on_ranks(2)
def test_ignored_modules_and_states(world_size):
    for options in ("modules", "states", "parameters"):
        model = build("odd_mlp")
        last = model.layers[4]
        if options == "modules":
            wrapped(model, ignored_modules=[last, nn.Linear(2, 2)])
        else:
            wrapped(model, ignored_states=[last] if options == "states" else list(last.parameters()))
        assert not isinstance(model.layers[4].weight, DTensor) and isinstance(model.layers[0].weight, DTensor)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"limit_all_gathers": 0}, "limit_all_gathers is a bool"),
        ({"mixed_precision": MixedPrecision(keep_low_precision_grads=2)}, "keep_low_precision_grads is a bool"),
        ({"ignored_states": [3]}, "ignored_states holds modules or parameters, not 3"),
    ],
    ids=str,
)
@on_ranks(2)
def test_unsupported_arguments_raise_and_change_nothing(world_size, options, words):
    model = build("odd_mlp")
    with pytest.raises(ConfigError, match=words):
        wrapped(model, **options)
    with pytest.raises(TypeError):
        wrapped(model, unknown_option=1)
    with pytest.raises(ConfigError, match="shard_placement_fn"):
        fully_shard(model, shard_placement_fn=lambda parameter: "dim 0")
    with pytest.raises(ConfigError, match="recurse is a bool"):
        FSDP.summon_full_params(model, recurse=0)
    with pytest.raises(ConfigError, match="takes the model that was sharded, and a OddMlp was given"):
        FSDP.summon_full_params(model)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


@on_ranks(2)
def test_parts_over_other_ranks_and_a_model_sharded_twice_are_refused(world_size):
    model = build("gpt")
    fully_shard(model.blocks[0])
    alone = init_device_mesh(DEVICE.type, (2, 1), mesh_dim_names=("replicate", "shard"))["shard"]
    with pytest.raises(ConfigError, match=r"blocks\.0 is sharded over the ranks"):
        fsdp_compile(model, alone)
    with pytest.raises(ConfigError, match=r"rewrite takes a model that is not sharded, and blocks\.0 is"):
        rewrite(model, *model.inputs(2, seed=0), world_size=2)
    fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    with pytest.raises(ConfigError, match="the model is sharded already"):
        fully_shard(model)


def test_on_a_single_process_parts_keep_their_precision():
    model, expected = build("odd_mlp"), build("odd_mlp")
    fully_shard(model.layers, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float64, output_dtype=torch.float32))
    fully_shard(model)
    batch = model.inputs(4, seed=0)
    expected.layers.double()
    x = expected.layers(batch[0].double()).float()
    assert_close(model(*batch), nn.functional.mse_loss(x.sum(1, keepdim=True), batch[1]))


@on_ranks(2)
def test_arguments_of_fsdp1_that_name_a_device_and_a_mesh(world_size):
    mesh = init_device_mesh(DEVICE.type, (2,), mesh_dim_names=("shard",))
    model = wrapped(build("odd_mlp"), device_mesh=mesh, device_id=DEVICE)
    assert next(model.parameters()).device_mesh == mesh  # DTensor may hold an equal one
    with pytest.raises((RuntimeError, AssertionError), match="CUDA|NVIDIA"):
        wrapped(build("odd_mlp"), device_id=0)


@on_ranks(2)
def test_state_dicts_of_fsdp1_are_full_or_sharded(world_size):
    expected, _ = train_unsharded("odd_mlp", STEPS)
    model = wrapped(build("odd_mlp"))
    optimizer = adamw(model.parameters())
    train(model, optimizer, STEPS)
    full = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, full):
        state = model.state_dict()
        optimizer_state = FSDP.optim_state_dict(model, optimizer)
    assert (state == {}) == (dist.get_rank() == 1)
    if state:
        assert_close(state, dict(expected.state_dict()))
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    assert_close(dict(model.state_dict()), dict(expected.state_dict()))

    other = wrapped(build("odd_mlp", seed=1))
    with FSDP.state_dict_type(other, StateDictType.FULL_STATE_DICT):
        other.load_state_dict(expected.state_dict())
        other_optimizer = adamw(other.parameters())
        loadable = FSDP.optim_state_dict_to_load(other, other_optimizer, optimizer_state)
        other_optimizer.load_state_dict(loadable)
    assert_close(train(other, other_optimizer, STEPS), train(model, optimizer, STEPS))
    assert_same_parameters(other, model)
    of_first = FullOptimStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, optim_state_dict_config=of_first):
        optimizer_state = FSDP.optim_state_dict(model, optimizer)
        assert (optimizer_state == {}) == (dist.get_rank() == 1)
        other_optimizer = adamw(other.parameters())
        with FSDP.state_dict_type(other, StateDictType.FULL_STATE_DICT, optim_state_dict_config=of_first):
            FSDP.optim_state_dict_to_load(other, other_optimizer, optimizer_state, load_directly=True)
    assert_close(train(other, other_optimizer, STEPS), train(model, optimizer, STEPS))
    with (
        pytest.raises(ConfigError, match="no configuration for"),
        FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, optim_state_dict_config=of_first),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="LOCAL_STATE_DICT"),
        FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT),
    ):
        pass
