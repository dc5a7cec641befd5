"""Ways in which modules hold, read and list parameters and buffers: they train and evaluate as the unsharded module."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_compile import fsdp_compile
from tests.distributed import training
from tests.distributed.training import (
    assert_close,
    assert_same_gradients,
    batch_of_rank,
    both_front_ends,
    first_rows,
    global_batch,
    saved_and_loaded,
    sgd,
)
from tests.models import ConvNet, OddMlp, Regression, ScaledInBackward, build, made
from tests.ranks import on_ranks


class AsksForTheDtype(OddMlp):
    """What many libraries do to find out where and what they are."""

    def forward(self, x, target):
        first = next(self.parameters())
        return super().forward(x.to(first.dtype).to(first.device), target)


class ParameterContainers(Regression):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(5, 5) / 2 for _ in range(3)])
        self.heads = nn.ParameterDict({"mean": torch.randn(1, 5)})

    def forward(self, x, target):
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return F.mse_loss(F.linear(x, self.heads["mean"]), target)


class OneModuleTwoNames(Regression):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = self.first
        self.head = nn.Linear(5, 1)

    def forward(self, x, target):
        return F.mse_loss(self.head(self.second(torch.tanh(self.first(x)))), target)


class WeightNorm(Regression):
    """A parametrization: `weight` is a property already, computed from two parameters."""

    reparametrise = staticmethod(nn.utils.parametrizations.weight_norm)

    def __init__(self):
        super().__init__()
        self.layer = self.reparametrise(nn.Linear(5, 7))
        self.head = nn.Linear(7, 1)

    def forward(self, x, target):
        return F.mse_loss(self.head(torch.tanh(self.layer(x))), target)


class EmptyParameter(Regression):
    """A parameter without elements takes the place of none."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Parameter(torch.zeros(0, 5))
        self.head = nn.Linear(5, 1)

    def forward(self, x, target):
        return F.mse_loss(self.head(x) + self.extra.sum(), target)


class ReadsItsSibling(nn.Module):
    def __init__(self, sibling):
        super().__init__()
        vars(self)["sibling"] = sibling  # not a child: its parameters keep one name
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return F.linear(x, self.sibling.weight.t()) * self.scale


class ReadsElsewhere(Regression):
    """A weight used by three modules: its own, the root, a sibling."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(5, 5)
        self.reader = ReadsItsSibling(self.mix)
        self.head = nn.Linear(5, 1)

    def forward(self, x, target):
        x = torch.tanh(self.reader(torch.tanh(self.mix(x))))
        return F.mse_loss(self.head(F.linear(x, self.mix.weight, self.mix.bias)), target)


class NormalisedWeight(WeightNorm):
    """A pre-forward hook computes `weight` from two parameters, in the older way."""

    reparametrise = staticmethod(nn.utils.weight_norm)


class SpectralNorm(WeightNorm):
    """A parametrization that updates its buffers in training, from the value of the parameter."""

    reparametrise = staticmethod(nn.utils.parametrizations.spectral_norm)


def sequence(x):
    return x[:, None] * torch.arange(1.0, 4.0)[:, None]


class Attention(Regression):
    width = 8

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.attention.in_proj_bias.requires_grad_(False)  # that of the keys has no gradient but rounding noise
        self.head = nn.Linear(8, 1)

    def forward(self, x, target):
        x = sequence(x)
        x, weights = self.attention(x, x, x)
        return F.mse_loss(self.head(x).mean(1), target) + weights.square().mean()


class Encoder(Regression):
    """torch's TransformerEncoder has a fast path, which reads the parameters of its layers."""

    width = 8

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        layer.self_attn.in_proj_bias.requires_grad_(False)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(8, 1)

    def forward(self, x, target):
        return F.mse_loss(self.head(self.encoder(sequence(x))).mean(1), target)


class Recurrent(Regression):
    """LSTM and GRU, which keep a list of their parameters; Dynamo does not capture them."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(5, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(12, 4, bias=False, batch_first=True)
        self.head = nn.Linear(4, 1)

    def forward(self, x, target):
        x, (hidden, _) = self.lstm(sequence(x))
        x, _ = self.gru(x)
        return F.mse_loss(self.head(x).mean(1), target) + hidden.square().mean()


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class OwnFunction(Regression):
    """A custom autograd.Function that saves a parameter."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 7)
        self.head = nn.Linear(7, 1)

    def forward(self, x, target):
        return F.mse_loss(self.head(torch.tanh(Product.apply(x, self.layer.weight) + self.layer.bias)), target)


class Penalised(OddMlp):
    """A penalty on all parameters, listed twice: as those of the root, and by name as those of a part."""

    def forward(self, x, target):
        loss = super().forward(x, target)
        loss = loss + 0.1 * sum(parameter.square().sum() for parameter in self.parameters())
        for name, parameter in self.layers.named_parameters("prefix"):
            if name.endswith("weight"):
                loss = loss + 0.1 * parameter.abs().sum()
        return loss


class PenalisedTied(Regression):
    """A tied parameter is listed once."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, target):
        penalty = sum(parameter.square().sum() for parameter in self.parameters())
        x = self.second(torch.tanh(self.first(x))) * self.scale
        return F.mse_loss(x.sum(1, keepdim=True), target) + 0.1 * penalty


class WritesBuffers(Regression):
    """Buffers that are written and then used: a counter, an average without bias, rows, one computed from another, one
    that the backward writes to as well.
    """

    def __init__(self):
        super().__init__()
        self.up, self.head = nn.Linear(5, 5), nn.Linear(5, 1)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("scale", torch.tensor(1.0))
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("rows", torch.ones(3, 5))

    def forward(self, x, target):
        x = torch.sin(self.up(x))
        before = x * self.rows.t()[:, 1].clone()
        self.count += 1
        self.scale += 0.2
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.rows[0] += self.mean
        self.rows[:, :2] = self.scale
        x = before + torch.tanh(x * self.mean / (1 - 0.9 ** self.count.float()))
        x = ScaledInBackward.apply(x, self.scale, 0.5) * self.scale.clone()
        return F.mse_loss(self.head(torch.tanh(x @ self.rows.t() @ self.rows / 20)), target)


class WritesAnActivation(Regression):
    """What comes from the graph before is written in place: autograd has to see that."""

    def __init__(self):
        super().__init__()
        self.up, self.head = nn.Linear(5, 5), nn.Linear(5, 1)
        self.register_buffer("scale", torch.full((5,), 0.5))

    def forward(self, x, target):
        x = self.up(x)
        torch._dynamo.graph_break()
        shifted = x + 1
        x.mul_(self.scale)
        return F.mse_loss(self.head(torch.tanh(shifted * x)), target)


class CountsWithinCheckpoint(Regression):
    """Eager counts twice, in the forward and when that is computed again, and so does what is compiled."""

    def __init__(self):
        super().__init__()
        self.up, self.head = nn.Linear(5, 5), nn.Linear(5, 1)
        self.register_buffer("count", torch.tensor(1.0))

    def counted(self, x):
        self.count += 1
        return torch.tanh(self.up(x) * self.count)

    def forward(self, x, target):
        return F.mse_loss(self.head(checkpoint(self.counted, x, use_reentrant=False)), target)


MODELS = {
    model.__name__: model
    for model in (
        ConvNet,
        AsksForTheDtype,
        ParameterContainers,
        OneModuleTwoNames,
        WeightNorm,
        EmptyParameter,
        ReadsElsewhere,
        NormalisedWeight,
        SpectralNorm,
        Attention,
        Encoder,
        Recurrent,
        OwnFunction,
        Penalised,
        PenalisedTied,
        WritesBuffers,
        WritesAnActivation,
        CountsWithinCheckpoint,
    )
}


def assert_trains_as(model, expected, steps=range(3)):
    shares_rows = isinstance(expected, (ConvNet, WritesBuffers))  # which compute with averages over the rows
    training.assert_trains_as(model, expected, steps, sgd, shares_rows=shares_rows)


def assert_evaluates_as(model, expected, mode):
    model.eval(), expected.eval()
    batch = batch_of_rank(expected, 100)
    with mode():
        assert_close(model(*batch), expected(*batch))
    assert_close(dict(model.named_buffers()), dict(expected.named_buffers()))
    model.train(), expected.train()


@pytest.mark.parametrize("name", list(MODELS))
@both_front_ends
@on_ranks(2)
def test_training_and_evaluation_equal_the_unsharded_model(world_size, front_end, name):
    """Evaluation comes first: inference_mode must leave nothing behind that a training step trips over."""
    expected, model = made(MODELS[name]), front_end(made(MODELS[name]))
    for mode, steps in ((torch.inference_mode, range(2)), (torch.no_grad, range(2, 4))):
        assert_evaluates_as(model, expected, mode)
        assert_trains_as(model, expected, steps)


@both_front_ends
@on_ranks(2)
def test_copies_of_a_recurrent_model(world_size, front_end):
    model = front_end(made(Recurrent))
    loaded = saved_and_loaded(model)
    assert_trains_as(model, made(Recurrent), range(1))
    for copied in (copy.deepcopy(front_end(made(Recurrent))), loaded):
        assert_trains_as(copied, made(Recurrent), range(1))
    held = [value for module in model.modules() for value in vars(module).values() if isinstance(value, list)]
    assert not any(isinstance(item, torch.Tensor) for value in held for item in value)


@pytest.mark.parametrize("memory_budget", [1.0, 0.0])
@on_ranks(1)
def test_buffers_that_are_written_and_used_on_a_single_rank_by_inductor(world_size, memory_budget):
    with torch._functorch.config.patch(activation_memory_budget=memory_budget):
        assert_trains_as(fsdp_compile(made(WritesBuffers)), made(WritesBuffers))


class Outer(Regression):
    def __init__(self):
        super().__init__()
        self.own = nn.Linear(5, 5)
        self.inner = OddMlp()

    def forward(self, x, target):
        return self.inner(torch.tanh(self.own(x)), target)


@both_front_ends
@on_ranks(2)
def test_a_sharded_part_of_a_plain_model(world_size, front_end):
    expected, model = made(Outer), made(Outer)
    front_end(model.inner)
    batch = first_rows(model, 0)
    expected(*batch).backward()
    model(*batch).backward()
    assert_same_gradients(model, expected)


@both_front_ends
@on_ranks(2)
def test_hooks_that_come_after_the_first_call_and_go_again(world_size, front_end):
    model, expected = front_end(build("odd_mlp")), build("odd_mlp")
    seen = {id(model): [], id(expected): []}
    for step, has_hooks in enumerate([False, True, False, True]):
        for found, batch in ((model, batch_of_rank(model, step)), (expected, global_batch(expected, step))):
            handles = []
            if has_hooks:
                layer, note = found.layers[2], seen[id(found)].append
                handles += [
                    layer.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
                    layer.register_forward_hook(lambda module, args, out: out.abs()),
                    layer.register_full_backward_hook(lambda module, inner, outer, note=note: note(len(inner))),
                ]
            found(*batch).backward()
            for handle in handles:
                handle.remove()
        assert_same_gradients(model, expected)
    assert seen[id(model)] == seen[id(expected)] == [1, 1]
