"""check_gradients: what is not finite is found at the end of its backward, on every rank, by name."""

import copy

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compile import ConfigError, NonFiniteError, fsdp_compile
from tests.distributed.training import assert_trains_as, batch_of_rank, both_front_ends, compiled
from tests.models import DEVICE, build
from tests.ranks import on_ranks


def spoiled_batch(model, value):
    """The first batch, with a value among the features of the last rank."""
    x, target = batch_of_rank(model, 0)
    if dist.get_rank() == dist.get_world_size() - 1:
        x[0, 0] = value
    return x, target


def mesh_of(world_size):
    return init_device_mesh(DEVICE.type, (2, world_size // 2)) if world_size > 2 else None


@both_front_ends
@on_ranks(2, 4)
def test_a_gradient_that_is_not_finite_is_named_on_every_rank(world_size, front_end):
    model = front_end(build("odd_mlp"), mesh_of(world_size), check_gradients=True)
    loss = model(*spoiled_batch(model, float("nan")))
    with pytest.raises(NonFiniteError) as caught:
        loss.backward()
    said = str(caught.value)
    assert "backward number 1 since" in said and "in 6 of 6 parameters" in said
    assert "layers.0.weight (unit layers" in said and ": NaN" in said
    assert all(parameter.grad is not None for parameter in model.parameters())

    model.zero_grad()  # and it goes on as if nothing had been
    assert_trains_as(model, build("odd_mlp"), range(3))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@on_ranks(2)
def test_the_infinite_gradient_of_one_parameter_is_told_from_the_rest(world_size, backend):
    model = fsdp_compile(build("few_rows"), backend=backend, check_gradients=True)
    model.down.bias.register_hook(lambda gradient: gradient * float("inf"))  # it has one row, on the first rank
    loss = model(*batch_of_rank(model, 0))
    with pytest.raises(NonFiniteError, match=r"in 1 of 5 parameters:\n  down.bias \(unit down\): infinite$"):
        loss.backward()


@on_ranks(2)
def test_kept_gradients_are_checked_when_they_are_reduced(world_size):
    model = compiled(build("odd_mlp"), check_gradients=True)
    with model.no_sync():
        model(*spoiled_batch(model, float("inf"))).backward()
    with pytest.raises(NonFiniteError, match="number 2"):
        model(*batch_of_rank(model, 1)).backward()


@on_ranks(2)
def test_without_the_option_nothing_is_checked(world_size):
    model = compiled(build("odd_mlp"))
    model(*spoiled_batch(model, float("nan"))).backward()
    with pytest.raises(ConfigError, match="check_gradients is a bool, not 1"):
        fsdp_compile(build("odd_mlp"), check_gradients=1)


@both_front_ends
@on_ranks(1)
def test_a_single_rank_is_checked_too_and_so_is_its_copy(world_size, front_end):
    model = front_end(build("odd_mlp"), check_gradients=True)
    for each in (model, copy.deepcopy(model)):
        loss = each(*spoiled_batch(model, float("nan")))
        with pytest.raises(NonFiniteError, match=r"layers.0.weight \(unit layers"):
            loss.backward()
        each.zero_grad()
        each(*batch_of_rank(model, 0)).backward()


@on_ranks(2)
def test_an_error_in_a_backward_leaves_the_check_in_place(world_size):
    model = compiled(build("odd_mlp"), check_gradients=True)

    def fail(_):
        raise ValueError("a hook")

    handle = next(model.parameters()).register_hook(fail)
    with pytest.raises(ValueError, match="a hook"):
        model(*batch_of_rank(model, 0)).backward()
    handle.remove()
    loss = model(*spoiled_batch(model, float("nan")))
    with pytest.raises(NonFiniteError):
        loss.backward()
