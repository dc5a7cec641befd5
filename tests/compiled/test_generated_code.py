"""What Inductor makes of the rewritten graphs: the schedule survives code generation.

One process: the "fake" process group has the ranks of a larger job and sends nothing, so that code is generated for
real and runs, with wrong values.
"""

import re

import pytest
import torch
import torch.distributed as dist
from torch._inductor.utils import run_and_get_code, run_fw_bw_and_get_code
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_compile import fsdp_compile
from tests.models import build

MATMULS = {"mm", "addmm", "bmm", "baddbmm", "convolution"}
COLLECTIVES = {
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "all_reduce",
    "wait_tensor",
}


@pytest.fixture(autouse=True)
def four_ranks():
    torch._dynamo.reset()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def order_in_graph(gm):
    """The collectives, waits and matmuls of a lowered graph, in order."""
    names = [node.target._schema.name.partition("::")[2] for node in gm.graph.nodes if hasattr(node.target, "_schema")]
    return [name for name in names if name in MATMULS | COLLECTIVES]


def order_in_code(code):
    """The same calls in the code that Inductor generated; an in-place collective counts as what it stands for."""
    body = code[code.index("def call(") :]
    called = re.findall(r"(?:extern_kernels|_c10d_functional|ops\.aten)\.(\w+?)_?(?:\.default)?\(", body)
    return [name for name in called if name in MATMULS | COLLECTIVES]


@pytest.mark.parametrize("lowering", ["packed", "grouped"])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_generated_code_keeps_the_order_of_the_schedule(lowering, prefetch):
    model = fsdp_compile(
        build("gpt"), collective_lowering=lowering, forward_prefetch=prefetch, backward_prefetch=prefetch
    )
    inputs = model.inputs(2, seed=0)
    _, (forward, backward) = run_fw_bw_and_get_code(lambda: model(*inputs))
    lowered = model.graphs[0].lowered
    assert order_in_code(forward) == order_in_graph(lowered.forward)
    assert order_in_code(backward) == order_in_graph(lowered.backward)
    assert set(order_in_graph(lowered.backward)) & MATMULS


def test_inference_code_keeps_the_order_of_the_schedule():
    model = fsdp_compile(build("gpt"))
    inputs = model.inputs(2, seed=0)
    with torch.no_grad():
        _, (code,) = run_and_get_code(model, *inputs)
    assert order_in_code(code) == order_in_graph(model.graphs[0].lowered.forward)
    assert model.graphs[0].backward is None


def test_grouped_gathers_copy_nothing():
    """The collectives read slices of the shards and fill the parameters: no kernel touches either on the way."""
    model = fsdp_compile(build("gpt"), collective_lowering="grouped")
    inputs = model.inputs(2, seed=0)
    _, (forward, _) = run_fw_bw_and_get_code(lambda: model(*inputs))
    calls = re.findall(r"all_gather_into_tensor_coalesced\.default\(\[(.*?)\], ", forward)
    assert calls
    for arguments in calls:
        assert re.fullmatch(r"(reinterpret_tensor\(primals_\d+, .*?\)|primals_\d+)(, (?:reinterpret.*|primals.*))*", arguments)
        assert "buf" not in arguments
    weights = [line for line in forward.splitlines() if re.search(r"extern_kernels\.(mm|addmm)\(", line)]
    waited = set(re.findall(r"wait_tensor\.default\((\w+)\)", forward))
    assert all(waited & set(re.findall(r"\w+", line)) for line in weights)
