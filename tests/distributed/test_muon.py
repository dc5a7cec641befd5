"""torch.optim.Muon: each sharded matrix is orthogonalized by one rank, and all train as without sharding."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_map_only

from fsdp_compile import RankError, shard
from fsdp_compile.runtime import muon
from tests.distributed.training import (
    STEPS,
    NoDTensors,
    batch_of_rank,
    compiled,
    full,
    global_batch,
    hybrid_mesh,
    load_checkpoint,
    save_checkpoint,
    saved_and_loaded,
    take_step,
    train,
)
from tests.models import DEVICE, build
from tests.ranks import on_ranks, run_on_ranks, run_until_parted

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")

OPTIONS = {
    "default": {},
    "nesterov_off": {"nesterov": False, "momentum": 0.5},
    "adamw_rate": {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3, "weight_decay": 0.3},
    "rate_in_a_tensor": {"lr": torch.tensor(0.02), "eps": 1e-3},
}


def matrices(model):
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


def muon_of(model, **options):
    return torch.optim.Muon(matrices(model), **{"lr": 0.02, **options})


def set_gradients(model, step):
    """The same in every model; on a sharded one each rank gets its part, to the last bit."""
    for number, parameter in enumerate(matrices(model)):
        torch.manual_seed(100 * step + number)
        gradient = torch.randn(parameter.shape)
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = gradient


def assert_steps_are_equal(model, expected, optimizer, expected_optimizer, steps=STEPS):
    """From the same gradients, bit by bit, and no DTensor computes anything once states are there."""
    for step in steps:
        for found in (model, expected):
            set_gradients(found, step)
        if step:
            with NoDTensors():
                optimizer.step()
        else:
            optimizer.step()
        expected_optimizer.step()
    for parameter, of_expected in zip(matrices(model), matrices(expected), strict=True):
        assert_equal(parameter.detach(), of_expected)
        momentum = optimizer.state[parameter]["momentum_buffer"]
        assert isinstance(momentum, DTensor) == isinstance(parameter, DTensor)
        assert_equal(momentum, expected_optimizer.state[of_expected]["momentum_buffer"])


def assert_equal(actual, expected):
    torch.testing.assert_close(full(actual), expected.detach(), rtol=0, atol=0)


class Matrices(nn.Module):
    """Tall, wide and square ones; of four ranks not all have rows of each, and large ones are in several batches."""

    shapes = ((7, 5), (3, 9), (1, 6), (64, 64), (2, 2), (33, 16))

    def __init__(self):
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in self.shapes)
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return sum((parameter * x).square().mean() for parameter in self.layers) + self.bias.sum()


class EvenMatrices(Matrices):
    """What torch's own step of DTensors can do as well."""

    shapes = ((8, 6), (4, 4), (16, 32))


def matrices_model(kind=Matrices):
    torch.manual_seed(0)
    return kind()


@pytest.mark.parametrize("options", OPTIONS)
@on_ranks(2, 4)
def test_steps_of_muon_are_bitwise_those_of_unsharded_matrices(world_size, options):
    expected, model = matrices_model(), shard(matrices_model(), auto_wrap_policy=[])
    optimizers = [muon_of(found, **OPTIONS[options]) for found in (model, expected)]
    assert_steps_are_equal(model, expected, *optimizers)


@on_ranks(2, 4)
def test_batches_that_overlap_are_bitwise_those_of_unsharded_matrices(world_size):
    least, muon._BATCH_COST = muon._BATCH_COST, 1  # a batch begins with every matrix as large as the largest
    muon.batches_of.cache_clear()
    try:
        torch.manual_seed(0)
        expected = nn.Sequential(*(nn.Linear(12, 12, bias=False) for _ in range(11)))
        model = shard(copy.deepcopy(expected), auto_wrap_policy=[])
        assert len(muon.batches_of(((12, 12),) * 11, world_size)) == math.ceil(11 / world_size)
        assert_steps_are_equal(model, expected, muon_of(model), muon_of(expected))
    finally:
        muon._BATCH_COST = least
        muon.batches_of.cache_clear()


@pytest.mark.parametrize("front_end", [compiled, shard], ids=["compiled", "eager"])
@on_ranks(2)
def test_muon_trains_a_model_as_without_sharding(world_size, front_end):
    expected, model = build("gpt"), front_end(build("gpt"))
    losses = train(model, muon_of(model), STEPS)
    expected_losses = train(expected, muon_of(expected), STEPS, batch=global_batch)
    dist.all_reduce(losses)
    # Newton-Schulz in bfloat16 makes more of the last bit of a gradient than its own.
    torch.testing.assert_close(losses / world_size, expected_losses, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "NO_SHARD"])
@on_ranks(4)
def test_matrices_on_a_mesh_of_two_dimensions(world_size, strategy):
    expected = matrices_model()
    mesh = hybrid_mesh() if strategy == "HYBRID_SHARD" else None
    model = shard(
        matrices_model(), auto_wrap_policy=[], mesh=mesh, sharding_strategy=getattr(ShardingStrategy, strategy)
    )
    assert_steps_are_equal(model, expected, muon_of(model), muon_of(expected))


def placed_matrices(placements_of_index, mesh, kind=Matrices):
    """Matrices that are sharded otherwise, behind a model of ours: the hook is there for all of the process."""
    model = matrices_model(kind)
    for index, parameter in enumerate(model.layers):
        placements = placements_of_index(index)
        distributed = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
        model.layers[index] = nn.Parameter(distributed)
    return model


@on_ranks(2, 4)
def test_columns_and_whole_matrices_and_plain_tensors(world_size):
    shard(build("odd_mlp"))
    mesh = init_device_mesh(DEVICE.type, (world_size,))
    expected, model = (
        matrices_model(),
        placed_matrices(lambda index: [(Shard(1), Replicate(), Shard(0))[index % 3]], mesh),
    )
    optimizers = []
    for found in (model, expected):
        found.extra = nn.Parameter(torch.ones(4, 3))
        optimizers.append(muon_of(found))
    assert_steps_are_equal(model, expected, *optimizers)


@on_ranks(4)
def test_matrices_sharded_along_two_axes_are_computed_with_dtensors(world_size):
    shard(build("odd_mlp"))
    mesh = init_device_mesh(DEVICE.type, (2, 2))
    expected = matrices_model(EvenMatrices)
    model = placed_matrices(lambda index: [Shard(0), Shard(1)], mesh, EvenMatrices)
    optimizers = [muon_of(found) for found in (model, expected)]
    for found in (model, expected):
        set_gradients(found, 0)
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(full(model.layers[2].detach()), expected.layers[2].detach(), rtol=2e-2, atol=2e-2)


@on_ranks(2)
def test_frozen_matrices_and_groups(world_size):
    expected, model = matrices_model(), shard(matrices_model(), auto_wrap_policy=[])
    optimizers = []
    for found in (model, expected):
        first, second, *others = matrices(found)
        groups = [{"params": [first, second], "lr": 0.1}, {"params": others, "nesterov": False}]
        optimizers.append(torch.optim.Muon(groups, lr=0.02))
    for step in STEPS:
        for found in (model, expected):
            set_gradients(found, step)
            matrices(found)[step].grad = None
            if step == 3:
                for parameter in matrices(found)[:2]:
                    parameter.grad = None  # a group without any
        for optimizer in optimizers:
            optimizer.step()
    for parameter, of_expected in zip(matrices(model), matrices(expected), strict=True):
        assert_equal(parameter.detach(), of_expected)


@on_ranks(2)
def test_a_step_of_muon_calls_its_closure_once(world_size):
    model, calls = compiled(build("odd_mlp")), []
    optimizer = muon_of(model)

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = model(*batch_of_rank(model, 0))
        loss.backward()
        return loss

    before = full(matrices(model)[0].detach()).clone()
    assert optimizer.step(closure).item() > 0
    assert calls == [1]
    assert not torch.equal(full(matrices(model)[0].detach()), before)


@on_ranks(2)
def test_gradients_of_another_placement_are_still_computed(world_size):
    expected, model = (matrices_model(EvenMatrices) for _ in range(2))
    shard(model, auto_wrap_policy=[])
    optimizers = [muon_of(found) for found in (model, expected)]
    for found in (model, expected):
        set_gradients(found, 0)
    for parameter in matrices(model):
        parameter.grad = parameter.grad.redistribute(placements=[Replicate()])
    for optimizer in optimizers:
        optimizer.step()
    for parameter, of_expected in zip(matrices(model), matrices(expected), strict=True):
        torch.testing.assert_close(full(parameter.detach()), of_expected.detach(), rtol=2e-2, atol=2e-2)


@on_ranks(2)
def test_muon_is_saved_and_copied_as_any_other(world_size):
    expected, model = matrices_model(), shard(matrices_model(), auto_wrap_policy=[])
    optimizer, expected_optimizer = muon_of(model), muon_of(expected)
    assert_steps_are_equal(model, expected, optimizer, expected_optimizer, steps=[0, 1])
    assert optimizer.__getstate__().keys() == {"defaults", "state", "param_groups"}

    state = saved_and_loaded(get_optimizer_state_dict(model, optimizer))
    again = muon_of(model)
    set_optimizer_state_dict(model, again, state)
    assert_steps_are_equal(model, expected, again, expected_optimizer, steps=[2])

    copied = copy.deepcopy(model)
    optimizer = muon_of(copied)
    # load_state_dict takes the tensors that it is given
    optimizer.load_state_dict(tree_map_only(torch.Tensor, torch.clone, again.state_dict()))
    assert_steps_are_equal(copied, expected, optimizer, expected_optimizer, steps=[3])


def save_after_a_step(path):
    model = shard(matrices_model(), auto_wrap_policy=[])
    optimizer = muon_of(model)
    set_gradients(model, 0)
    take_step([optimizer])
    save_checkpoint(path, model, optimizer)


def load_and_take_a_step(path):
    model = shard(matrices_model(), auto_wrap_policy=[])
    optimizer = muon_of(model)
    load_checkpoint(path, model, optimizer)
    set_gradients(model, 1)
    optimizer.step()
    return {name: full(parameter.detach()) for name, parameter in model.named_parameters()}


def test_a_checkpoint_with_muon_on_another_number_of_ranks(tmp_path):
    run_on_ranks(2, save_after_a_step, tmp_path)
    found = run_on_ranks(4, load_and_take_a_step, tmp_path)
    expected = matrices_model()
    optimizer = muon_of(expected)
    for step in (0, 1):
        set_gradients(expected, step)
        optimizer.step()
    for values in found:
        for name, parameter in expected.named_parameters():
            assert_equal(values[name], parameter)


@on_ranks(2)
def test_a_compiled_step_of_muon(world_size):
    expected, model = (matrices_model(EvenMatrices) for _ in range(2))
    shard(model, auto_wrap_policy=[])
    optimizers = [muon_of(found) for found in (model, expected)]
    step = torch.compile(optimizers[0].step, backend="aot_eager")
    for number in (0, 1):
        for found in (model, expected):
            set_gradients(found, number)
        step()
        optimizers[1].step()
    for parameter, of_expected in zip(matrices(model), matrices(expected), strict=True):
        torch.testing.assert_close(full(parameter.detach()), of_expected.detach(), rtol=2e-2, atol=2e-2)


def step_with_other_gradients():
    model = shard(matrices_model(), auto_wrap_policy=[])
    set_gradients(model, 0)
    if dist.get_rank() == 1:
        matrices(model)[3].grad = None
    try:
        muon_of(model).step()
    except RankError as e:
        return str(e)


def test_ranks_with_gradients_for_other_matrices_raise():
    for text in run_until_parted(2, step_with_other_gradients):
        assert "rank 0: the step of torch.optim.Muon of 6 matrices" in text
        assert "rank 1: the step of torch.optim.Muon of 5 matrices" in text


def test_owners_are_balanced_and_every_matrix_has_one():
    shapes = ((512, 512), (2048, 512), (512, 2048)) * 16
    batches = muon.batches_of(shapes, 8)
    owned = [[index for owners in batches for index in owners[rank]] for rank in range(8)]
    assert sorted(index for indices in owned for index in indices) == list(range(len(shapes)))
    loads = [sum(muon.newton_schulz_cost(shapes[index]) for index in indices) for indices in owned]
    assert max(loads) - min(loads) <= max(map(muon.newton_schulz_cost, shapes))


def test_newton_schulz_begins_and_ends_in_bfloat16():
    """So that what travels in bfloat16 is what it would be in float32."""
    torch.manual_seed(0)
    matrix = torch.randn(9, 6)
    arguments = ((3.4, -4.7, 2.0), 5, 1e-7)
    whole = muon._zeropower_via_newtonschulz(matrix, *arguments)
    assert whole.dtype == torch.bfloat16
    assert torch.equal(whole, muon._zeropower_via_newtonschulz(matrix.bfloat16(), *arguments))


def test_a_muon_with_other_options_is_left_alone():
    optimizer = muon_of(matrices_model())
    assert muon.is_muon(optimizer)
    optimizer.defaults["foreach"] = True
    assert not muon.is_muon(optimizer)
    assert not muon.is_muon(type("Own", (torch.optim.Muon,), {})([nn.Parameter(torch.ones(2, 2))]))
