import pytest
import torch
from torch import nn

from fsdp_compile import rewrite
from fsdp_compile.costs.nodes import Kernel, flops_of, kernels_of
from tests.costs.test_collectives import SMALL
from tests.passes.tiny import Chain, rows


def forward_of(model, *inputs, world_size=2):
    return rewrite(model, *inputs, world_size=world_size, auto_wrap_policy=nn.Linear).forward.graph


def names(kernels):
    return [[node.name for node in kernel.nodes] for kernel in kernels]


def test_a_multiply_add_is_two_flops():
    graph = forward_of(Chain(up=nn.Linear(4, 8)), rows(4, 3))
    (matmul,) = [node for node in graph.nodes if node.name == "addmm"]
    assert flops_of(matmul) == 2 * 3 * 4 * 8


def test_light_operators_between_heavy_ones_are_one_kernel():
    graph = forward_of(Chain(up=nn.Linear(4, 8), act=nn.Tanh(), rectified=nn.ReLU(), down=nn.Linear(8, 4)), rows())
    fused = kernels_of(graph, compiler="inductor")
    assert ["tanh", "relu"] in [[name for name in found if "copy_out" not in name] for found in names(fused)]
    single = kernels_of(graph, compiler="aot_eager")
    assert all(len(kernel.nodes) == 1 for kernel in single)
    assert sum(kernel.num_bytes for kernel in fused) <= sum(kernel.num_bytes for kernel in single)
    assert sum(kernel.flops for kernel in fused) == sum(kernel.flops for kernel in single)


def test_the_traffic_of_a_matmul():
    """Rows f32[3, 4] and the weight f32[8, 4] and bias f32[8] are read, f32[3, 8] is written."""
    graph = forward_of(Chain(up=nn.Linear(4, 8)), rows(4, 3))
    (kernel,) = [found for found in kernels_of(graph, compiler="aot_eager") if found.nodes[0].name == "addmm"]
    assert kernel.num_bytes == 4 * (3 * 4 + 8 * 4 + 8 + 3 * 8)
    assert kernel.dtype == torch.float32


def test_a_copy_reads_and_writes_one_parameter():
    graph = forward_of(Chain(up=nn.Linear(4, 8)), rows(4, 3))
    copies = [found for found in kernels_of(graph, compiler="aot_eager") if "copy_out" in found.nodes[0].name]
    assert [kernel.num_bytes for kernel in copies] == [2 * 4 * 32, 2 * 4 * 8]


@pytest.mark.parametrize("flops, num_bytes, seconds", [(2e12, 1e9, 2.0), (1e9, 4e11, 4.0)])
def test_the_roofline(flops, num_bytes, seconds):
    assert Kernel((), (), flops, torch.float32, num_bytes).seconds(SMALL) == pytest.approx(seconds)


class GroupedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, q, k):
        return nn.functional.scaled_dot_product_attention(self.project(q), k, k, enable_gqa=True)


def test_attention_counts_every_head_of_the_queries():
    """Queries f32[2, 4, 16, 8] and keys of half as many heads: two products of 16 x 16 x 8 for each head."""
    graph = forward_of(GroupedAttention(), torch.randn(2, 4, 16, 8), torch.randn(2, 2, 16, 8))
    (attention,) = [node for node in graph.nodes if "attention" in str(node.target)]
    assert flops_of(attention) == 2 * (2 * 4) * 2 * 16 * 16 * 8
