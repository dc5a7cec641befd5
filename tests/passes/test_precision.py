"""What mixed precision, gradients kept for a later step, and parts for smaller groups add to the graphs."""

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile.layout.options import GradientReduction
from fsdp_compile.passes import metadata, ops
from fsdp_compile.passes.delay_reduce_scatter_wait import DelayReduceScatterWait
from fsdp_compile.passes.insert_reduce_scatter import InsertReduceScatter
from fsdp_compile.passes.lower_collectives import LowerCollectives
from fsdp_compile.passes.prefetch_all_gather import PrefetchAllGather
from tests.passes.tiny import Chain, linear, rows, three_layers, two_layers
from tests.passes.tracing import Pictures, trace

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def keep_gradients(reading):
    """As in a step whose gradients are not reduced."""
    for shard in shards_of(reading):
        shard.gradient = "keep"
        shard.accumulated = nn.Parameter(torch.empty(()).expand(2 * shard.data.numel()))


def take_along_kept_gradients(reading):
    for shard in shards_of(reading):
        shard.accumulated = nn.Parameter(torch.empty(2 * shard.data.numel()), requires_grad=False)


def shards_of(reading):
    reads = [read for module in reading.modules() for read in vars(module).get("_fsdp_reads", {}).values()]
    return [read.shard for read in reads]


class TestMixedPrecision(Pictures):
    def test_shards_are_cast_before_they_are_gathered(self):
        self.assertExpectedInline(
            str(trace(three_layers(), rows(), mp_policy=BF16).after(PrefetchAllGather)),
            """\
forward(primals_1: f32[3,4], low: f32[8], mid: f32[8], top: f32[8])
  low.bf16: bf16[8] = fsdp.cast(low)
  low.pending: bf16[16] = fsdp.all_gather(low.bf16)
  convert_element_type: bf16[3,4] = prims.convert_element_type(primals_1, bf16)
  mid.bf16: bf16[8] = fsdp.cast(mid)
  mid.pending: bf16[16] = fsdp.all_gather(mid.bf16)
  low.gathered: bf16[16] = fsdp.wait(low.pending)
  low.weight: bf16[4,4] = fsdp.view_out(low.gathered, 0)
  permute: bf16[4,4] = permute(low.weight, [1, 0])
  mm: bf16[3,4] = mm(convert_element_type, permute)
  fsdp.free(low.gathered)
  top.bf16: bf16[8] = fsdp.cast(top)
  top.pending: bf16[16] = fsdp.all_gather(top.bf16)
  mid.gathered: bf16[16] = fsdp.wait(mid.pending)
  mid.weight: bf16[4,4] = fsdp.view_out(mid.gathered, 0)
  permute_1: bf16[4,4] = permute(mid.weight, [1, 0])
  mm_1: bf16[3,4] = mm(mm, permute_1)
  fsdp.free(mid.gathered)
  top.gathered: bf16[16] = fsdp.wait(top.pending)
  top.weight: bf16[4,4] = fsdp.view_out(top.gathered, 0)
  permute_2: bf16[4,4] = permute(top.weight, [1, 0])
  mm_2: bf16[3,4] = mm(mm_1, permute_2)
  return [mm_2, mid, top.weight, convert_element_type, mm, mm_1]""",
        )

    def test_lowered_the_cast_of_a_gradient_is_a_part_of_its_copy(self):
        graph = trace(two_layers(), rows(), mp_policy=BF16).after(LowerCollectives, "backward")
        self.assertExpectedInline(
            str(graph),
            """\
backward(down.weight: bf16[2,8], convert_element_type: bf16[3,4], mm: bf16[3,8], tangents_1: bf16[3,2])
  permute_2: bf16[2,3] = permute(tangents_1, [1, 0])
  mm_2: bf16[2,8] = mm(permute_2, mm)
  view_default: bf16[2,8] = view(mm_2, [2, 8])
  convert_element_type_default: f32[2,8] = prims.convert_element_type(view_default, f32)
  view_default_1: f32[16] = view(convert_element_type_default, [16])
  reduce_scatter_tensor_default: f32[8] = _c10d_functional.reduce_scatter_tensor(view_default_1, avg, 2, shard)
  permute_1: bf16[8,2] = permute(down.weight, [1, 0])
  permute_4: bf16[2,8] = permute(permute_1, [1, 0])
  mm_3: bf16[3,8] = mm(tangents_1, permute_4)
  permute_6: bf16[8,3] = permute(mm_3, [1, 0])
  mm_4: bf16[8,4] = mm(permute_6, convert_element_type)
  wait_tensor_default: f32[8] = _c10d_functional.wait_tensor(reduce_scatter_tensor_default)
  view_default_2: bf16[2,16] = view(mm_4, [2, 16])
  convert_element_type_default_1: f32[2,16] = prims.convert_element_type(view_default_2, f32)
  view_default_3: f32[32] = view(convert_element_type_default_1, [32])
  reduce_scatter_tensor_default_1: f32[16] = _c10d_functional.reduce_scatter_tensor(view_default_3, avg, 2, shard)
  wait_tensor_default_1: f32[16] = _c10d_functional.wait_tensor(reduce_scatter_tensor_default_1)
  return [None, wait_tensor_default_1, wait_tensor_default]""",
        )

    def test_a_bucket_that_every_rank_keeps_whole_is_cast_and_the_cast_is_freed(self):
        graphs = trace(two_layers(), rows(), world_size=1, replicas=2, mp_policy=BF16)
        self.assertExpectedInline(
            graphs.graphs.forward.schedule(),
            """\
forward
  prims.convert_element_type                                        0
  cast                                                              64
  mm                                                                64
                            free up.weight.shard.bf16               0
  cast                                                              32
  mm                                                                32
                            free down.weight.shard.bf16             0""",
        )


class TestKeptGradients(Pictures):
    def test_they_are_packed_and_returned_full(self):
        graph = trace(two_layers(), rows(), prepare=keep_gradients).after(DelayReduceScatterWait, "backward")
        self.assertExpectedInline(
            str(graph),
            """\
backward(down.weight: f32[2,8], primals_3: f32[3,4], mm: f32[3,8], tangents_1: f32[3,2])
  permute_2: f32[2,3] = permute(tangents_1, [1, 0])
  mm_2: f32[2,8] = mm(permute_2, mm)
  down.packed: f32[16] = fsdp.pack([mm_2], [0])
  permute_1: f32[8,2] = permute(down.weight, [1, 0])
  permute_4: f32[2,8] = permute(permute_1, [1, 0])
  mm_3: f32[3,8] = mm(tangents_1, permute_4)
  fsdp.free(down.weight)
  permute_6: f32[8,3] = permute(mm_3, [1, 0])
  mm_4: f32[8,4] = mm(permute_6, primals_3)
  up.packed: f32[32] = fsdp.pack([mm_4], [0])
  return [None, up.packed, None, None, down.packed]""",
        )

    def test_a_later_step_packs_them_with_its_own(self):
        graph = trace(Chain(up=linear(4, 8)), rows(), prepare=take_along_kept_gradients)
        self.assertExpectedInline(
            str(graph.after(DelayReduceScatterWait, "backward")),
            """\
backward(root.accumulated: f32[32], primals_3: f32[3,4], tangents_1: f32[3,8])
  permute_1: f32[8,3] = permute(tangents_1, [1, 0])
  mm_1: f32[8,4] = mm(permute_1, primals_3)
  root.packed: f32[32] = fsdp.pack([mm_1], [0], root.accumulated)
  root.grad.pending: f32[16] = fsdp.reduce_scatter(root.packed)
  root.grad: f32[16] = fsdp.wait(root.grad.pending)
  return [root.grad, None, None]""",
        )

    def test_grouped_reductions_pack_them_too(self):
        graph = trace(two_layers(), rows(), grouped=True, prepare=take_along_kept_gradients)
        nodes = graph.after(InsertReduceScatter, "backward").gm.graph.nodes
        self.assertEqual([node.target for node in nodes if ops.is_reduction(node)], 2 * [ops.REDUCE_SCATTER])

    def test_lowered_they_are_added_before_the_copy(self):
        graph = trace(Chain(up=linear(4, 8)), rows(), mp_policy=BF16, prepare=take_along_kept_gradients)
        self.assertExpectedInline(
            str(graph.after(LowerCollectives, "backward")),
            """\
backward(primals_3: f32[32], convert_element_type: bf16[3,4], tangents_1: bf16[3,8])
  permute_1: bf16[8,3] = permute(tangents_1, [1, 0])
  mm_1: bf16[8,4] = mm(permute_1, convert_element_type)
  view_default: bf16[2,16] = view(mm_1, [2, 16])
  view_default_1: f32[2,16] = view(primals_3, [2, 16])
  convert_element_type_default: f32[2,16] = prims.convert_element_type(view_default, f32)
  add_tensor: f32[2,16] = add(convert_element_type_default, view_default_1)
  view_default_2: f32[32] = view(add_tensor, [32])
  reduce_scatter_tensor_default: f32[16] = _c10d_functional.reduce_scatter_tensor(view_default_2, avg, 2, shard)
  wait_tensor_default: f32[16] = _c10d_functional.wait_tensor(reduce_scatter_tensor_default)
  return [None, wait_tensor_default, None]""",
        )


class TestParts(Pictures):
    def test_a_part_is_kept_and_gathered_over_the_smaller_group(self):
        reshard = {"low": metadata.Part(2, "shard/2", 1), "top": metadata.Part(2, "shard/2", 1)}
        graphs = trace(three_layers(), rows(), world_size=4, grouped=True, reshard=reshard).graphs
        self.assertExpectedInline(
            f"{graphs.forward}\n{graphs.backward}",
            """\
forward(low: f32[4], primals_2: f32[3,4], mid: f32[4], top: f32[4])
  low.pending: f32[16] = fsdp.all_gather_grouped([low])
  mid.pending: f32[16] = fsdp.all_gather_grouped([mid])
  low.gathered: f32[16] = fsdp.wait(low.pending)
  low.weight: f32[4,4] = fsdp.view_out(low.gathered, 0)
  permute: f32[4,4] = permute(low.weight, [1, 0])
  mm: f32[3,4] = mm(primals_2, permute)
  fsdp.free(low.gathered)
  top.pending: f32[16] = fsdp.all_gather(top)
  mid.gathered: f32[16] = fsdp.wait(mid.pending)
  mid.weight: f32[4,4] = fsdp.view_out(mid.gathered, 0)
  permute_1: f32[4,4] = permute(mid.weight, [1, 0])
  mm_1: f32[3,4] = mm(mm, permute_1)
  fsdp.free(mid.gathered)
  top.gathered: f32[16] = fsdp.wait(top.pending)
  top.part: f32[8] = fsdp.reshard(top.gathered, 2, 1)
  top.weight: f32[4,4] = fsdp.view_out(top.gathered, 0)
  permute_2: f32[4,4] = permute(top.weight, [1, 0])
  mm_2: f32[3,4] = mm(mm_1, permute_2)
  fsdp.free(top.gathered)
  return [mm_2, mid, top.part, primals_2, mm, mm_1]
backward(mid: f32[4], top: f32[8], primals_2: f32[3,4], mm: f32[3,4], mm_1: f32[3,4], tangents_1: f32[3,4])
  top.pending: f32[16] = fsdp.all_gather(top)
  permute_3: f32[4,3] = permute(tangents_1, [1, 0])
  mm_3: f32[4,4] = mm(permute_3, mm_1)
  top.grad.pending: f32[4] = fsdp.reduce_scatter_grouped([mm_3], [0])
  mid.pending: f32[16] = fsdp.all_gather_grouped([mid])
  top.gathered: f32[16] = fsdp.wait(top.pending)
  top.weight: f32[4,4] = fsdp.view_out(top.gathered, 0)
  permute_2: f32[4,4] = permute(top.weight, [1, 0])
  permute_5: f32[4,4] = permute(permute_2, [1, 0])
  mm_4: f32[3,4] = mm(tangents_1, permute_5)
  fsdp.free(top.gathered)
  permute_7: f32[4,3] = permute(mm_4, [1, 0])
  mm_5: f32[4,4] = mm(permute_7, mm)
  top.grad: f32[4] = fsdp.wait(top.grad.pending)
  mid.grad.pending: f32[4] = fsdp.reduce_scatter_grouped([mm_5], [0])
  mid.gathered: f32[16] = fsdp.wait(mid.pending)
  mid.weight: f32[4,4] = fsdp.view_out(mid.gathered, 0)
  permute_1: f32[4,4] = permute(mid.weight, [1, 0])
  permute_9: f32[4,4] = permute(permute_1, [1, 0])
  mm_6: f32[3,4] = mm(mm_4, permute_9)
  fsdp.free(mid.gathered)
  permute_11: f32[4,3] = permute(mm_6, [1, 0])
  mm_7: f32[4,4] = mm(permute_11, primals_2)
  mid.grad: f32[4] = fsdp.wait(mid.grad.pending)
  low.grad.pending: f32[4] = fsdp.reduce_scatter_grouped([mm_7], [0])
  low.grad: f32[4] = fsdp.wait(low.grad.pending)
  return [low.grad, None, mid.grad, top.grad]""",
        )


class TestDivisor(Pictures):
    def test_the_sum_is_divided_in_the_dtype_of_the_shard(self):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        graph = trace(two_layers(), rows(), mp_policy=policy, replicas=2, reduction=GradientReduction("sum", 12.0))
        graph = graph.after(DelayReduceScatterWait, "backward")
        self.assertExpectedInline(
            str(graph),
            """\
backward(down.weight: bf16[2,8], convert_element_type: bf16[3,4], mm: bf16[3,8], tangents_1: bf16[3,2])
  permute_2: bf16[2,3] = permute(tangents_1, [1, 0])
  mm_2: bf16[2,8] = mm(permute_2, mm)
  down.packed: bf16[16] = fsdp.pack([mm_2], [0])
  down.grad.pending: bf16[8] = fsdp.reduce_scatter(down.packed)
  permute_1: bf16[8,2] = permute(down.weight, [1, 0])
  permute_4: bf16[2,8] = permute(permute_1, [1, 0])
  mm_3: bf16[3,8] = mm(tangents_1, permute_4)
  fsdp.free(down.weight)
  permute_6: bf16[8,3] = permute(mm_3, [1, 0])
  mm_4: bf16[8,4] = mm(permute_6, convert_element_type)
  down.grad: bf16[8] = fsdp.wait(down.grad.pending)
  down.grad.pending#2: bf16[8] = fsdp.all_reduce(down.grad)
  up.packed: bf16[32] = fsdp.pack([mm_4], [0])
  up.grad.pending: bf16[16] = fsdp.reduce_scatter(up.packed)
  down.grad#2: bf16[8] = fsdp.wait(down.grad.pending#2)
  down.grad#2.f32: f32[8] = fsdp.cast(down.grad#2)
  down.grad#2.f32.divided: f32[8] = fsdp.divide(down.grad#2.f32, 12.0)
  up.grad: bf16[16] = fsdp.wait(up.grad.pending)
  up.grad.pending#2: bf16[16] = fsdp.all_reduce(up.grad)
  up.grad#2: bf16[16] = fsdp.wait(up.grad.pending#2)
  up.grad#2.f32: f32[16] = fsdp.cast(up.grad#2)
  up.grad#2.f32.divided: f32[16] = fsdp.divide(up.grad#2.f32, 12.0)
  return [None, up.grad#2.f32.divided, down.grad#2.f32.divided]""",
        )
