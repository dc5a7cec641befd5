"""Models so small that their graphs fit on a page, each with one thing that a pass must get right."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def rows(width: int = 4, num: int = 3) -> Tensor:
    return torch.randn(num, width)


def linear(in_features: int, out_features: int) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=False)


class Chain(nn.Module):
    """As many units as it has layers, one weight in each."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return x


def two_layers() -> Chain:
    return Chain(up=linear(4, 8), down=linear(8, 2))


def three_layers() -> Chain:
    return Chain(low=linear(4, 4), mid=linear(4, 4), top=linear(4, 4))


def four_layers() -> Chain:
    return Chain(first=linear(4, 4), second=linear(4, 4), third=linear(4, 4), fourth=linear(4, 4))


def biased() -> Chain:
    """Two units, a weight and a bias in each."""
    return Chain(up=nn.Linear(4, 8), down=nn.Linear(8, 2))


class Normed(nn.Module):
    """A norm and a weight beside a residual connection: the gradients of both branches meet in its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4, bias=False)
        self.proj = linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.proj(self.norm(x))
        return x + y


class Bfloat16Product(nn.Module):
    """A weight that is kept in fp32 and used as bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.bfloat16()


class DoubledProduct(Bfloat16Product):
    """A weight that is doubled in fp32, and used as bf16."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight * 2).bfloat16()


def two_products() -> Chain:
    return Chain(low=DoubledProduct(), top=DoubledProduct())


class Mixed(nn.Module):
    """What autocast makes of a block: weights of matmuls as bf16, those of a norm as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4, bias=False)
        self.up = linear(4, 8)
        self.down = linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).bfloat16() @ self.up.weight.bfloat16().t()
        z: Tensor = x + (y.relu() @ self.down.weight.bfloat16().t())
        return z


class Checkpointed(Chain):
    """Every layer is computed again in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = checkpoint(lambda x, layer=layer: torch.sin(layer(x)), x, use_reentrant=False)
        return x


class ScaleAndShift(nn.Module):
    """One parameter, read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.weight


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.mix(x))


def tied() -> Chain:
    """One weight under two names, with a layer between its uses."""
    model = Chain(encode=linear(4, 4), mix=linear(4, 4), decode=linear(4, 4))
    model.decode.weight = model.encode.weight
    return model


class Adapted(nn.Module):
    """One unit: a frozen bf16 weight and a trainable fp32 one."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16), requires_grad=False)
        self.trained = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.frozen.float() + x @ self.trained


class Tempered(nn.Module):
    """A weight, and a 0-d parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = linear(4, 4)
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x) * self.temperature


class Fused(nn.Module):
    """A weight that is used in parts, as attention's fused projection may be."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.fused.weight.split(4)
        return F.linear(F.linear(x, a), b)
