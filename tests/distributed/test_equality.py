"""Ten steps of AdamW give the losses and parameters of the unsharded eager model."""

import pytest
import torch
import torch.distributed as dist

from fsdp_compile import fsdp_compile
from tests.distributed.training import (
    adamw,
    assert_close,
    assert_same_parameters,
    assert_trains_as,
    full,
    mean_over_ranks,
    train,
    train_replicas,
)
from tests.models import MODELS, build
from tests.ranks import on_ranks

STEPS = range(10)
NUM_GRAPHS = {"graph_break": 2}  # one for every other model
ROW_WISE = [name for name in MODELS if name != "conv_net"]  # loss of a batch = mean of the losses of its parts

all_backends = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])


@pytest.mark.parametrize("name", ROW_WISE)
@all_backends
@on_ranks(2)
def test_training_equals_the_unsharded_model(world_size, backend, name):
    model = fsdp_compile(build(name), backend=backend)
    assert_trains_as(model, build(name), STEPS)
    assert len(model.graphs) == NUM_GRAPHS.get(name, 1)


@pytest.mark.parametrize("name", ["odd_mlp", "few_rows", "odd_parameters"])
@all_backends
@on_ranks(4)
def test_training_where_some_ranks_have_no_rows_of_a_parameter(world_size, backend, name):
    test_training_equals_the_unsharded_model(world_size=world_size, backend=backend, name=name)


@pytest.mark.parametrize(("backend", "name"), [("aot_eager", "gpt"), ("inductor", "odd_mlp")])
@on_ranks(2)
def test_the_same_training_twice_is_equal_to_the_last_bit(world_size, backend, name):
    first, second = (fsdp_compile(build(name), backend=backend) for _ in range(2))
    losses = [train(model, adamw(model.parameters()), STEPS) for model in (first, second)]
    assert torch.equal(*losses)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one.to_local(), other.to_local())


# Each rank's BatchNorm sees that rank's rows only, as in FSDP2 and DDP. So the exact reference is not the
# model on the whole batch, but one unsharded model per rank, with averaged gradients and own statistics.
@all_backends
@on_ranks(2)
def test_training_with_batch_norm_equals_replicas_with_averaged_gradients(world_size, backend):
    replicas, expected_losses = train_replicas("conv_net", STEPS)
    expected = replicas[dist.get_rank()]

    model = fsdp_compile(build("conv_net"), backend=backend)
    losses = train(model, adamw(model.parameters()), STEPS)

    assert_close(mean_over_ranks(losses), expected_losses)
    assert_same_parameters(model, expected)
    assert_close(dict(model.named_buffers()), dict(expected.named_buffers()))
    assert not torch.equal(replicas[0].stem[1].running_mean, replicas[1].stem[1].running_mean)


@pytest.mark.parametrize("name", MODELS)
@on_ranks(1, 2)
def test_without_generated_code_gradients_are_those_of_eager_to_the_last_bit(world_size, name):
    """With the same rows on all ranks, whose mean is exact, and parameters as they lie in memory once gathered."""
    expected, model = build(name), fsdp_compile(build(name), backend="aot_eager")
    for parameter in expected.parameters() if world_size > 1 else ():
        parameter.data = parameter.data.contiguous()
    losses = [network(*network.inputs(4, seed=0)) for network in (expected, model)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for (parameter, one), other in zip(expected.named_parameters(), model.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), parameter
        assert one.grad is None or torch.equal(one.grad, full(other.grad)), parameter
