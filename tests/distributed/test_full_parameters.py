"""`model.summon_full_params`: full parameters between two steps, and full tensors in `load_state_dict`."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_compile import ConfigError, shard
from tests.distributed.training import (
    adamw,
    assert_close,
    assert_same_gradients,
    assert_same_parameters,
    assert_same_tensors,
    assert_trains_as,
    backend_of,
    backward_of_both,
    batch_of_rank,
    both_front_ends,
    compiled,
    full_gradients,
    global_batch,
    hybrid_mesh,
    train,
)
from tests.models import DEVICE, build
from tests.ranks import on_ranks


def assert_is_full(model, expected):
    """Plain parameters with the values of `expected`, and its state_dict."""
    assert [*model.state_dict()] == [*expected.state_dict()]
    for (name, parameter), (expected_name, value) in zip(
        model.named_parameters(), expected.named_parameters(), strict=True
    ):
        assert name == expected_name
        assert type(parameter) is nn.Parameter, name
        assert parameter.requires_grad == value.requires_grad, name
        assert torch.equal(parameter, value), name
        assert type(model.state_dict()[name]) is torch.Tensor, name


def reset(model, seed):
    """What a script does to initialise its model; only full parameters make it depend on nothing but the seed."""
    torch.manual_seed(seed)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def num_sharded_storages(model):
    sharded = [parameter for parameter in model.parameters() if parameter.dim()]
    return len({parameter.to_local().untyped_storage().data_ptr() for parameter in sharded})


@pytest.mark.parametrize("name", ["gpt", "odd_mlp", "odd_parameters", "few_rows", "adapted"])
@on_ranks(3)
def test_parameters_are_full_inside_and_the_sharded_ones_afterwards(world_size, name):
    expected, model = build(name), shard(build(name))
    sharded = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    with CommDebugMode() as debug, model.summon_full_params():
        assert_is_full(model, expected)
        if name == "gpt":
            assert model.head.weight is model.tokens.weight
    assert debug.get_total_counts() == num_sharded_storages(model)  # one gather for each bucket
    assert {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)} == sharded
    assert_same_parameters(model, expected)


@both_front_ends
@on_ranks(2)
def test_what_is_written_inside_is_trained_on(world_size, front_end):
    expected, model = build("odd_mlp"), front_end(build("odd_mlp", seed=1))
    train(model, adamw(model.parameters()), [0])  # compiled before it is written to
    reset(expected, seed=5)
    with model.summon_full_params():
        reset(model, seed=5)
    assert_trains_as(model, expected)


@on_ranks(2)
def test_without_writeback_nothing_is_written(world_size):
    model = shard(build("odd_parameters"))
    with model.summon_full_params(writeback=False):
        reset(model, seed=5)
        for parameter in model.parameters():
            parameter.data.zero_()
        model.weight = nn.Parameter(torch.zeros(3, 3))
    assert_same_parameters(model, build("odd_parameters"))


@on_ranks(2)
def test_gradients_are_not_touched_unless_asked_for(world_size):
    expected, model = build("odd_mlp"), shard(build("odd_mlp"))
    backward_of_both(model, expected)
    with model.summon_full_params():
        assert all(parameter.grad is None for parameter in model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    assert_same_gradients(model, expected)


@pytest.mark.parametrize("name", ["odd_parameters", "adapted", "unused"])
@on_ranks(3)
def test_gradients_are_full_too_and_written_back(world_size, name):
    expected, model = build(name), shard(build(name))
    backward_of_both(model, expected)

    def change(network):
        """Gradients change, vanish and appear."""
        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        for index, parameter in enumerate(trained):
            if index % 3 == 0 and parameter.grad is not None:
                parameter.grad.mul_(2)
            elif index % 3 == 1:
                parameter.grad = None
            else:
                parameter.grad = torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape)

    with model.summon_full_params(with_grads=True):
        for parameter, value in zip(model.parameters(), expected.parameters(), strict=True):
            assert (parameter.grad is None) == (value.grad is None)
            if value.grad is not None:
                assert type(parameter.grad) is torch.Tensor
                assert_close(parameter.grad, value.grad)
        change(model)
    change(expected)
    assert_same_gradients(model, expected)
    for parameter in model.parameters():
        assert parameter.grad is None or parameter.grad.placements == parameter.placements


@on_ranks(2)
def test_with_grads_but_without_writeback_gradients_stay(world_size):
    expected, model = build("odd_mlp"), shard(build("odd_mlp"))
    backward_of_both(model, expected)
    with model.summon_full_params(writeback=False, with_grads=True):
        for parameter in model.parameters():
            parameter.grad.zero_()
    assert_same_gradients(model, expected)


@on_ranks(2)
def test_only_the_first_rank_gets_full_parameters_on_request(world_size):
    expected, model = build("gpt"), shard(build("gpt"))
    with model.summon_full_params(writeback=False, rank0_only=True, offload_to_cpu=True):
        if dist.get_rank() == 0:
            assert_is_full(model, expected)
            assert all(parameter.device.type == "cpu" for parameter in model.parameters())
        else:
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert_same_parameters(model, expected)

    with pytest.raises(ConfigError, match="rank0_only=True.*writeback=False"):
        model.summon_full_params(rank0_only=True)


@on_ranks(4)
def test_full_parameters_of_a_hybrid_mesh(world_size):
    expected, model = build("odd_parameters"), shard(build("odd_parameters"), hybrid_mesh())
    with model.summon_full_params():
        assert_is_full(model, expected)
        reset(model, seed=5)
    reset(expected, seed=5)
    assert_same_parameters(model, expected)
    with model.summon_full_params(writeback=False, rank0_only=True):
        is_full = [None] * world_size
        dist.all_gather_object(is_full, not isinstance(model.weight, DTensor))
    assert is_full == [True, False, False, False]


OPTIONS = {
    "whole on every rank": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "precision": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


@pytest.mark.parametrize("option", list(OPTIONS))
@on_ranks(2)
def test_full_parameters_of_models_that_are_not_just_sharded(world_size, option):
    expected, model = build("odd_parameters"), shard(build("odd_parameters"), **OPTIONS[option])
    model(*batch_of_rank(model, 0)).backward()
    gradients = copy.deepcopy(full_gradients(model))  # what is whole on every rank is not gathered but shared
    with model.summon_full_params(with_grads=True):
        assert_is_full(model, expected)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.grad, gradients[name])
            parameter.grad.mul_(2)
        reset(model, seed=5)
    reset(expected, seed=5)
    assert_same_parameters(model, expected)
    assert all(torch.equal(value, 2 * gradients[name]) for name, value in full_gradients(model).items())


@on_ranks(2)
def test_ignored_parameters_stay_what_they_are(world_size):
    model = build("odd_mlp")
    ignored = model.layers[0].weight
    shard(model, ignored_params={ignored})
    with model.summon_full_params(writeback=False):
        assert model.layers[0].weight is ignored
        ignored.data.fill_(dist.get_rank())
    assert model.layers[0].weight is ignored
    assert torch.equal(ignored, torch.full((7, 5), float(dist.get_rank())))


@on_ranks(2)
def test_an_exception_inside_leaves_the_model_sharded(world_size):
    expected, model = build("odd_mlp"), shard(build("odd_mlp"))
    with pytest.raises(KeyError, match="my own"), model.summon_full_params():
        model.layers[0].weight.data.zero_()
        raise KeyError("my own")
    expected.layers[0].weight.data.zero_()
    assert_same_parameters(model, expected)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert_trains_as(model, expected)


@pytest.mark.parametrize("front_end", ["compiled", "eager", "torch.compile"])
@on_ranks(2)
def test_what_has_no_meaning_inside_is_refused(world_size, front_end):
    model = compiled(nn.Linear(2, 2)) if front_end == "compiled" else shard(nn.Linear(2, 2))
    called = model
    if front_end == "torch.compile":  # which traces the call of the model
        called = torch.compile(model, backend=backend_of(model))
    x = torch.ones(3, 2)
    called(x).sum().backward()
    refused = {
        "the model": lambda: called(x),
        "summon_full_params": lambda: model.summon_full_params().__enter__(),
        "clip_grad_norm_": lambda: model.clip_grad_norm_(1.0),
        "copy.deepcopy of the model": lambda: copy.deepcopy(model),
        "pickling the model": lambda: pickle.dumps(model),
    }
    with model.summon_full_params():
        for what, call in refused.items():
            with pytest.raises(RuntimeError, match=f"{what} was called inside summon_full_params"):
                call()
    called(x).sum().backward()


@on_ranks(2)
def test_full_parameters_in_the_middle_of_a_step_are_refused(world_size):
    model = shard(build("odd_mlp"))

    def summon(*_):
        with model.summon_full_params():
            raise AssertionError("it was not refused")

    handle = model.layers[0].register_forward_hook(summon)
    with pytest.raises(RuntimeError, match="in a forward or a backward"):
        model(*batch_of_rank(model, 0))
    handle.remove()
    loss = model(*batch_of_rank(model, 0))
    model.layers[0].weight.register_hook(summon)
    with pytest.raises(RuntimeError, match="in a forward or a backward"):
        loss.backward()


@on_ranks(2)
def test_a_parameter_replaced_inside_is_refused_and_the_others_are_written(world_size):
    expected, model = build("odd_mlp"), shard(build("odd_mlp"))
    full = build("odd_mlp", seed=1).state_dict()
    with pytest.raises(RuntimeError, match="layers.0.weight: replaced inside"), model.summon_full_params():
        model.layers[0].weight = nn.Parameter(full["layers.0.weight"])
        model.layers[0].bias.data.zero_()
    expected.layers[0].bias.data.zero_()
    assert_same_parameters(model, expected)

    with pytest.raises(RuntimeError, match=r"layers.0.weight has shape \(7, 1\) at"), model.summon_full_params():
        model.layers[0].weight.data = torch.zeros(7, 1)
    assert_same_parameters(model, expected)


@on_ranks(2)
def test_a_model_made_on_the_meta_device_is_reset_as_the_unsharded_model(world_size):
    expected = build("odd_mlp")
    reset(expected, seed=5)
    with torch.device("meta"):
        model = build("odd_mlp")
    compiled(model)
    with pytest.raises(RuntimeError, match="layers.0.weight has no values on the meta device: call model.to_empty"):
        model.summon_full_params().__enter__()
    model.to_empty(device=DEVICE)
    with model.summon_full_params():
        reset(model, seed=5)
    assert_trains_as(model, expected)


@pytest.mark.parametrize("writeback", [True, False])
def test_a_single_process_has_the_same_context(writeback):
    expected, model = build("odd_parameters"), compiled(build("odd_parameters"))
    for network in (expected, model):
        network(*network.inputs(4, seed=0)).backward()
    with model.summon_full_params(writeback=writeback, with_grads=True):
        assert_is_full(model, expected)
        model.weight.data.zero_()
        model.weight.grad.zero_()
        with pytest.raises(RuntimeError, match="the model was called inside summon_full_params"):
            model(*model.inputs(4, seed=0))
    if writeback:
        expected.weight.data.zero_()
        expected.weight.grad.zero_()
    assert_same_parameters(model, expected)
    assert_same_gradients(model, expected)


def test_options_that_are_no_bools():
    model = shard(build("odd_mlp"))
    with pytest.raises(ConfigError, match="writeback is a bool, not 'yes'"):
        model.summon_full_params(writeback="yes")


# Full tensors in load_state_dict


@pytest.mark.parametrize("assign", [False, True])
@both_front_ends
@on_ranks(3)
def test_a_full_state_dict_loads_on_every_rank(world_size, front_end, assign):
    model = front_end(build("odd_parameters", seed=1))
    model(*batch_of_rank(model, 0)).backward()  # compiled before it is loaded
    model.zero_grad()
    outer = nn.ModuleDict({"model": model})  # names get a prefix
    for _ in range(2):
        full = {f"model.{name}": value for name, value in build("odd_parameters").state_dict().items()}
        assert str(outer.load_state_dict(full, assign=assign)) == "<All keys matched successfully>"
    assert_trains_as(model, build("odd_parameters"))


@on_ranks(2)
def test_loading_what_does_not_fit(world_size):
    expected, model = build("odd_mlp").state_dict(), shard(build("odd_mlp", seed=1))
    part = {name: value for name, value in expected.items() if name.startswith("layers.0.")}
    missing, unexpected = model.load_state_dict(part | {"other": torch.zeros(1)}, strict=False)
    assert missing == [name for name in expected if name not in part]
    assert unexpected == ["other"]
    left = {name: value for name, value in build("odd_mlp", seed=1).state_dict().items() if name not in part}
    assert_same_tensors({name: value.full_tensor() for name, value in model.state_dict().items()}, part | left)

    with pytest.raises(RuntimeError, match="size mismatch for layers.0.weight"):
        model.load_state_dict(expected | {"layers.0.weight": torch.zeros(7, 4)})
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(part)


@on_ranks(2)
def test_a_full_state_dict_of_another_dtype(world_size):
    """Copied, it is converted; assigned, it brings its dtype, as in the unsharded model."""
    full = {name: value.double() for name, value in build("odd_mlp").state_dict().items()}
    for assign in (False, True):
        expected, model = build("odd_mlp", seed=1), compiled(build("odd_mlp", seed=1))
        for network, batch in ((expected, global_batch), (model, batch_of_rank)):
            network.load_state_dict(full, assign=assign)
            dtype = torch.float64 if assign else torch.float32
            assert {parameter.dtype for parameter in network.parameters()} == {dtype}
            network(*(tensor.to(dtype) for tensor in batch(network, 0))).backward()
        assert_same_gradients(model, expected)
