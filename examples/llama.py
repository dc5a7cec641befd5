"""A decoder of the shape of Llama 3 and, for 64 ranks, its training step rewritten on the meta device.

    python examples/llama.py                            # 8 billion parameters, none of them in memory
    python examples/llama.py --config small
    python examples/llama.py --world-size 512
    python -m fsdp_compile plan examples/llama.py:llama3_8b --gpus 8 64 --seq 8192
    python -m fsdp_compile plan examples/llama.py:llama3_70b --gpus 256 --mesh auto --global-batch 512 --seq 8192
    python -m fsdp_compile plan examples/llama.py:llama3_70b --mesh dp=256 dp=32,pp=8 --global-batch 512 --seq 8192

No process group and no GPU: what is printed is the schedule that each of the ranks would run.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import time
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fsdp_compile import rewrite


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    layers: int
    dim: int
    heads: int
    kv_heads: int
    ffn_dim: int
    vocab: int
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


LLAMA3_8B = LlamaConfig(layers=32, dim=4096, heads=32, kv_heads=8, ffn_dim=14336, vocab=128256)
LLAMA3_70B = LlamaConfig(layers=80, dim=8192, heads=64, kv_heads=8, ffn_dim=28672, vocab=128256)
LLAMA3_405B = LlamaConfig(layers=126, dim=16384, heads=128, kv_heads=8, ffn_dim=53248, vocab=128256)
SMALL = LlamaConfig(layers=2, dim=64, heads=4, kv_heads=2, ffn_dim=224, vocab=256)


def rotary_angles(seq: int, config: LlamaConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """(cosines, sines), each f32[seq, head_dim / 2]."""
    pairs = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
    frequencies = config.rope_theta ** (-pairs / config.head_dim)
    angles = torch.arange(seq, device=device, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn the pairs (x[..., i], x[..., i + head_dim / 2]) of [batch, heads, seq, head_dim]."""
    first, second = x.float().chunk(2, -1)
    turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)
    return turned.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention: heads / kv_heads queries share a key and a value."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q = nn.Linear(config.dim, config.heads * config.head_dim, bias=False)
        self.k = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.v = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.out = nn.Linear(config.heads * config.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for project in (self.q, self.k, self.v)
        )
        q, k = rotate(q, cosines, sines), rotate(k, cosines, sines)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cosines, sines)
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    """int64[batch, seq] tokens and targets to the mean cross entropy."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList([DecoderLayer(config) for _ in range(config.layers)])
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        cosines, sines = rotary_angles(tokens.shape[1], self.config, tokens.device)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, cosines, sines)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


class Stage(nn.Module):
    """Some of a model's layers: tokens come to the first stage, and the last one returns the loss."""

    def __init__(self, model: Llama, layers: range) -> None:
        super().__init__()
        self.config = model.config
        self.embed = model.embed if layers.start == 0 else None
        self.layers = nn.ModuleList([model.layers[index] for index in layers])
        is_last = layers.stop == len(model.layers)
        self.norm, self.head = (model.norm, model.head) if is_last else (None, None)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        cosines, sines = rotary_angles(targets.shape[1], self.config, targets.device)
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers:
            x = layer(x, cosines, sines)
        if self.norm is None or self.head is None:
            return x, targets
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def stages(model: Llama, number: int) -> list[Stage]:
    """Of about as many layers each; the embedding and the head count as one."""
    cuts = [round(index * (len(model.layers) + 2) / number) - 1 for index in range(1, number)]
    bounds = [0, *cuts, len(model.layers)]
    return [Stage(model, range(*bound)) for bound in pairwise(bounds)]


def parallelize(model: Llama, mesh: DeviceMesh) -> Llama:
    """Split every matrix over mesh["tp"]. Between layers, each rank has some tokens of every row.

    Logits stay split, too: what calls the model is inside `torch.distributed.tensor.parallel.loss_parallel()`.
    """
    if "tp" not in (mesh.mesh_dim_names or ()):
        raise ValueError(f"it is split over the dimension tp, and this mesh has {mesh.mesh_dim_names}")
    if model.config.kv_heads % mesh["tp"].size():
        raise ValueError(f"{model.config.kv_heads} heads of keys and values for {mesh['tp'].size()} ranks")
    tokens = Shard(1)
    split = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False),
    }
    all_tokens = PrepareModuleInput(input_layouts=(tokens, None, None), desired_input_layouts=(Replicate(), None, None))
    split_layer = {
        "attention_norm": SequenceParallel(),
        "attention": all_tokens,
        **{f"attention.{name}": ColwiseParallel() for name in ("q", "k", "v")},
        "attention.out": RowwiseParallel(output_layouts=tokens),
        "ffn_norm": SequenceParallel(),
        "ffn": PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(Replicate(),)),
        "ffn.gate": ColwiseParallel(),
        "ffn.up": ColwiseParallel(),
        "ffn.down": RowwiseParallel(output_layouts=tokens),
    }
    parallelize_module(model, mesh["tp"], split)
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], split_layer)
    return model


def llama3_8b(dtype: torch.dtype = torch.bfloat16) -> Llama:
    """8.03 billion parameters on the meta device."""
    return on_meta(LLAMA3_8B, dtype)


def llama3_70b(dtype: torch.dtype = torch.bfloat16) -> Llama:
    """70.6 billion parameters on the meta device."""
    return on_meta(LLAMA3_70B, dtype)


def llama3_405b(dtype: torch.dtype = torch.bfloat16) -> Llama:
    """405.9 billion parameters on the meta device."""
    return on_meta(LLAMA3_405B, dtype)


def llama_small(dtype: torch.dtype = torch.bfloat16) -> Llama:
    """One whose plan takes seconds, on the meta device."""
    return on_meta(SMALL, dtype)


def inputs(batch: int, seq: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets on the meta device."""
    tokens = torch.zeros(batch, seq, dtype=torch.int64, device="meta")
    return tokens, tokens


def on_meta(config: LlamaConfig, dtype: torch.dtype) -> Llama:
    with torch.device("meta"):
        return Llama(config).to(dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="8b", choices=["8b", "small"])
    parser.add_argument("--world-size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1, help="rows of one rank")
    parser.add_argument("--seq", type=int, default=2048)
    options = parser.parse_args()

    model = llama3_8b() if options.config == "8b" else llama_small()
    begin = time.perf_counter()
    graphs = rewrite(model, *inputs(options.batch, options.seq), world_size=options.world_size)
    seconds = time.perf_counter() - begin

    print(graphs.schedule())
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"\n{num_parameters:,} parameters, world size {options.world_size}")
    print(f"rewritten in {seconds:.1f} s, peak resident memory of this process {peak / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
