"""Adapters on frozen weights that torchao stores in NF4 (QLoRA) or int8: the stored parts are sharded and gathered."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.utils import parametrize
from torch.testing._internal.two_tensor import TwoTensor
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import NF4Tensor, linear_nf4, to_nf4

from fsdp_compile import ConfigError, fsdp_compile, rewrite, shard, unwrap_tensor_subclasses
from tests.distributed.training import full, gathered_dtypes, sgd, take_step
from tests.models import made, seeded
from tests.ranks import on_ranks


class Adapted(nn.Module):
    """A frozen linear layer beside a trained update of low rank."""

    def __init__(self, inputs, outputs, stored):
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
        if stored == "nf4":
            self.base.weight = nn.Parameter(to_nf4(self.base.weight.detach()), requires_grad=False)
        else:
            quantize_(self.base, Int8WeightOnlyConfig())
            self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)

    def forward(self, x):
        weight = self.base.weight
        base = linear_nf4(x, weight) if isinstance(weight, NF4Tensor) else F.linear(x, weight)
        return base + self.up(self.down(x))


class Net(nn.Module):
    def __init__(self, stored="nf4"):
        super().__init__()
        self.first, self.second, self.out = Adapted(128, 256, stored), Adapted(256, 128, stored), nn.Linear(128, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.second(torch.tanh(self.first(x))))).square().mean()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        weight = nn.Parameter(TwoTensor(torch.eye(6), torch.ones(6, 6)), requires_grad=False)
        self.first.weight = self.second.weight = weight

    def forward(self, x):
        return self.second(self.first(x))


WRAPPED = {"auto_wrap_policy": {Adapted}}


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def assert_trains_so(model, expected, **close):
    """Ranks have the same rows."""
    optimizers = sgd(trained(model)), sgd(trained(expected))
    for step in range(3):
        x = torch.randn(16, 128, generator=seeded(step))
        losses = model(x), expected(x)
        torch.testing.assert_close(*losses, **close)
        for loss in losses:
            loss.backward()
        for found, wanted in zip(trained(model), trained(expected), strict=True):
            torch.testing.assert_close(full(found.grad), wanted.grad, **close)
        take_step(optimizers)


@pytest.mark.parametrize("stored", ["nf4", "int8"])
@on_ranks(2)
def test_adapters_train_as_beside_the_whole_weights(world_size, stored):
    model = fsdp_compile(unwrap_tensor_subclasses(made(Net, stored)), backend="aot_eager", **WRAPPED)
    expected = made(Net, stored)
    assert_trains_so(model, expected, rtol=0, atol=0)
    assert len(model.graphs) == 1
    narrow = {torch.uint8, torch.int8} if stored == "nf4" else {torch.int8}
    for side in model.graphs[0].sides:
        assert gathered_dtypes(side) >= narrow
    held = sum(parameter.to_local().nbytes for name, parameter in model.named_parameters() if "original" in name)
    whole = sum(module.base.weight.numel() for module in (expected.first, expected.second))
    assert held < (0.56 if stored == "nf4" else 1.05) * whole / world_size + 1024


@on_ranks(3)
def test_inductor_generates_the_same(world_size):
    model = fsdp_compile(unwrap_tensor_subclasses(made(Net)), **WRAPPED)
    assert_trains_so(model, made(Net), rtol=1e-5, atol=1e-7)


@on_ranks(2)
def test_outside_of_a_forward_a_rank_reads_prints_and_copies_them_by_itself(world_size):
    model = shard(unwrap_tensor_subclasses(made(Net, "int8")), **WRAPPED)
    if torch.distributed.get_rank() == 0:
        assert "OfParts(Int8Tensor)" in str(model)
        assert isinstance(model.first.base.weight, type(made(Net, "int8").first.base.weight))
    saved = {name: full(value) for name, value in copy.deepcopy(model).state_dict().items()}
    for name, value in unwrap_tensor_subclasses(made(Net, "int8")).state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=0, atol=0)
    model.load_state_dict(model.state_dict())
    assert_trains_so(model, made(Net, "int8"), rtol=1e-5, atol=1e-7)


@on_ranks(2)
def test_no_policy_casts_the_parts_of_a_weight(world_size):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model, expected = unwrap_tensor_subclasses(made(Net)), made(Net)
    model = fsdp_compile(model, mp_policy=policy, backend="aot_eager", **WRAPPED)
    for each in trained(expected):
        each.data = each.data.bfloat16()
    x = torch.randn(16, 128, generator=seeded(0))
    torch.testing.assert_close(model(x), expected(x.bfloat16()), rtol=0, atol=0)


def test_the_printed_forward_makes_a_weight_of_bytes():
    printed = str(rewrite(unwrap_tensor_subclasses(made(Net)), torch.ones(4, 128), world_size=2, **WRAPPED).forward)
    assert "first/uint8.frozen.pending: u8[16384] = fsdp.all_gather(first/uint8.frozen)" in printed
    assert "first.base.parametrizations.weight.original0: u8[16384] = fsdp.view_out(first/uint8.frozen" in printed


def test_a_weight_that_modules_share_stays_shared():
    model, expected = unwrap_tensor_subclasses(made(Tied)), made(Tied)
    assert len(list(model.parameters())) == 2 + 2
    assert model.first.parametrizations.weight.original0 is model.second.parametrizations.weight.original0
    x = torch.ones(2, 6)
    torch.testing.assert_close(model(x).a, expected(x).a, rtol=0, atol=0)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        parts = TwoTensor(TwoTensor(torch.zeros(3, 4), torch.ones(3, 4)), TwoTensor(torch.ones(3, 4), torch.ones(3, 4)))
        self.register_parameter("weight", nn.Parameter(parts, requires_grad=False))


def test_tensors_within_tensors():
    model = unwrap_tensor_subclasses(Nested())
    assert [parameter.sum().item() for parameter in model.parameters()] == [0, 12, 12, 12]
    assert isinstance(model.weight.a, TwoTensor) and model.weight.shape == (3, 4)


def test_a_weight_that_is_to_be_trained_is_refused():
    model = made(Tied)
    model.second.weight = nn.Parameter(TwoTensor(torch.eye(6), torch.eye(6)))
    with pytest.raises(ConfigError, match=r"second\.weight, a TwoTensor, is to be trained"):
        unwrap_tensor_subclasses(model)
    assert not parametrize.is_parametrized(model.first)


def test_the_error_of_a_model_that_holds_one_says_what_to_call():
    with pytest.raises(ConfigError, match=r"first\.base\.weight is a NF4Tensor.*unwrap_tensor_subclasses"):
        fsdp_compile(made(Net))
