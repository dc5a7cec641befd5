"""What Inductor makes of the rewritten graphs: the schedule survives code generation.

One process: the "fake" process group has the ranks of a larger job and sends nothing, so that code is generated for
real and runs, with wrong values.
"""

import functools
import os
import re
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code, run_fw_bw_and_get_code
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_compile import fsdp_compile
from fsdp_compile.compiler.inductor_options import KEEP_SCHEDULE
from fsdp_compile.passes import ops
from tests.distributed.test_tensor_parallel import SEQUENCE, WIDTH, Block, Net, by_sequence
from tests.models import build
from tests.passes.tiny import Checkpointed

MATMULS = {"mm", "addmm", "bmm", "baddbmm", "convolution"}
COLLECTIVES = {
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "all_reduce",
    "wait_tensor",
}


pytestmark = pytest.mark.usefixtures("four_ranks")


def name_of(node):
    """The name of the operator; a collective of our dialect counts as what it is lowered to."""
    if ops.is_all_gather(node):
        return "all_gather_into_tensor"
    if ops.is_reduction(node):
        return "reduce_scatter_tensor"
    return node.target._schema.name.partition("::")[2] if hasattr(node.target, "_schema") else ""


def order_in_graph(gm):
    """The collectives, waits and matmuls of a lowered graph, in order."""
    names = [name_of(node) for node in gm.graph.nodes]
    return [name for name in names if name in MATMULS | COLLECTIVES]


def order_in_code(code):
    """The same calls in the code that Inductor generated; an in-place collective counts as what it stands for."""
    called = re.findall(r"(?:extern_kernels|_c10d_functional|ops\.aten)\.(\w+?)_?(?:\.default)?\(", inlined(code))
    return [name for name in called if name in MATMULS | COLLECTIVES]


def inlined(code):
    """The function `call` of generated code, with the functions that it calls where it calls them."""
    functions = dict(re.findall(r"^def (\w+)\(args\):\n((?: .*\n|\n)*)", code, re.MULTILINE))
    return re.sub(r"= (\w+)\(\1_args\)", lambda found: functions[found[1]], functions["call"])


def generate(lowering, prefetch=1, **options):
    """The graphs of a GPT, and the code of its forward and of its backward."""
    options |= {"collective_lowering": lowering, "forward_prefetch": prefetch, "backward_prefetch": prefetch}
    model = fsdp_compile(build("gpt"), **options)
    inputs = model.inputs(2, seed=0)
    _, codes = run_fw_bw_and_get_code(lambda: model(*inputs))
    return model.graphs[0], codes


generated = functools.cache(generate)


def assert_keeps_the_order(graphs, codes):
    for code, gm in zip(codes, (graphs.lowered.forward, graphs.lowered.backward), strict=True):
        assert order_in_code(code) == order_in_graph(gm)
        assert set(order_in_graph(gm)) & MATMULS


@pytest.mark.parametrize("lowering", ["packed", "grouped"])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_generated_code_keeps_the_order_of_the_schedule(lowering, prefetch):
    assert_keeps_the_order(*generated(lowering, prefetch))


def test_generated_code_of_checkpointed_layers_keeps_the_order_of_the_schedule():
    """All parameters are read in graphs inside of Dynamo's."""
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)]
    model = fsdp_compile(Checkpointed(a=layers[0], b=layers[1], c=layers[2]), auto_wrap_policy=nn.Linear)
    x = torch.randn(4, 8, requires_grad=True)
    _, codes = run_fw_bw_and_get_code(lambda: model(x).sum())
    assert_keeps_the_order(model.graphs[0], codes)


def test_inference_code_keeps_the_order_of_the_schedule():
    model = fsdp_compile(build("gpt"))
    inputs = model.inputs(2, seed=0)
    with torch.no_grad():
        _, (code,) = run_and_get_code(model, *inputs)
    assert order_in_code(code) == order_in_graph(model.graphs[0].lowered.forward)
    assert model.graphs[0].backward is None


TURNED_ON = {  # whatever reorders nodes or collectives in some version of torch, as it would do the most
    "reorder_for_locality": True,
    "reorder_for_peak_memory": True,
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["reorder_compute_for_overlap", "sink_waits", "raise_comms"],
    "aten_distributed_optimizations.enable_overlap_scheduling": True,
    "aten_distributed_optimizations.enable_simple_overlap": True,
    "bucket_all_gathers_fx": "all",
    "bucket_all_reduces_fx": "all",
    "bucket_reduce_scatters_fx": "all",
    "combo_kernels": True,
    "_fuse_ddp_communication": True,
    "_micro_pipeline_tp": True,
}
HARMLESS = (  # matched by the pattern below, and they do nothing where what is in inductor_options.py is off
    r"_fuse_ddp_(bucket_size|communication_passes)",
    r"aten_distributed_optimizations\.(?!allow_comms_decompositions|enable_(low|overlap|simple)).*",
    r"bucket_.*_(mode|determinator)",
    r"min_overlap_ratio|reorder_prefetch_limit|reorder_for_locality_in_training|reorder_for_peak_memory_debug",
    r"reorder_for_compute_comm_overlap_passes",
    r"(benchmark_)?combo_kernel.*",
    r"halide\.scheduler_.*|test_configs\..*",
)


def test_every_setting_of_inductor_that_reorders_is_known():
    """A new version of torch may bring more: decide about each, in inductor_options.py or above."""
    pattern = re.compile(
        "reorder|overlap|bucket|schedul|_fusion_custom_pass|combo_kernel|comm_fus|fuse_ddp|pipeline_tp"
    )
    found = {name for name in torch._inductor.list_options() if pattern.search(name)}
    harmless = re.compile("|".join(HARMLESS))
    undecided = {name for name in found - set(KEEP_SCHEDULE) if not harmless.fullmatch(name)}
    assert undecided == set()


@pytest.mark.parametrize("lowering", ["packed", "grouped"])
def test_nothing_reorders_what_is_turned_on_globally(lowering):
    known = {name: value for name, value in TURNED_ON.items() if name in torch._inductor.list_options()}
    with torch._inductor.config.patch(known):
        assert_keeps_the_order(*generate(lowering))


def test_grouped_gathers_copy_nothing():
    """The collectives read slices of the shards and fill the parameters: no kernel touches either on the way."""
    _, (forward, _) = generated("grouped", 1)
    calls = re.findall(r"all_gather_into_tensor_coalesced\.default\(\[(.*?)\], ", forward)
    assert calls
    for arguments in calls:
        assert re.fullmatch(
            r"(reinterpret_tensor\(primals_\d+, .*?\)|primals_\d+)(, (?:reinterpret.*|primals.*))*", arguments
        )
        assert "buf" not in arguments
    weights = [line for line in forward.splitlines() if re.search(r"extern_kernels\.(mm|addmm)\(", line)]
    waited = set(re.findall(r"wait_tensor\.default\((\w+)\)", forward))
    assert all(waited & set(re.findall(r"\w+", line)) for line in weights)


def test_copies_of_parameters_are_one_call_each():
    """No kernel is generated for them, nor for the parameters that are kept for the backward."""
    model = fsdp_compile(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), auto_wrap_policy=nn.Linear)
    _, (forward, _) = run_fw_bw_and_get_code(lambda: model(torch.randn(4, 8)).sum())
    assert len(re.findall(r"torch\.clone\(reinterpret_tensor\(", forward)) == 4
    assert "cpp_fused" not in forward


def test_generated_code_is_taken_from_inductors_cache():
    def compile_anew():
        torch._dynamo.reset()
        counters.clear()
        model = fsdp_compile(build("few_rows"))
        model(*model.inputs(2, seed=0)).backward()
        assert "fxgraph_cache_bypass" not in counters["inductor"]
        return counters["inductor"]["fxgraph_cache_hit"]

    compile_anew()
    assert compile_anew() == 2  # forward and backward


GENERATED = """
import sys, torch
from torch import nn
from torch._dynamo.utils import counters
from fsdp_compile import fsdp_compile
from fsdp_compile.compiler import partitioner
if len(sys.argv) > 1:  # as if our sources were others
    partitioner.generator_digest = lambda: b"another version"
model = fsdp_compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
model(torch.ones(2, 4)).sum().backward()
print(counters["inductor"]["fxgraph_cache_hit"])
"""


def test_code_is_taken_from_the_cache_by_another_process_of_the_same_version(tmp_path):
    """Of graphs that read no shard, too, which is all that a single rank has."""

    def hits(*arguments):
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        run = [sys.executable, "-c", GENERATED, *arguments]
        return int(subprocess.run(run, env=environment, check=True, capture_output=True, text=True).stdout)

    assert [hits(), hits(), hits("other")] == [0, 2, 0]


@pytest.mark.parametrize("lowering", ["packed", "grouped"])
def test_gathered_buffers_are_dead_where_the_schedule_frees_them(lowering):
    """No kernel reads a gathered buffer after the next matmul that follows its last free."""
    graphs, codes = generate(lowering, reshard_after_forward=True)
    for code, side in zip(codes, (graphs.forward, graphs.backward), strict=True):
        lives_in_code = lives_of_buffers(code)
        lives_in_graph = lives_of_gathers(side.graph)
        assert len(lives_in_code) == len(lives_in_graph) > 0
        for in_code, in_graph in zip(lives_in_code, lives_in_graph, strict=True):
            assert in_code <= in_graph


def steps(names):
    """For each name, how many matmuls stand before it."""
    count = 0
    for name in names:
        yield count
        count += name in MATMULS


def lives_of_buffers(code):
    """For every gather in the code, in order, the step in which its buffers are read for the last time."""
    lines = [
        line for line in code[code.index("def call(") :].splitlines() if "assert" not in line and "del " not in line
    ]
    calls = [order_in_code(f"def call(args):\n {line}\n") for line in lines]
    step_of_line = list(steps(call[0] if call else "" for call in calls))
    lives = []
    for index, line in enumerate(lines):
        if gathered := re.match(r"\s*(buf\d+) = torch\.ops\._c10d_functional\.all_gather_into_tensor", line):
            names = {gathered[1]}
            names |= {m[1] for other in lines if (m := re.match(rf"\s*(buf\d+) = {gathered[1]}\[\d+\]", other))}
            reads = [i for i, other in enumerate(lines) if i > index and names & set(re.findall(r"buf\d+", other))]
            lives.append(step_of_line[reads[-1]])
    return lives


def lives_of_gathers(graph):
    """For every gather of a schedule, in order, the step in which the last of what was gathered is freed."""
    nodes = list(graph.nodes)
    step_of_node = dict(zip(nodes, steps(name_of(node) for node in nodes), strict=True))
    lives = []
    for node in nodes:
        if ops.is_all_gather(node):
            (wait,) = node.users
            buffers = [wait, *(out for out in wait.users if ops.is_call(out, ops.COPY_OUT))]
            frees = [user for buffer in buffers for user in buffer.users if ops.is_call(user, ops.FREE)]
            lives.append(max(step_of_node[free] for free in frees))
    return lives


@pytest.mark.parametrize("lowering", ["packed", "grouped"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_buffers_in_flight_are_left_alone(lowering, prefetch):
    assert_leaves_alone(*generated(lowering, prefetch))


def test_collectives_of_the_model_run_beside_matmuls_and_are_left_alone():
    """With sequence parallelism (tests/test_composition_graphs.py has such a schedule)."""
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = fsdp_compile(by_sequence(Net(), root["tp"]), root["dp"], auto_wrap_policy=ModuleWrapPolicy({Block}))
    x = torch.randn(2, SEQUENCE, WIDTH, requires_grad=True)
    _, codes = run_fw_bw_and_get_code(lambda: model(x))
    assert_keeps_the_order(model.graphs[0], codes)
    assert_leaves_alone(model.graphs[0], codes)


def assert_leaves_alone(graphs, codes):
    """From its start to its wait, what a collective reads is not let go of, and what it fills is not touched."""
    num_checked = 0
    for code in codes:
        lines = [line.strip() for line in code[code.index("def call(") :].splitlines()]
        for start, line in enumerate(lines):
            if "ops._c10d_functional." in line and not re.search(r"wait_tensor|assert_", line):
                filled, read = buffers_of_collective(lines, start)
                ends = [end for end, other in enumerate(lines) if is_wait_for(other, filled)]
                assert ends, line
                for other in lines[start + 1 : min(ends)]:
                    touched = set(re.findall(r"\w+", other.partition("#")[0]))
                    is_part = re.match(r"buf\d+ = buf\d+(\[\d+\])?$", other.partition("#")[0].strip())
                    is_list = other == f"del {lines[start].partition(' = ')[0]}" and len(filled) > 1
                    is_ours = is_wait_for(other, filled) or is_part or is_list or "assert_" in other
                    assert is_ours or not touched & filled, (line, other)
                    assert not (other.startswith("del ") or "reuse" in other) or not touched & read, (line, other)
                num_checked += 1
    assert num_checked == sum(
        name in COLLECTIVES - {"wait_tensor"}
        for gm in (graphs.lowered.forward, graphs.lowered.backward)
        for name in order_in_graph(gm)
    )


def buffers_of_collective(lines, start):
    """The buffers that a collective fills, and those that it reads."""
    result, _, call = lines[start].rpartition(" = ")
    named = re.findall(r"\b(?:buf|primals_|tangents_)\d+\b", call)
    read, filled = set(named), {result or named[0]}  # one without a result works in place
    for other in lines[start + 1 :]:
        part = re.match(r"(buf\d+) = (buf\d+)(?:\[\d+\])?(?:;|$| )", other)
        if part and part[2] in filled and "wait_tensor" not in other:
            filled.add(part[1])
    return filled, read - filled


def is_wait_for(line, filled):
    return "wait_tensor" in line and bool(filled & set(re.findall(r"buf\d+", line)))
