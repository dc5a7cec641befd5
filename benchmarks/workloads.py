"""What the benchmarks train: a model that returns its loss, its inputs, and the modules that are one unit each."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from memory import Mlp

from llama import Llama, LlamaConfig, parallelize
from train_gpt import GPT, GPTConfig


@dataclasses.dataclass(frozen=True)
class Workload:
    """`units` is the name of the module whose children are a unit each; what is outside of it is one more.

    `parallelize` splits the model over the dimension "tp" of a mesh, for tensor parallelism.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    units: str
    parallelize: Callable[[nn.Module, DeviceMesh], nn.Module] | None = None


def gpt(layers: int = 8, dim: int = 512, seq: int = 128, batch: int = 8, vocab: int = 4096) -> Workload:
    """29.4 million parameters. The head is one of its own: SimpleFSDP does not know of parameters that are shared."""

    def build() -> nn.Module:
        model = GPT(GPTConfig(seq=seq, dim=dim, layers=layers, vocab=vocab))
        model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
        return model

    return Workload(build, lambda: _tokens(batch, seq, vocab), "blocks")


class Autocast(nn.Module):
    """A model that computes its loss under autocast."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        with torch.autocast(inputs[0].device.type, torch.bfloat16):
            loss: Tensor = self.model(*inputs)
        return loss


def gpt_autocast(**config: int) -> Workload:
    """The GPT under autocast to bfloat16."""
    plain = gpt(**config)
    return dataclasses.replace(plain, build=lambda: Autocast(plain.build()), units=f"model.{plain.units}")


def mlp(layers: int = 6, dim: int = 768, rows: int = 512) -> Workload:
    """28.3 million parameters, and little to compute with each."""
    return Workload(lambda: Mlp(dim, layers), lambda: (torch.randn(rows, dim), torch.randn(rows, dim)), "layers")


class Classifier(nn.Module):
    """examples/train_digits.py's nine convolution layers in three units, with their loss."""

    def __init__(self) -> None:
        super().__init__()
        from train_digits import ConvNet  # needs scikit-learn

        self.model = ConvNet()

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(images), labels)


def conv(batch: int = 128) -> Workload:
    return Workload(Classifier, lambda: (torch.randn(batch, 1, 8, 8), torch.randint(10, (batch,))), "model.stages")


class Images(nn.Module):
    """Stages of two convolutions each, every one with twice the channels at a quarter of the pixels, and their loss."""

    def __init__(self, channels: int, stages: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList()
        before = 3
        for stage in range(stages):
            width = channels << stage
            self.stages.append(
                nn.Sequential(*_convolution(before, width, 1 if stage == 0 else 2), *_convolution(width, width, 1))
            )
            before = width
        self.head = nn.Linear(before, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        for stage in self.stages:
            images = stage(images)
        return F.cross_entropy(self.head(images.mean((2, 3))), labels)


def _convolution(before: int, width: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]


def conv_large(channels: int = 64, stages: int = 4, batch: int = 40) -> Workload:
    """4.7 million parameters, most of them in the last stage."""
    return Workload(
        lambda: Images(channels, stages),
        lambda: (torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))),
        "stages",
    )


class Stack(nn.Module):
    """Layers so small that a step is what Python does around them."""

    def __init__(self, units: int, layers: int, dim: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(
            nn.Sequential(*(nn.Linear(dim, dim, bias=False) for _ in range(layers))) for _ in range(units)
        )

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return x.sum()


def stack(units: int = 15, layers: int = 10, dim: int = 32) -> Workload:
    return Workload(lambda: Stack(units, layers, dim), lambda: (torch.randn(8, dim),), "units")


def llama_split(layers: int = 6, dim: int = 512, seq: int = 128, batch: int = 8, vocab: int = 4096) -> Workload:
    """24.4 million parameters in float32, for tensor and sequence parallelism."""
    config = LlamaConfig(layers=layers, dim=dim, heads=8, kv_heads=4, ffn_dim=3 * dim, vocab=vocab)
    return Workload(lambda: Llama(config), lambda: _tokens(batch, seq, vocab), "layers", parallelize)


def llama(batch: int, seq: int, **config: int) -> Workload:
    """In bfloat16; `config` is a LlamaConfig's."""

    def build() -> nn.Module:
        return Llama(LlamaConfig(**config)).to(torch.bfloat16)

    return Workload(build, lambda: _tokens(batch, seq, config["vocab"]), "layers")


def _tokens(batch: int, seq: int, vocab: int) -> tuple[Tensor, Tensor]:
    return torch.randint(vocab, (batch, seq)), torch.randint(vocab, (batch, seq))


WORKLOADS = {
    "gpt": gpt,
    "gpt-autocast": gpt_autocast,
    "mlp": mlp,
    "conv": conv,
    "conv-large": conv_large,
    "stack": stack,
    "llama": llama,
    "llama-split": llama_split,
}
