"""What fsdp_compile makes of a tiny model, printed. One process, no process group.

python examples/inspect_graph.py
python examples/inspect_graph.py --world-size 8 --lowering grouped --prefetch 0
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from fsdp_compile import rewrite


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Tiny(nn.Module):
    def __init__(self, dim: int = 8, num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(dim) for _ in range(num_layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


FORWARD = """\
The forward
===========
Each layer is a unit, and one input: this rank's flat shard of it. It is gathered before its first use, the
next one while this one computes, and freed after its last use. What follows the loss among the outputs is for
the backward: activations and flat shards, nothing gathered, except the last layer, which it needs at once.
"""
BACKWARD = """\
The backward
============
Layers are gathered again, last one first. The gradients of a layer are packed, reduced over the ranks and
scattered: what comes out has the shape of the flat shard.
"""
SCHEDULE = """\
The schedule
============
The same order without the data: compute on the left, communication on the right, and in the margin how many
bytes of full parameters and gradients are alive.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--lowering", default="packed", choices=["packed", "grouped"])
    parser.add_argument("--prefetch", type=int, default=1, help="how many gathers ahead, in both directions")
    options = parser.parse_args()

    graphs = rewrite(
        Tiny(),
        torch.randn(4, 8),
        world_size=options.world_size,
        collective_lowering=options.lowering,
        forward_prefetch=options.prefetch,
        backward_prefetch=options.prefetch,
    )
    print(f"{FORWARD}\n{graphs.forward}\n")
    print(f"{BACKWARD}\n{graphs.backward}\n")
    print(f"{SCHEDULE}\n{graphs.schedule()}")


if __name__ == "__main__":
    main()
