"""Parameters that are stored as integers, and dequantised in the forward: frozen bases below what is trained."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile import CommunicationDtype, fsdp_compile
from tests.distributed.training import assert_trains_as, both_front_ends, compiled, full, gathered_dtypes
from tests.models import Regression, made
from tests.ranks import on_ranks


class Quantised(nn.Module):
    """A linear layer whose frozen weight is int8 with a scale for each row, and of which adapters are trained."""

    def __init__(self, inputs, outputs):
        super().__init__()
        weight = torch.randn(outputs, inputs)
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.down, self.up = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs)

    def forward(self, x):
        return F.linear(x, self.weight.to(self.scale.dtype) * self.scale) + self.up(self.down(x))


class Fours(nn.Module):
    """Two integers of four bits in each byte."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.bytes = nn.Parameter(torch.randint(256, (outputs, inputs // 2), dtype=torch.uint8), requires_grad=False)
        self.trained = nn.Linear(inputs, outputs)

    def forward(self, x):
        weight = torch.cat([self.bytes & 15, self.bytes >> 4], 1).to(x.dtype) / 16 - 0.5
        return F.linear(x, weight) + self.trained(x)


class Adapted(Regression):
    """7 and 5 rows."""

    width = 20

    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = Quantised(20, 7), Fours(8, 5), nn.Linear(5, 1)

    def forward(self, x, target):
        hidden = torch.tanh(self.first(x))
        return F.mse_loss(self.out(torch.tanh(self.second(F.pad(hidden, (0, 1))))), target)


WRAPPED = {"auto_wrap_policy": {Quantised, Fours}}


@pytest.mark.parametrize(("backend", "lowering"), [("aot_eager", "grouped"), ("inductor", "packed")])
@on_ranks(2)
def test_they_travel_as_they_are(world_size, backend, lowering):
    model = fsdp_compile(made(Adapted), backend=backend, collective_lowering=lowering, **WRAPPED)
    assert_trains_as(model, made(Adapted))
    assert gathered_dtypes(model.graphs[-1].forward) == {torch.int8, torch.uint8, torch.float32}
    assert model.first.weight.dtype == torch.int8 and model.first.weight.to_local().numel() < 7 * 20


@both_front_ends
@on_ranks(4)
def test_neither_policies_nor_forms_change_them(world_size, front_end):
    asked = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "communication_dtype": CommunicationDtype(gather="int8"),
    }
    model, expected = front_end(made(Adapted), **asked, **WRAPPED), made(Adapted)
    saved = {name: full(value) for name, value in model.state_dict().items()}
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=0, atol=0)
    x, target = torch.ones(2, 20), torch.zeros(2, 1)
    model(x, target).backward()
    assert model.first.weight.grad is None and model.first.up.weight.grad is not None
    model.load_state_dict(model.state_dict())


@on_ranks(2)
def test_planned_kept_and_resumed(world_size):
    for options in ({"hardware": "h100"}, {"reshard_after_forward": False}):
        assert_trains_as(compiled(made(Adapted), **options, **WRAPPED), made(Adapted))
