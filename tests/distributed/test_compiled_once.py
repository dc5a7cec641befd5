"""The ranks of a host generate the code of a graph once."""

import time

import torch
from torch import nn
from torch._dynamo.utils import counters

from fsdp_compile import fsdp_compile
from tests.ranks import run_on_ranks


class Scaled(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.linear, self.factor = nn.Linear(8, 8), factor

    def forward(self, x):
        return self.linear(x).tanh() * self.factor


def compiled_and_found(factor):
    """How many graphs this rank has compiled, and how many it found in the cache."""
    counters.clear()
    fsdp_compile(Scaled(factor), backend="inductor")(torch.randn(4, 8)).sum().backward()
    return [counters["inductor"][f"fxgraph_cache_{what}"] for what in ("miss", "hit")]


def test_a_graph_is_compiled_by_one_rank_and_found_by_the_others():
    never_seen = time.time()
    found = run_on_ranks(3, compiled_and_found, never_seen)
    assert [sum(counts) for counts in zip(*found, strict=True)] == [2, 4], found
