"""Ways in which modules hold and read parameters, each trained against the unsharded model."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_compile import fsdp_compile, shard
from tests.distributed.training import (
    assert_close,
    assert_same_gradients,
    assert_same_parameters,
    batch_of_rank,
    global_batch,
    sgd,
    train,
)
from tests.models import Gpt, OddMlp, Regression
from tests.ranks import on_ranks

STEPS = range(3)
compiled = functools.partial(fsdp_compile, backend="aot_eager")
both_front_ends = pytest.mark.parametrize("front_end", [compiled, shard], ids=["compiled", "eager"])


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

    def __init__(self):
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(5, 7))
        self.head = nn.Linear(7, 1)

    def forward(self, x, target):
        return F.mse_loss(self.head(torch.tanh(self.layer(x))), target)


class EncoderLayer(Regression):
    """torch's own transformer layer, which looks at its children's parameters to choose a fast path."""

    width = 8

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        # The bias of the keys has no gradient but rounding noise.
        self.layer.self_attn.in_proj_bias.requires_grad_(False)
        self.head = nn.Linear(8, 1)

    def forward(self, x, target):
        sequence = x[:, None] * torch.arange(1.0, 4.0)[:, None]
        return F.mse_loss(self.head(self.layer(sequence)).mean(1), target)


class EmptyParameter(Regression):
    """A parameter without elements takes the place of none."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Parameter(torch.zeros(0, 5))
        self.head = nn.Linear(5, 1)

    def forward(self, x, target):
        return F.mse_loss(self.head(x) + self.extra.sum(), target)


class CheckpointedGpt(Gpt):
    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


MODELS = {
    model.__name__: model
    for model in (
        AsksForTheDtype,
        ParameterContainers,
        OneModuleTwoNames,
        WeightNorm,
        EncoderLayer,
        EmptyParameter,
        CheckpointedGpt,
    )
}


def build(name):
    torch.manual_seed(0)
    return MODELS[name]()


@pytest.mark.parametrize("name", list(MODELS))
@both_front_ends
@on_ranks(2)
def test_training_equals_the_unsharded_model(world_size, front_end, name):
    expected, model = build(name), front_end(build(name))
    train(expected, sgd(expected.parameters()), STEPS, batch=global_batch)
    train(model, sgd(model.parameters()), STEPS)
    assert_same_parameters(model, expected)


@both_front_ends
@on_ranks(2)
def test_evaluation_of_torchs_transformer_layer(world_size, front_end):
    expected, model = build("EncoderLayer").eval(), front_end(build("EncoderLayer")).eval()
    batch = batch_of_rank(model, 0)
    with torch.no_grad():
        assert_close(model(*batch), expected(*batch))
    with torch.inference_mode():
        assert_close(model(*batch), expected(*batch))


class ManyOutputs(OddMlp):
    def forward(self, x, target=None, *, scale=1.0):
        y = self.layers(x)
        loss = F.mse_loss(y.sum(1, keepdim=True), target) * scale
        return {"loss": loss, "outputs": (y, [x])}


@both_front_ends
@on_ranks(2)
def test_keyword_arguments_and_nested_outputs(world_size, front_end):
    torch.manual_seed(0)
    expected = ManyOutputs()
    torch.manual_seed(0)
    model = front_end(ManyOutputs())
    x, target = batch_of_rank(model, 0, rank=0)  # the same on all ranks
    outputs, expected_outputs = (network(x, target=target, scale=2.0) for network in (model, expected))
    assert_close(outputs, expected_outputs)
    outputs["loss"].backward()
    expected_outputs["loss"].backward()
    assert_same_gradients(model, expected)


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
    torch.manual_seed(0)
    expected = Outer()
    torch.manual_seed(0)
    model = Outer()
    front_end(model.inner)
    batch = batch_of_rank(model, 0, rank=0)
    expected(*batch).backward()
    model(*batch).backward()
    assert_same_gradients(model, expected)
