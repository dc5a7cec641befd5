"""state_dict, distributed checkpoints, and writing into parameters."""

import contextlib
import copy
import gc
import io
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from fsdp_compile import ConfigError, shard
from tests.distributed.training import (
    STEPS,
    adamw,
    assert_same_gradients,
    assert_same_parameters,
    assert_trains_as,
    backward_of_both,
    batch_of_rank,
    both_front_ends,
    compiled,
    full_parameters,
    global_batch,
    hybrid_mesh,
    load_checkpoint,
    save_checkpoint,
    sgd,
    take_step,
    train,
    train_unsharded,
)
from tests.models import build
from tests.ranks import on_ranks, run_on_ranks


@on_ranks(2)
def test_state_dict_has_the_original_names_and_dtensors(world_size):
    expected, model = build("gpt").state_dict(), compiled(build("gpt")).state_dict()
    assert list(model) == list(expected)
    for name, value in model.items():
        assert isinstance(value, DTensor), name
        assert torch.equal(value.full_tensor(), expected[name]), name


@both_front_ends
@on_ranks(2)
def test_a_state_dict_is_saved_by_torch_and_copied(world_size, front_end):
    """Wherever in its shard a parameter begins; what is in the dictionary is the memory of the model all the same."""
    trained, model = front_end(build("odd_parameters")), front_end(build("odd_parameters", seed=1))
    train(trained, adamw(trained.parameters()), STEPS)
    state = trained.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    copied = copy.deepcopy(state)
    train(trained, adamw(trained.parameters()), STEPS)
    for key, parameter in trained.named_parameters():
        assert torch.equal(state[key].full_tensor(), parameter.detach().full_tensor()), key

    for saved in (torch.load(file), copied):
        model.load_state_dict(saved)
        train(model, adamw(model.parameters()), STEPS)
        assert_same_parameters(model, trained)


@both_front_ends
@pytest.mark.parametrize("assign", [False, True])
@on_ranks(2)
def test_loading_another_models_state_trains_on_from_it(world_size, assign, front_end):
    donor = shard(build("odd_mlp"))
    model = front_end(build("odd_mlp", seed=1))
    model(*batch_of_rank(model, 0)).backward()  # compiled before it is loaded
    model.zero_grad()
    model.load_state_dict(donor.state_dict(), assign=assign)
    assert_trains_as(model, build("odd_mlp"))


@both_front_ends
@on_ranks(2)
def test_training_goes_on_from_a_checkpoint_of_model_and_optimizer(world_size, front_end, tmp_path):
    expected, _ = train_unsharded("odd_parameters", range(6))
    model = front_end(build("odd_parameters"))
    optimizer = adamw(model.parameters())
    train(model, optimizer, range(3))
    save_checkpoint(tmp_path, model, optimizer)

    model = front_end(build("odd_parameters", seed=1))
    optimizer = adamw(model.parameters())
    load_checkpoint(tmp_path, model, optimizer)
    train(model, optimizer, range(3, 6))
    assert_same_parameters(model, expected)


@on_ranks(2)
def test_a_full_state_dict_goes_in_and_out(world_size):
    expected = build("gpt").state_dict()
    model = compiled(build("gpt", seed=1))
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, copy.deepcopy(expected), options=options)
    state = get_model_state_dict(model, options=options)
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], value) for name, value in expected.items())


# Conversions that replace the parameters' storage: the DTensors and the shards behind them still agree.


@both_front_ends
@on_ranks(2)
def test_a_model_converted_after_sharding(world_size, front_end):
    expected, model = build("odd_mlp").double(), front_end(build("odd_mlp"))
    model(*batch_of_rank(model, 0)).backward()  # compiled for float32
    model.zero_grad()
    model.double()
    for network, batch in ((expected, global_batch(expected, 1)), (model, batch_of_rank(model, 1))):
        network(*(tensor.double() for tensor in batch)).backward()
    assert_same_gradients(model, expected)


@both_front_ends
@pytest.mark.parametrize("is_called_before", [False, True])
@on_ranks(2)
def test_a_deep_copy_is_another_model(world_size, is_called_before, front_end):
    trained, _ = train_unsharded("odd_mlp", STEPS)
    model = front_end(build("odd_mlp"))
    if is_called_before:
        model(*batch_of_rank(model, 0)).backward()
        model.zero_grad()
    copied = copy.deepcopy(model)
    train(copied, adamw(copied.parameters()), STEPS)
    assert_same_parameters(copied, trained)
    assert_same_parameters(model, build("odd_mlp"))


@both_front_ends
@pytest.mark.parametrize("schedule", [{}, {"hardware": "h100", "memory_budget": "1 GiB"}], ids=["options", "planned"])
@on_ranks(2)
def test_a_dropped_model_frees_its_parameters(world_size, schedule, front_end):
    model = front_end(build("odd_mlp"), **schedule)
    model(*batch_of_rank(model, 0)).backward()
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    del model
    torch._dynamo.reset()
    gc.collect()
    assert [reference() for reference in parameters] == [None] * len(parameters)


# Rows of another rank


def written_by_the_first_rank(value):
    """What every rank reads from a file that the first one wrote."""
    file = io.BytesIO()
    torch.save(value, file)
    files = [file.getvalue()]
    dist.broadcast_object_list(files)
    return torch.load(io.BytesIO(files[0]))


def refused_unless(is_own, words=r"has the rows of rank 0 \(part 1 of 2\), and is loaded on rank \d \(part 2 of 2\): "):
    return contextlib.nullcontext() if is_own else pytest.raises(ConfigError, match=words)


def local_values(model):
    return [parameter.to_local().clone() for parameter in model.parameters()]


def below(state, prefix):
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


LOADS = {
    "all": lambda model, state: model.load_state_dict(state),
    "assigned": lambda model, state: model.load_state_dict(state, assign=True),
    "a copy": lambda model, state: model.load_state_dict(copy.deepcopy(state)),
    "one of many": lambda model, state: model.load_state_dict(
        below(state, "x") | dict([*state.items()][2:3]), strict=False
    ),
    "a layer": lambda model, state: model.layers[2].load_state_dict(below(state, "layers.2.")),
    "a container": lambda model, state: model.layers.load_state_dict(below(state, "layers.")),
    "a wrapper": lambda model, state: nn.Sequential(model).load_state_dict(
        {f"0.{name}": state[name] for name in state}
    ),
    "torch.distributed": lambda model, state: set_model_state_dict(model, state),
}


@on_ranks(2)
def test_a_state_dict_of_another_rank_is_refused_before_anything_is_loaded(world_size):
    donor = shard(build("odd_mlp", seed=1))
    of_first, own = written_by_the_first_rank(donor.state_dict()), copy.deepcopy(donor.state_dict())
    for load in LOADS.values():
        model = shard(build("odd_mlp"))
        before = local_values(model)
        with refused_unless(dist.get_rank() == 0):
            load(model, of_first)
        assert dist.get_rank() == 0 or all(map(torch.equal, local_values(model), before))
        load(model, own)
        load(model, {name: value.full_tensor() for name, value in own.items()})
    assert_same_parameters(model, donor)


@on_ranks(2)
def test_what_every_rank_holds_whole_is_loaded_from_any(world_size):
    for name, options in (("odd_mlp", {"sharding_strategy": ShardingStrategy.NO_SHARD}), ("odd_parameters", {})):
        donor, model = shard(build(name, seed=1), **options), shard(build(name), **options)
        state = donor.state_dict()
        whole = {key: value for key, value in state.items() if not options and value.dim() == 0 or options}
        assert whole
        model.load_state_dict(written_by_the_first_rank(whole), strict=False)
        loaded = full_parameters(model)
        assert all(torch.equal(loaded[key], value.full_tensor()) for key, value in whole.items())
    mesh = next(model.parameters()).device_mesh
    replicated = {key: distribute_tensor(value.full_tensor(), mesh, [Replicate()]) for key, value in state.items()}
    model.load_state_dict(written_by_the_first_rank(replicated))
    assert_same_parameters(model, donor)


def optimizer_with_a_momentum(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


@on_ranks(2)
def test_an_optimizers_state_of_another_rank_is_refused_before_a_step(world_size):
    for make in (adamw, optimizer_with_a_momentum, torch.optim.Muon if hasattr(torch.optim, "Muon") else adamw):
        model = shard(build("gpt"))
        parameters = [parameter for parameter in model.parameters() if parameter.dim() == 2]
        optimizer = make(parameters)
        train(model, optimizer, range(1))
        own = copy.deepcopy(optimizer.state_dict())
        of_first = written_by_the_first_rank(own)
        model(*batch_of_rank(model, 1)).backward()
        for loading in (optimizer, make(parameters)):  # one that has made a step, and a new one
            before = local_values(model)
            for _ in range(2):  # it says so again
                loading.load_state_dict(of_first)
                if dist.get_rank() > 0:
                    with refused_unless(is_own=False):
                        loading.step()
            assert all(map(torch.equal, local_values(model), before))
            loading.load_state_dict(own)
            loading.step()


@on_ranks(4)
def test_a_state_dict_of_another_number_of_ranks_is_refused(world_size):
    """On a mesh of two dimensions several ranks have equal rows, and may read them from each other's files."""
    rank = dist.get_rank()
    hybrid = hybrid_mesh()
    on_four, on_hybrid = shard(build("odd_mlp", seed=1)), shard(build("odd_mlp", seed=1), hybrid)
    of_hybrid = written_by_the_first_rank(on_hybrid.state_dict())
    model = shard(build("odd_mlp"), hybrid)
    with refused_unless(rank % 2 == 0):
        model.load_state_dict(of_hybrid)
    assert rank % 2 or all(map(torch.equal, local_values(model), local_values(on_hybrid)))
    with refused_unless(
        False, rf"rows of rank {rank} \(part {rank + 1} of 4\), and is .* \(part {rank % 2 + 1} of 2\)"
    ):
        model.load_state_dict(copy.deepcopy(on_four.state_dict()))


def saved_state(path):
    if dist.get_rank() == 0:
        torch.save(shard(build("odd_mlp")).state_dict(), path)
    else:
        shard(build("odd_mlp"))


def test_a_single_rank_refuses_a_state_dict_of_one_of_several(tmp_path):
    run_on_ranks(2, saved_state, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")
    with pytest.raises(ConfigError, match=r"rows of rank 0 \(part 1 of 2\), .* on rank 0 \(the whole tensor\): a file"):
        shard(build("odd_mlp")).load_state_dict(state)


@both_front_ends
@on_ranks(2)
def test_what_is_assigned_to_data_is_what_trains(world_size, front_end):
    expected, model = build("odd_mlp"), front_end(build("odd_mlp"))
    donor = shard(build("odd_mlp", seed=1))
    for step in STEPS:
        backward_of_both(model, expected, step)
        for parameter, other, of_expected in zip(
            model.parameters(), donor.parameters(), expected.parameters(), strict=True
        ):
            of_expected.grad.data = of_expected.grad * 2
            parameter.grad.data = parameter.grad * 2
            if step == 1:
                of_expected.data = other.full_tensor().clone()
                parameter.data = other.clone()
                assert torch.equal(parameter.data.full_tensor(), other.full_tensor())
        for each in (model, expected):
            optimizer = sgd(each.parameters())
            take_step([optimizer])
    assert_same_parameters(model, expected)


@on_ranks(2)
def test_what_cannot_be_a_parameters_data_is_refused(world_size):
    model = shard(build("odd_mlp"))
    parameter = next(model.parameters())
    before = parameter.full_tensor().clone()
    with pytest.raises(TypeError, match=r"a plain tensor was assigned to the \.data of a DTensor of shape"):
        parameter.data = torch.zeros(parameter.shape)
    with pytest.raises(TypeError, match="redistribute it first"):
        parameter.data = distribute_tensor(torch.zeros(parameter.shape), parameter.device_mesh, [Replicate()])
    assert torch.equal(parameter.full_tensor(), before)
