"""The programs of small models, checked, and broken on purpose; test_emulation.py runs this where a GPU is emulated."""

import contextlib
import dataclasses
import math
import re
from collections import Counter
from functools import cache
from unittest.mock import patch

import pytest
import torch
import torch._inductor.compile_fx
import torch._inductor.output_code
from torch import nn
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, ShardingStrategy
from torch.utils._pytree import tree_map_only

import fsdp_compile
from fsdp_compile import traced_call
from fsdp_compile.compiler.partitioner import bucket_gradients
from fsdp_compile.costs import predict
from fsdp_compile.costs.hardware import find_hardware
from fsdp_compile.emulation import checks
from fsdp_compile.emulation.build import build
from fsdp_compile.emulation.kernels import kernels_of
from fsdp_compile.emulation.memory import bytes_at_steps, peak_bytes
from fsdp_compile.emulation.prediction import predict_built
from fsdp_compile.emulation.wrapper import steps_of
from fsdp_compile.options import Options
from fsdp_compile.passes import ops
from tests.costs.test_memory import Attention, Checkpointed
from tests.emulation import cases
from tests.passes.test_precision import shards_of
from tests.ranks import join_fake_group

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
PROGRAMS = {
    "grouped": ("gpt", {"collective_lowering": "grouped"}, 4),
    "packed": ("gpt", {"collective_lowering": "packed"}, 4),
    "prefetch 2": ("gpt", {"forward_prefetch": 2, "backward_prefetch": 2, "collective_lowering": "grouped"}, 4),
    "mixed": ("gpt", {"mp_policy": MIXED, "collective_lowering": "grouped"}, 4),
    "mixed packed": ("gpt", {"mp_policy": MIXED, "collective_lowering": "packed"}, 4),
    "offload": ("gpt", {"offload_policy": CPUOffloadPolicy(), "collective_lowering": "grouped"}, 4),
    "offload packed": ("odd_mlp", {"offload_policy": CPUOffloadPolicy(), "collective_lowering": "packed"}, 4),
    "no prefetch": (
        "odd_mlp",
        {"forward_prefetch": 0, "backward_prefetch": None, "collective_lowering": "grouped"},
        4,
    ),
    "replicated": (
        "odd_mlp",
        {"sharding_strategy": ShardingStrategy.NO_SHARD, "collective_lowering": "grouped"},
        4,
    ),
    "budget": ("gpt", {"hardware": "h100", "memory_budget": "1GiB", "collective_lowering": "grouped"}, 4),
    "resharding": ("gpt", {"reshard_after_forward": True, "collective_lowering": "grouped"}, 4),
    "hybrid": (
        "odd_mlp",
        {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "collective_lowering": "grouped"},
        (2, 2),
    ),
    "planned": ("odd_mlp", {"hardware": "h100", "collective_lowering": "grouped"}, 4),
    "convolutions": ("conv_net", {"collective_lowering": "grouped"}, 4),
    "grouped queries": ("llama", {"collective_lowering": "grouped"}, 4),
    "odd rows": ("odd_mlp", {"collective_lowering": "packed"}, 4),
}


def built(model, options, ranks=4, rows=2):
    torch._dynamo.reset()
    made = cases.made(model)
    inputs = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), made.inputs(rows, seed=0))
    return build(made.to("meta"), inputs, {}, Options(**options), ranks)


@cache
def program(name, world_size=None):
    model, options, ranks = PROGRAMS[name]
    return built(model, options, world_size or ranks)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_keeps_its_schedule(name):
    built = program(name)
    assert checks.check(built) == []
    assert any(step.kind == "collective" for step in steps_of(built.halves[-1].wrapper))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("gpt", {"collective_lowering": "grouped"}),
        ("gpt", {"collective_lowering": "packed"}),
        ("odd_mlp", {"collective_lowering": "grouped", "offload_policy": CPUOffloadPolicy()}),
    ],
)
def test_inference_keeps_its_schedule(model, options):
    with torch.no_grad():
        found = built(model, options)
    assert len(found.halves) == 1 and checks.check(found) == []


@contextlib.contextmanager
def tracing(prepare):
    """Inside, `prepare` may change the model that is traced."""
    reading_copy = traced_call.reading_copy

    def reading(*args):
        found = reading_copy(*args)
        prepare(found)
        return found

    with patch.object(traced_call, "reading_copy", reading):
        yield


def keep_gradients(reading):
    """As in a micro-batch under no_sync."""
    for shard in shards_of(reading):
        shard.gradient = "keep"
        shard.accumulated = nn.Parameter(shard.data.new_empty(()).expand(4 * shard.data.numel()))


def take_along_kept_gradients(reading):
    """As in the micro-batch after those, which reduces."""
    for shard in shards_of(reading):
        shard.accumulated = nn.Parameter(shard.data.new_empty(4 * shard.data.numel()), requires_grad=False)


@pytest.mark.parametrize("lowering", ["grouped", "packed"])
def test_accumulation_keeps_its_schedule(lowering):
    with tracing(keep_gradients):
        kept = built("odd_mlp", {"collective_lowering": lowering})
    with tracing(take_along_kept_gradients):
        taken = built("odd_mlp", {"collective_lowering": lowering})
    assert checks.check(kept) == checks.check(taken) == []
    steps = [steps_of(each.halves[1].wrapper) for each in (kept, taken)]
    reductions = [[step.name for step in each if step.name.startswith("reduce_scatter")] for each in steps]
    assert not reductions[0] and set(reductions[1]) == {"reduce_scatter_tensor"}
    # The kernel that packs a bucket adds what was kept.
    assert len({sum(step.kind == "kernel" for step in each) for each in steps}) == 1


@contextlib.contextmanager
def varying_rows():
    """Inside, models are traced for any number of rows."""
    off_meta = traced_call.off_meta

    def marked(values, device):
        found = off_meta(values, device)
        if isinstance(values, tuple):  # of the arguments of a call
            for tensor in found[0]:
                torch._dynamo.mark_dynamic(tensor, 0)
        return found

    with patch.object(traced_call, "off_meta", marked):
        yield


@pytest.mark.parametrize("lowering", ["grouped", "packed"])
def test_a_program_for_any_number_of_rows_keeps_its_schedule(lowering):
    with varying_rows():
        found = built("odd_mlp", {"collective_lowering": lowering}, rows=6)
    assert checks.check(found) == []
    symbols = [node.meta["val"] for node in found.graphs.forward.graph.nodes if node.op == "placeholder"]
    assert any(isinstance(value, torch.SymInt) for value in symbols)
    assert 0 in found.halves[0].bytes_of_buffer.values() and any(found.halves[0].bytes_of_buffer.values())


class Recording:
    """What Inductor would record as CUDA graphs: for each, which inputs stay where they are, and which do not.

    Attributes:
        reasons: why it does without.
    """

    def __init__(self):
        self.static, self.others, self.reasons = [], [], []

    def cudagraphify(self, compiled, *, static_input_idxs, placeholders, **kwargs):
        names = [placeholder.name for placeholder in placeholders]
        self.static.append([names[index] for index in static_input_idxs])
        self.others.append([name for name in names if name not in self.static[-1]])
        return compiled

    def __enter__(self):
        torch_compile, output = torch._inductor.compile_fx, torch._inductor.output_code
        self.patches = contextlib.ExitStack()
        self.patches.enter_context(patch.object(torch_compile, "cudagraphify", self.cudagraphify))
        self.patches.enter_context(patch.object(output, "log_cudagraph_skip_and_bump_counter", self.reasons.append))
        self.patches.enter_context(config.patch({"triton.cudagraphs": True}))
        return self

    def __exit__(self, *error):
        self.patches.close()


@pytest.mark.parametrize("lowering", ["grouped", "packed"])
def test_forward_and_backward_can_be_cuda_graphs(lowering):
    with Recording() as recording:
        found = built("odd_mlp", {"collective_lowering": lowering})
    assert checks.check(found) == [] and recording.reasons == []
    forward, backward = found.graphs.forward.graph, found.graphs.backward.graph
    inputs = [[node for node in graph.nodes if node.op == "placeholder"] for graph in (forward, backward)]
    batch = [node.name for node in inputs[0] if node.meta["val"].shape in [(2, 5), (2, 1)]]
    tangents = [node.name for node in inputs[1] if "tangents" in node.name]
    saved_batch = [node.name for node in inputs[1] if node.name in batch]
    assert len(batch) == 2 and len(tangents) == 1 and saved_batch
    assert recording.others == [batch, tangents]  # the backward finds the batch where the forward's graph read it


def test_gradients_that_are_kept_are_not_at_one_address_for_cuda_graphs():
    with Recording() as recording, tracing(take_along_kept_gradients):
        found = built("odd_mlp", {"collective_lowering": "packed"})
    kept = {gradient.accumulated for gradient in bucket_gradients(found.graphs.backward.graph)}
    assert recording.reasons == [] and len(kept) == 3
    assert kept <= set(recording.others[1]) and not kept & {*recording.static[0], *recording.static[1]}


def test_offloaded_shards_keep_inductor_from_cuda_graphs():
    with Recording() as recording:
        found = built("odd_mlp", {"collective_lowering": "grouped", "offload_policy": CPUOffloadPolicy()})
    assert checks.check(found) == [] and recording.static == []
    (reason,) = recording.reasons  # of the forward; Inductor makes none of the backward then
    assert "cpu device (primals_1)" in reason


def test_attention_that_is_computed_again_takes_the_state_of_a_generator_along():
    """From torch 2.15 on, where it has dropout only."""
    torch._dynamo.reset()
    model = Checkpointed(first=Attention(dropout=0.1), second=Attention(dropout=0.1)).to("meta")
    built = build(model, (torch.randn(5, 3, 8, device="meta"),), {}, Options(collective_lowering="grouped"), 2)
    states = [node for node in built.graphs.backward.graph.nodes if ops.is_generator(node)]
    assert len(built.halves) == 2 and states
    assert checks.check(built) == []
    predict(built.graphs, find_hardware("h100"))


def broken(name, half, pattern, replacement, check):
    """What a check says of a wrapper in which the first match of a pattern is replaced."""
    wrapper = program(name).halves[half].wrapper
    text, num = re.subn(pattern, replacement, wrapper, count=1, flags=re.M)
    assert num == 1
    return list(check(steps_of(text)))


def lowered(name, half):
    graphs = program(name).graphs.lowered
    return (graphs.forward, graphs.backward)[half].graph


def test_a_wait_that_is_missing_is_found():
    wait = r"^ *torch\.ops\._c10d_functional\.wait_tensor\.default\(\w+\)\n"
    found = broken("grouped", 0, wait, "", lambda steps: checks.order(steps, lowered("grouped", 0)))
    assert found and "the schedule has" in found[0]
    assert "nothing waits for" in broken("packed", 0, wait, "", checks.in_flight)[0]


def test_two_collectives_that_are_exchanged_are_found():
    gather, reduce = r"reduce_scatter_tensor_coalesced\.default\(", "all_gather_into_tensor_coalesced.default("
    (found,) = broken("grouped", 1, gather, reduce, lambda steps: checks.order(steps, lowered("grouped", 1)))
    assert "is all_gather_into_tensor_coalesced, and the schedule has reduce_scatter_tensor_coalesced" in found


def test_a_buffer_that_is_freed_while_it_is_sent_is_found():
    start = r"^( *)(buf\d+) = (torch\.ops\._c10d_functional\.reduce_scatter_tensor\.default\(.*?(buf\d+),.*)$"
    (found, *_) = broken("packed", 1, start, r"\1\2 = \3\n\1del \4", checks.in_flight)
    assert re.search(r"buf\d+ is freed, which line \d+ is sending", found)


def test_a_buffer_that_is_touched_while_it_is_filled_is_found():
    start = r"^( *)(buf\d+) = (torch\.ops\._c10d_functional\.all_gather_into_tensor\.default\(.*)$"
    (found, *_) = broken("packed", 0, start, r"\1\2 = \3\n\1extern_kernels.mm(\2, \2, out=\2)", checks.in_flight)
    assert re.search(r"mm touches buf\d+, which line \d+ is filling", found)


def test_a_copy_that_nothing_waits_for_is_found():
    wait = r"^( *)(buf\d+) = torch\.ops\.fsdp\.copy_wait\.default\((buf\d+), .*\)$"
    assert "nothing waits for copy_start" in broken("offload", 1, wait, r"\1\2 = \3", checks.in_flight)[0]
    found = broken("offload", 0, wait, r"\1\2 = \3", lambda steps: checks.order(steps, lowered("offload", 0)))
    assert "the schedule has copy_wait" in found[0]


def test_a_gradient_that_is_freed_while_it_is_copied_is_found():
    start = r"^( *)(buf\d+) = (torch\.ops\.fsdp\.copy_start\.default\((buf\d+),.*)$"
    (found, *_) = broken("offload packed", 1, start, r"\1\2 = \3\n\1del \4", checks.in_flight)
    assert re.search(r"buf\d+ is freed, which line \d+ is sending", found)


def test_what_is_offloaded_takes_no_memory_of_the_gpu():
    forward, backward = program("offload packed").halves
    gradients = [name for name in steps_of(backward.wrapper)[-1].reads if name.startswith("buf")]
    assert len(gradients) == 3 and not any(backward.bytes_of_buffer[name] for name in gradients)
    shards = [step.reads[0] for step in steps_of(forward.wrapper) if step.kind == "copy"]
    assert len(shards) == 3 and not any(forward.bytes_of_buffer[name] for name in shards)


def test_a_read_after_the_free_is_found():
    built = program("resharding")
    steps = steps_of(built.halves[0].wrapper)
    gather = next(step for step in steps if step.kind == "collective")
    filled = next(step.result for step in steps if step.kind == "alias" and step.reads == (gather.result,))
    found = broken(
        "resharding",
        0,
        r"^( *)return \(",
        rf"\1late = torch.ops.aten.sin.default({filled})\n\1return (",
        lambda steps: checks.late_reads(steps, built.graphs.forward.graph),
    )
    assert re.search(r"what line \d+ gathers is read after the schedule frees it", found[0])


def test_a_copy_of_a_parameter_is_found():
    assert list(checks.reads_in_place(steps_of(program("grouped").halves[0].wrapper))) == []
    wait = r"^( *)(torch\.ops\._c10d_functional\.wait_tensor\.default\((buf\d+)\))$"
    found = broken("grouped", 0, wait, r"\1\2\n\1late = torch.ops.aten.clone.default(\3)", checks.reads_in_place)
    assert re.search(r"clone copies what was gathered", found[0])


def test_a_wait_for_the_device_is_found():
    wrapper = program("grouped").halves[0].wrapper
    assert list(checks.synchronisations(wrapper)) == []
    text = re.sub(r"^( *)return \(", r"\1torch.cuda.synchronize()\n\1return (", wrapper, count=1, flags=re.M)
    assert "synchronize" in next(checks.synchronisations(text))


def kernels(name, world_size=None):
    """How many Triton kernels forward and backward call."""
    halves = program(name, world_size).halves
    return [Counter(step.kind for step in steps_of(half.wrapper))["kernel"] for half in halves]


@pytest.mark.parametrize(("name", "same"), [("grouped", "grouped"), ("packed", "grouped"), ("odd rows", "odd rows")])
def test_sharding_takes_no_kernel_where_nothing_is_cast(name, same):
    forward, backward = kernels(name)
    alone, alone_backward = kernels(same, world_size=1)
    assert forward <= alone + 1 and backward <= alone_backward + 1


@pytest.mark.parametrize("name", ["mixed", "mixed packed"])
def test_a_bucket_is_cast_by_one_kernel_in_each_direction(name):
    built = program(name)
    forward, backward = kernels(name)
    alone, alone_backward = kernels("grouped", world_size=1)
    num_gathers, num_reductions = (
        sum(re.match(pattern, step.name) is not None for half in built.halves for step in steps_of(half.wrapper))
        for pattern in ("all_gather", "reduce_scatter")
    )
    assert forward + backward <= alone + alone_backward + num_gathers + num_reductions + 2


def test_the_peak_of_a_program_is_what_its_buffers_take_at_most():
    half = program("grouped").halves[0]
    totals = [total for _, total in bytes_at_steps(half.wrapper, half.bytes_of_buffer)]
    assert peak_bytes(half.wrapper, half.bytes_of_buffer) == max(totals) > totals[0] > 0


@pytest.mark.parametrize("name", ["grouped", "packed", "mixed", "convolutions", "replicated", "offload"])
def test_a_prediction_of_the_program_takes_its_own_kernels(name):
    built, hardware = program(name), find_hardware("h100")
    rows = kernels_of(built, hardware)
    found = predict_built(built, rows, hardware)
    assert found.built.timeline.sending == pytest.approx(found.estimate.timeline.sending)
    assert found.estimate.timeline.seconds == predict(built.graphs, hardware).timeline.seconds
    of_kernels = sum(row.num_bytes * sum(row.calls) for row in rows)
    assert found.built_bytes >= of_kernels > 0
    larger = [dataclasses.replace(row, num_bytes=row.num_bytes + 2**20) for row in rows]
    more = predict_built(built, larger, hardware)
    num_calls = sum(sum(row.calls) for row in rows)
    assert more.built_bytes == found.built_bytes + num_calls * 2**20
    seconds = num_calls * 2**20 / hardware.memory_bandwidth
    assert more.built.timeline.compute == pytest.approx(found.built.timeline.compute + seconds)


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=["sharded", "hybrid"])
@pytest.mark.parametrize("offload", [None, CPUOffloadPolicy(pin_memory=False)], ids=["kept", "offloaded"])
def test_a_model_in_the_memory_of_the_cpu_is_sharded_on_the_gpu_of_its_rank(offload, shape):
    join_fake_group(math.prod(shape))
    mesh = init_device_mesh("cuda", shape)
    with FakeTensorMode():
        model = nn.Linear(4, 4)
        model.register_buffer("scale", torch.ones(4))
        fsdp_compile.shard(model, mesh, sync_module_states=False, offload_policy=offload)
    join_fake_group(0)
    shards = [parameter.to_local() for parameter in model.parameters()]
    places = [{tensor.device.type for tensor in tensors} for tensors in (shards, model.buffers())]
    assert places == [{"cpu" if offload else "cuda"}, {"cuda"}]
