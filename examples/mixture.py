"""A mixture of experts of the shape of DeepSeek's, whose experts are split over some of the ranks.

    python -m fsdp_compile plan examples/mixture.py:mixture_16b --mesh dp=64 dp=64,ep=8 dp=64,ep=64 --seq 4096
    python examples/mixture.py        # the training step of a small one, rewritten for 8 ranks of which 4 split experts

Every token goes to a few of many small experts, and to one that all tokens share; the first layers have no experts. An
expert takes as many tokens as its capacity says, and computes nothing for those that come after. Ranks exchange tokens
by two all-to-alls of equal parts a layer. The rest is examples/llama.py.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_compile import rewrite
from llama import FeedForward, Llama, LlamaConfig, inputs, stages

__all__ = ["inputs", "mixture_16b", "mixture_671b", "mixture_small", "parallelize", "stages"]


@dataclasses.dataclass(frozen=True)
class MixtureConfig(LlamaConfig):
    """The feed-forward layers of the first `dense_layers` have `ffn_dim`, and experts have `expert_dim`.

    Attributes:
        active: to how many of the experts a token goes.
        shared_dim: of the expert for all tokens.
        capacity: how many times the mean number of its tokens an expert takes.
    """

    dense_layers: int = 1
    experts: int = 64
    active: int = 6
    expert_dim: int = 1408
    shared_dim: int = 2816
    capacity: float = 1.25


MIXTURE_16B = MixtureConfig(layers=27, dim=2048, heads=16, kv_heads=16, ffn_dim=10944, vocab=102400)
MIXTURE_671B = MixtureConfig(
    layers=61,
    dim=7168,
    heads=56,
    kv_heads=8,
    ffn_dim=18432,
    vocab=129280,
    dense_layers=3,
    experts=256,
    active=8,
    expert_dim=2048,
    shared_dim=2048,
)
SMALL = MixtureConfig(
    layers=3, dim=32, heads=2, kv_heads=2, ffn_dim=64, vocab=128, experts=8, active=2, expert_dim=16, shared_dim=16
)


class Experts(nn.Module):
    """[experts, tokens, dim] to the same: SwiGLU, by matrices of its own for each expert."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        shapes = {
            "gate": (config.experts, config.dim, config.expert_dim),
            "up": (config.experts, config.dim, config.expert_dim),
            "down": (config.experts, config.expert_dim, config.dim),
        }
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape) / math.sqrt(shape[1])))
        self.mesh: DeviceMesh | None = None

    def split(self, mesh: DeviceMesh) -> None:
        """Keep the experts of this rank among those of a mesh."""
        self.mesh = mesh
        for name, parameter in [*self.named_parameters()]:
            setattr(self, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))

    def forward(self, x: Tensor) -> Tensor:
        if self.mesh is None:
            return self.compute(x)
        ranks, (experts, tokens, dim) = self.mesh.size(), x.shape
        arrived = self.exchange(x).view(ranks, experts // ranks, tokens, dim).transpose(0, 1)
        computed = self.compute(arrived.flatten(1, 2)).unflatten(1, (ranks, tokens))
        return self.exchange(computed.transpose(0, 1)).view(experts, tokens, dim)

    def exchange(self, x: Tensor) -> Tensor:
        """The part of each rank, of what every rank has for it."""
        assert self.mesh is not None
        flat = x.flatten()
        sizes = [flat.numel() // self.mesh.size()] * self.mesh.size()
        return all_to_all_single_autograd(flat, sizes, sizes, self.mesh.get_group())

    def compute(self, x: Tensor) -> Tensor:
        gate, up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.gate, self.up, self.down))
        return torch.bmm(F.silu(torch.bmm(x, gate)) * torch.bmm(x, up), down)


class Mixture(nn.Module):
    """The experts that a router chooses for each token, weighted, and one for all."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(config.dim, config.experts, bias=False)
        self.experts = Experts(config)
        self.shared = FeedForward(dataclasses.replace(config, ffn_dim=config.shared_dim))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        num_experts, active = self.config.experts, self.config.active
        capacity = math.ceil(len(tokens) * active / num_experts * self.config.capacity)
        weights, chosen = self.router(tokens).float().softmax(-1).topk(active)
        expert, order = chosen.flatten().sort(stable=True)
        begin = torch.searchsorted(expert, torch.arange(num_experts, device=x.device))
        slot = torch.arange(len(expert), device=x.device) - begin[expert]
        row = torch.where(slot < capacity, expert * capacity + slot, num_experts * capacity)  # the last is for the rest
        source = order // active
        sent = tokens.new_zeros(num_experts * capacity + 1, tokens.shape[1]).index_copy(0, row, tokens[source])
        computed = self.experts(sent[:-1].view(num_experts, capacity, -1)).flatten(0, 1)
        weight = (weights.flatten()[order] * (slot < capacity)).to(x.dtype)
        found = F.pad(computed, (0, 0, 0, 1))[row] * weight[:, None]
        return (torch.zeros_like(tokens).index_add(0, source, found) + self.shared(tokens)).view_as(x)


class Decoder(Llama):
    """A Llama whose layers, but for the first ones, have a mixture in the place of a feed-forward layer."""

    config: MixtureConfig

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__(config)
        for layer in self.layers[config.dense_layers :]:
            layer.ffn = Mixture(config)


def parallelize(model: Decoder, mesh: DeviceMesh) -> Decoder:
    """Split all experts over mesh["ep"]."""
    if "tp" in (mesh.mesh_dim_names or ()):
        raise ValueError("this file splits experts, and nothing over tp")
    if model.config.experts % mesh["ep"].size():
        raise ValueError(f"{model.config.experts} experts for {mesh['ep'].size()} ranks")
    for module in model.modules():
        if isinstance(module, Experts):
            module.split(mesh["ep"])
    return model


def mixture_16b(dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """16 billion parameters on the meta device, of which a token meets 2.7 billion."""
    return on_meta(MIXTURE_16B, dtype)


def mixture_671b(dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """With the layers, experts and widths of DeepSeek-V3, on the meta device."""
    return on_meta(MIXTURE_671B, dtype)


def mixture_small(dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """One whose plan takes seconds, on the meta device."""
    return on_meta(SMALL, dtype)


def on_meta(config: MixtureConfig, dtype: torch.dtype) -> Decoder:
    with torch.device("meta"):
        return Decoder(config).to(dtype)


def main() -> None:
    dist.init_process_group("fake", rank=0, world_size=8)
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("efsdp", "ep"))
    model = parallelize(mixture_small(), mesh)
    meshes = {"": mesh._flatten("dp"), "*.experts": mesh["efsdp"]}
    print(rewrite(model, *inputs(2, 16), world_size=meshes).schedule())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
