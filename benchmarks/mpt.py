"""The decoder of llm-foundry's throughput tables: GPT-2's architecture, in the sizes that MPT made known.

The parameters that the tables count are those of learned positions, biases, and a head tied to the embedding. (The
released MPT models have ALiBi and no biases instead.)
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class MPTConfig:
    layers: int
    dim: int
    heads: int
    vocab: int = 50368
    seq: int = 2048


MPT_7B = MPTConfig(layers=32, dim=4096, heads=32)
MPT_13B = MPTConfig(layers=40, dim=5120, heads=40)
MPT_70B = MPTConfig(layers=80, dim=8192, heads=64)


class DecoderLayer(nn.Module):
    def __init__(self, config: MPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.dim)
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.out = nn.Linear(config.dim, config.dim)
        self.ffn_norm = nn.LayerNorm(config.dim)
        self.up = nn.Linear(config.dim, 4 * config.dim)
        self.down = nn.Linear(4 * config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ffn_norm(x))))


class MPT(nn.Module):
    """int64[batch, seq] tokens and targets to the mean cross entropy."""

    def __init__(self, config: MPTConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.positions = nn.Embedding(config.seq, config.dim)
        self.layers = nn.ModuleList([DecoderLayer(config) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.positions(places)
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
