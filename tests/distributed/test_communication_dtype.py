"""What is sent in a narrower form: training is that of unsharded models that round where a message does."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from fsdp_compile import CommunicationDtype, fsdp_compile
from fsdp_compile.passes import forms, ops
from tests.distributed.training import (
    batch_of_rank,
    compiled,
    full,
    sgd,
)
from tests.models import Regression, build, made
from tests.ranks import on_ranks

STEPS = range(3)
INT8, INT4 = CommunicationDtype("int8", "int8"), CommunicationDtype("int4", "int4")
BF16 = CommunicationDtype(reduce=torch.bfloat16)
ASKED = {
    "gathers": CommunicationDtype("int8"),
    "int8": INT8,
    "int4": INT4,
    "bf16": BF16,
    "mixed": CommunicationDtype("int8", torch.bfloat16),
    "fp16": CommunicationDtype("int4", torch.float16),
}


class Odd(Regression):
    """7 and 3 rows, of 20, 300 and 7 elements: no number divides them, the second is cut, the last is too short."""

    width = 20

    def __init__(self):
        super().__init__()
        self.up, self.wide = nn.Linear(20, 7), nn.Linear(7, 300)
        self.down, self.scale = nn.Linear(300, 3), nn.Parameter(torch.ones(3))

    def forward(self, x, target):
        hidden = torch.tanh(self.wide(torch.tanh(self.up(x))))
        return F.mse_loss((self.down(hidden) * self.scale).sum(1, keepdim=True), target)


def rounded(tensor, form):
    """What arrives of a tensor that is sent in a form."""
    shape = tuple(tensor.shape)
    if not form or (forms.is_integers(form) and not forms.is_integers(forms.form_for(shape, form, tensor.dtype))):
        return tensor
    region = forms.Region(0, tensor.numel(), math.prod(shape[1:]), form)
    sent = torch.cat(forms.into_form(forms.eagerly, tensor.reshape(-1), [], region, tensor.dtype))
    return forms.out_of_form(forms.eagerly, sent, [], region, tensor.dtype).view(shape)


def losses_and_gradients(model, asked, step, summed=False):
    """Of an unsharded model, on each rank's rows, by what the ranks would send each other."""
    names = dict(model.named_parameters())
    losses, sent = [], {name: [] for name in names}
    for rank in range(dist.get_world_size()):
        read = {name: rounded(one.detach(), asked.gather_form).requires_grad_() for name, one in names.items()}
        loss = functional_call(model, read, batch_of_rank(model, step, rank))
        gradients = torch.autograd.grad(loss, list(read.values()), allow_unused=True)
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is not None:
                sent[name].append(rounded(gradient, asked.reduce_form))
        losses.append(loss.detach())
    of_all = {name: torch.stack(each).sum(0) / (1 if summed else len(each)) for name, each in sent.items() if each}
    return losses[dist.get_rank()], of_all


def assert_trains_so(model, expected, asked, *, is_equal=False, summed=False, make_optimizer=sgd):
    """Losses, gradients and parameters, of a few steps; to the last bit if `is_equal`."""
    exact = {"rtol": 0, "atol": 0} if is_equal else {}
    same = torch.testing.assert_close if is_equal else assert_close_but_for_steps
    optimizers = make_optimizer(model.parameters()), make_optimizer(expected.parameters())
    for step in STEPS:
        loss = model(*batch_of_rank(model, step))
        loss.backward()
        expected_loss, gradients = losses_and_gradients(expected, asked, step, summed)
        same(loss.detach(), expected_loss, **exact)
        for (name, parameter), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert (parameter.grad is None) == (name not in gradients)
            if name in gradients:
                same(full(parameter.grad), gradients[name], **exact)
            wanted.grad = gradients.get(name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for parameter, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        same(full(parameter.detach()), wanted.detach(), **exact)


def assert_close_but_for_steps(found, expected):
    """Of a hundred elements, one may have been rounded to the next step: what is computed differs in its last bits."""
    assert ((found - expected).abs() > 1e-5 + 1e-4 * expected.abs()).float().mean() <= 0.01
    torch.testing.assert_close(found, expected, rtol=0, atol=0.01 * max(1e-2, float(expected.abs().max())))


def messages(model):
    """The dtypes of what the last graphs send, by operator."""
    found = {}
    for side in model.graphs[-1].sides:
        for node in filter(ops.is_collective, side.graph.nodes):
            found.setdefault(str(node.target).split(".")[1], set()).add(node.all_input_nodes[0].meta["val"].dtype)
    return found


@pytest.mark.parametrize("lowering", ["packed", "grouped"])
@pytest.mark.parametrize("asked", ASKED)
@on_ranks(2)
def test_without_generated_code_it_is_equal_to_the_last_bit(world_size, asked, lowering):
    model = compiled(made(Odd), communication_dtype=ASKED[asked], collective_lowering=lowering)
    assert_trains_so(model, made(Odd), ASKED[asked], is_equal=True)


@pytest.mark.parametrize("asked", ["int8", "mixed"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@on_ranks(4)
def test_a_transformer_trains_as_one_that_rounds(world_size, backend, asked):
    model = fsdp_compile(build("gpt"), backend=backend, communication_dtype=ASKED[asked])
    assert_trains_so(model, build("gpt"), ASKED[asked])
    reductions = {"int8": torch.int8, "mixed": torch.bfloat16}
    assert messages(model) == {"all_gather": {torch.int8}, "all_to_all": {reductions[asked]}}
