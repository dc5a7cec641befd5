"""FSDP1's variable FSDP_USE_FULL_PREC_IN_EVAL: in evaluation mode, units compute in the dtype of parameters."""

import contextlib
import copy
import functools
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks.default_hooks import LowPrecisionState, bf16_compress_hook
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_compile import ConfigError
from fsdp_compile.compat import FullyShardedDataParallel as FSDP
from fsdp_compile.passes import ops
from tests.distributed.training import full, saved_and_loaded
from tests.models import seeded
from tests.ranks import on_ranks

wrapped = functools.partial(FSDP, backend="aot_eager")
bf16 = torch.bfloat16
LOW = MixedPrecision(param_dtype=bf16, reduce_dtype=bf16, buffer_dtype=bf16)


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=0.0)
        self.register_buffer("offset", torch.full((4,), 0.25))

    def forward(self, x):
        return self.norm(self.linear(x)) + self.offset


class Model(nn.Module):
    """Casts what the second part is called with, if it is told to."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Part(), Part()

    def forward(self, x, dtype=None):
        x = self.first(x)
        return self.second(x if dtype is None else x.to(dtype))


def made():
    torch.manual_seed(0)
    return Model()


@contextlib.contextmanager
def full_in_evaluation():
    os.environ["FSDP_USE_FULL_PREC_IN_EVAL"] = "1"
    try:
        yield
    finally:
        del os.environ["FSDP_USE_FULL_PREC_IN_EVAL"]


def by_policy(mixed):
    return wrapped(made(), auto_wrap_policy=ModuleWrapPolicy({Part}), mixed_precision=mixed)


def nested(mixed):
    model = made()
    model.first, model.second = (wrapped(part, mixed_precision=mixed) for part in (model.first, model.second))
    return wrapped(model, mixed_precision=mixed)


def as_one(mixed):
    return wrapped(made(), mixed_precision=mixed)


def inputs():
    return torch.randn(8, 4, generator=seeded(dist.get_rank() if dist.is_initialized() else 0))


def gathered(model):
    """In which dtypes the last graph gathers what."""
    return {node.meta["val"].dtype for node in model.graphs[-1].forward.graph.nodes if ops.is_all_gather(node)}


def buffers(model):
    return {name: buffer.dtype for name, buffer in model.named_buffers() if name.endswith("offset")}


def assert_full_in_evaluation(model, plain):
    """And in low precision in training; `plain` has no mixed precision."""
    x = inputs()
    for each in (model, plain):
        each.eval()
    for _ in range(2):
        model.eval()
        assert torch.equal(model(x), plain(x))
        assert set(buffers(model).values()) == {torch.float32}
        model.train()
        assert model(x).dtype == bf16
        assert set(buffers(model).values()) == {bf16}
    plain.train()


@pytest.mark.parametrize("make", [by_policy, nested, as_one])
@on_ranks(1, 2)
def test_evaluation_is_that_without_mixed_precision(world_size, make):
    with full_in_evaluation():
        model = make(LOW)
    other, plain = make(LOW), make(MixedPrecision())
    for each in (model, plain):
        each.eval()
        each(inputs()).square().sum().backward()
    for (name, parameter), wanted in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(full(parameter.grad), full(wanted[1].grad)), name
    if world_size > 1:
        assert gathered(model) == {torch.float32}
    assert_full_in_evaluation(model, plain)
    assert len(model.graphs) == 2  # for evaluation and for training
    other.eval()
    assert other(inputs()).dtype == bf16 and set(buffers(other).values()) == {bf16}


@on_ranks(1, 2)
def test_nothing_but_the_mode_tells_graphs_apart(world_size):
    with full_in_evaluation():
        model = wrapped(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mixed_precision=LOW)
    for mode, dtype in 2 * [(True, bf16), (False, torch.float32)]:
        assert model.train(mode)(inputs()).dtype == dtype
    assert len(model.graphs) == 2


@pytest.mark.parametrize("make", [by_policy, nested])
@on_ranks(1, 2)
def test_each_unit_has_a_mode_of_its_own(world_size, make):
    with full_in_evaluation():
        model = make(LOW)
    model.second.eval()
    assert model(inputs(), torch.float32).dtype == torch.float32
    if world_size > 1:
        assert gathered(model) == {bf16, torch.float32}
    model.second.train()
    model.second.norm.eval()  # a module of a unit has none
    assert model(inputs()).dtype == bf16


@on_ranks(2)
def test_unsharding_by_hand_goes_by_the_mode(world_size):
    with full_in_evaluation():
        model = by_policy(LOW)
    for mode, dtype in 2 * [(True, bf16), (False, torch.float32)]:
        model.train(mode).unshard()
        assert model.first.linear.weight.dtype == dtype
        model.reshard()


@on_ranks(1, 2)
def test_copies_and_models_from_files_go_on_so(world_size):
    with full_in_evaluation():
        model = nested(LOW)
    model.eval()
    model(inputs())
    plain = nested(MixedPrecision())
    for other in (copy.deepcopy(model), saved_and_loaded(model)):
        assert_full_in_evaluation(other, plain)
    assert_full_in_evaluation(model, plain)


@on_ranks(2)
def test_a_hook_casts_reductions_in_evaluation_too(world_size):
    with full_in_evaluation():
        model = nested(LOW)
    expected = nested(MixedPrecision(reduce_dtype=bf16))
    model.register_comm_hook(LowPrecisionState(dist.group.WORLD), bf16_compress_hook)
    for each in (model, expected):
        each.eval()
        each(inputs()).square().sum().backward()
    for parameter, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(full(parameter.grad), full(wanted.grad))


@on_ranks(2)
def test_gradients_that_stay_in_low_precision_are_refused(world_size):
    with (
        full_in_evaluation(),
        pytest.raises(ConfigError, match="keep_low_precision_grads .* FSDP_USE_FULL_PREC_IN_EVAL"),
    ):
        wrapped(made(), mixed_precision=MixedPrecision(param_dtype=bf16, keep_low_precision_grads=True))
