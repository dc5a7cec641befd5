"""Small models, each with one thing that sharding can get wrong.

`model(*model.inputs(batch, seed))` is a scalar, the mean over the rows of the batch, so the mean of the
losses (and gradients) of equal parts of a batch is the loss (and gradient) of the whole. BatchNorm is the
exception: ConvNet's loss depends on which rows share a batch.

No parameter has a gradient that is zero in theory and rounding noise in practice (the bias before a
normalization, the bias of attention keys): AdamW would turn that noise into full steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DEVICE = torch.device(os.environ.get("TESTS_DEVICE", "cpu"))
"""Where models and their inputs are; of an emulated GPU, they are in the CPU's memory."""


def made(kind: Callable[..., nn.Module], *args: Any, seed: int = 0) -> nn.Module:
    """What `kind` returns, with the same values wherever it is made with the same seed."""
    torch.manual_seed(seed)
    with placed():
        return kind(*args)


def build(name: str, seed: int = 0) -> nn.Module:
    """The model of that name, with the same values wherever it is built with the same seed."""
    return made(MODELS[name], seed=seed)


def placed() -> AbstractContextManager[Any]:
    """Inside, tensors are made on `DEVICE`, unless something else is said outside."""
    return DEVICE if torch.get_default_device().type == "cpu" != DEVICE.type else nullcontext()


def everything_of(model: nn.Module) -> tuple[Any, ...]:
    """What sharding could change of a model: objects, classes, attributes, hooks, dtypes and devices."""
    modules = {name: (id(module), type(module)) for name, module in model.named_modules()}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    tensors = {name: (id(tensor), tensor.dtype, tensor.device) for name, tensor in named}
    attributes = {name: sorted(vars(module)) for name, module in model.named_modules()}
    hooks = {name: _hooks_of(module) for name, module in model.named_modules()}
    return modules, tensors, attributes, hooks


def _hooks_of(module: nn.Module) -> dict[str, list[Any]]:
    return {name: list(value.values()) for name, value in vars(module).items() if "hooks" in name and value}


def seeded(seed: int) -> torch.Generator:
    """A generator of values on `DEVICE`."""
    return torch.Generator(DEVICE).manual_seed(seed)


class Regression(nn.Module):
    """What most models here share: rows of `width` features, and a mean square as the loss."""

    width = 5

    def inputs(self, batch: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = seeded(seed)
        return torch.randn(batch, self.width, generator=generator), torch.randn(batch, 1, generator=generator)


class ScaledInBackward(torch.autograd.Function):
    """The identity, whose backward multiplies a buffer by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor, factor: float) -> Tensor:
        ctx.buffer, ctx.factor = buffer, factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.buffer.mul_(ctx.factor)
        return gradient, None, None


class OddMlp(Regression):
    """7, 15 and 3 rows: no world size divides them, and four ranks do not all get one of the three."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 15), nn.Tanh(), nn.Linear(15, 3))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x).sum(1, keepdim=True), target)


class OddRows(Regression):
    """7 and 3 rows, of 20, 300 and 7 elements: no number divides them, the second is cut, the last is too short."""

    width = 20

    def __init__(self) -> None:
        super().__init__()
        self.up, self.wide = nn.Linear(20, 7), nn.Linear(7, 300)
        self.down, self.scale = nn.Linear(300, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = torch.tanh(self.wide(torch.tanh(self.up(x))))
        return F.mse_loss((self.down(hidden) * self.scale).sum(1, keepdim=True), target)


class FewRows(Regression):
    """Parameters with fewer rows than ranks, down to one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 2)
        self.scale = nn.Parameter(torch.randn(1))
        self.down = nn.Linear(2, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.down(torch.tanh(self.up(x)) * self.scale), target)


class Block(nn.Module):
    """A transformer block: attention without bias, then an MLP, both behind a normalization."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(dim)
        self.query_key_value = nn.Linear(dim, 3 * dim, bias=False)
        self.project = nn.Linear(dim, dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.project(self.attend(self.attention_norm(x)))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))

    def attend(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        heads = self.query_key_value(x).view(batch, length, 3, self.num_heads, dim // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, length, dim)


class Gpt(nn.Module):
    """Two blocks of width 32; the embedding of the tokens is the head as well."""

    vocabulary, length, dim = 48, 8, 32

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(self.vocabulary, self.dim)
        nn.init.normal_(self.tokens.weight, std=0.2)
        self.positions = nn.Embedding(self.length, self.dim)
        self.blocks = nn.ModuleList([Block(self.dim, num_heads=2) for _ in range(2)])
        self.norm = nn.LayerNorm(self.dim)
        self.head = nn.Linear(self.dim, self.vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def inputs(self, batch: int, seed: int) -> tuple[Tensor, Tensor]:
        text = torch.randint(self.vocabulary, (batch, self.length + 1), generator=seeded(seed))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


class ConvNet(nn.Module):
    """Convolutions with BatchNorm: running statistics are buffers, kept and updated per rank."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = self.stage(1, 6)
        self.body = nn.ModuleList([self.stage(6, 6), self.stage(6, 6)])
        self.head = nn.Linear(6, 10)

    @staticmethod
    def stage(channels: int, out_channels: int) -> nn.Sequential:
        convolution = nn.Conv2d(channels, out_channels, 3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(out_channels), nn.Tanh())

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        for stage in self.body:
            x = x + stage(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)

    def inputs(self, batch: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = seeded(seed)
        images = torch.randn(batch, 1, 6, 6, generator=generator)
        return images, torch.randint(10, (batch,), generator=generator)


class CalledTwice(Regression):
    """One module called twice: its parameters collect two gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(5, 5)
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.head(torch.tanh(self.mix(torch.tanh(self.mix(x))))), target)


class OddParameters(Regression):
    """A 0-d parameter, and a non-contiguous one."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.weight = nn.Parameter(torch.randn(5, 6).t())
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.head(torch.tanh(F.linear(x, self.weight) * self.temperature)), target)


class AdaptedLinear(nn.Module):
    """A frozen bf16 weight with a trainable fp32 update of rank 2, multiplied in fp32."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features).bfloat16() / 2, requires_grad=False)
        self.down = nn.Parameter(torch.randn(2, in_features) / 2)
        self.up = nn.Parameter(torch.randn(out_features, 2) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.float()) + F.linear(F.linear(x, self.down), self.up)


class Adapted(Regression):
    """Units that mix frozen bf16 and trainable fp32 parameters, as when training adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([AdaptedLinear(5, 5), AdaptedLinear(5, 5)])
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(self.head(x), target)


class GraphBreak(Regression):
    """Two graphs; `shared` is used by both."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(5, 5)
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = torch.tanh(self.shared(x))
        torch._dynamo.graph_break()
        return F.mse_loss(self.head(torch.tanh(self.shared(x))), target)


class Unused(Regression):
    """`spare` takes no part in the forward, in a unit with parameters that do."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(5, 5)
        self.spare = nn.Linear(5, 3)
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.head(torch.tanh(self.mix(x))), target)


MODELS: dict[str, type[nn.Module]] = {
    "odd_mlp": OddMlp,
    "few_rows": FewRows,
    "gpt": Gpt,
    "conv_net": ConvNet,
    "called_twice": CalledTwice,
    "odd_parameters": OddParameters,
    "adapted": Adapted,
    "graph_break": GraphBreak,
    "unused": Unused,
}
