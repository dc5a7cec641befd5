"""Graphs of a call whose parameters were gathered before it, for several calls."""

import torch
from torch import nn

from fsdp_compile.costs.memory import memory_of
from fsdp_compile.costs.work import Work
from fsdp_compile.passes import ops
from fsdp_compile.passes.insert_all_gather import InsertAllGather
from fsdp_compile.passes.lower_collectives import LowerCollectives
from fsdp_compile.passes.padding import shard_numel
from fsdp_compile.passes.partition_joint import PartitionJoint
from fsdp_compile.runtime.reads import GATHERED
from tests.passes.tiny import biased, linear, rows, two_layers
from tests.passes.tracing import Pictures, trace

RANKS = 2


def gathered_before(*units):
    """Has the parameters of these units gathered before the call, and those of others within it."""

    def prepare(reading):
        for name, module in reading.named_modules():
            for attribute, read in vars(module).get("_fsdp_reads", {}).items():
                if name in units:
                    read.shard.key = "stand-in" + GATHERED
                    read.gathered = torch.empty(RANKS * shard_numel(module._parameters[attribute].shape, RANKS))

    return prepare


class Narrow(nn.Module):
    """A weight that the program casts itself: not before a gather that there is none of."""

    def __init__(self) -> None:
        super().__init__()
        self.up = linear(4, 8)

    def forward(self, x):
        return x.bfloat16() @ self.up.weight.bfloat16().t()


class TestGatheredOnce(Pictures):
    def test_a_parameter_is_waited_for_where_it_is_used_and_taken_over_by_the_backward(self):
        graphs = trace(two_layers(), rows(), prepare=gathered_before("up", "down"), poison=True)
        self.assertExpectedInline(
            str(graphs.after(PartitionJoint)),
            """\
forward(up: f32[16], up.weight.gathered: f32[32], primals_3: f32[3,4], down: f32[8], down.weight.gathered: f32[16])
  up.weight: f32[8,4] = fsdp.unshard(up, 0)
  down.weight: f32[2,8] = fsdp.unshard(down, 0)
  permute: f32[4,8] = permute(up.weight, [1, 0])
  mm: f32[3,8] = mm(primals_3, permute)
  permute_1: f32[8,2] = permute(down.weight, [1, 0])
  mm_1: f32[3,2] = mm(mm, permute_1)
  return [mm_1, down.weight, primals_3, mm]""",
        )
        self.assertExpectedInline(
            str(graphs.after(InsertAllGather)),
            """\
forward(up: f32[16], up.weight.gathered: f32[32], primals_3: f32[3,4], down: f32[8], down.weight.gathered: f32[16])
  up.weight.ready: f32[32] = fsdp.wait(up.weight.gathered)
  up.weight: f32[8,4] = fsdp.view_out(up.weight.ready, 0)
  permute: f32[4,8] = permute(up.weight, [1, 0])
  mm: f32[3,8] = mm(primals_3, permute)
  down.weight.ready: f32[16] = fsdp.wait(down.weight.gathered)
  down.weight: f32[2,8] = fsdp.view_out(down.weight.ready, 0)
  permute_1: f32[8,2] = permute(down.weight, [1, 0])
  mm_1: f32[3,2] = mm(mm, permute_1)
  return [mm_1, down.weight, primals_3, mm]""",
        )
        self.assertExpectedInline(
            str(graphs.after(LowerCollectives)),
            """\
forward(up: f32[16], primals_2: f32[32], primals_3: f32[3,4], down: f32[8], primals_5: f32[16])
  wait_tensor_default: f32[32] = _c10d_functional.wait_tensor(primals_2)
  view_default: f32[8,4] = view(wait_tensor_default, [8, 4])
  permute: f32[4,8] = permute(view_default, [1, 0])
  mm: f32[3,8] = mm(primals_3, permute)
  wait_tensor_default_1: f32[16] = _c10d_functional.wait_tensor(primals_5)
  view_default_1: f32[2,8] = view(wait_tensor_default_1, [2, 8])
  permute_1: f32[8,2] = permute(view_default_1, [1, 0])
  mm_1: f32[3,2] = mm(mm, permute_1)
  return [mm_1, view_default_1, primals_3, mm]""",
        )
        self.assertExpectedInline(
            str(graphs.after(LowerCollectives, "backward")),
            """\
backward(down.weight: f32[2,8], primals_3: f32[3,4], mm: f32[3,8], tangents_1: f32[3,2])
  permute_2: f32[2,3] = permute(tangents_1, [1, 0])
  mm_2: f32[2,8] = mm(permute_2, mm)
  view_default: f32[2,8] = view(mm_2, [2, 8])
  view_default_1: f32[16] = view(view_default, [16])
  reduce_scatter_tensor_default: f32[8] = _c10d_functional.reduce_scatter_tensor(view_default_1, avg, 2, shard)
  permute_1: f32[8,2] = permute(down.weight, [1, 0])
  permute_4: f32[2,8] = permute(permute_1, [1, 0])
  mm_3: f32[3,8] = mm(tangents_1, permute_4)
  permute_6: f32[8,3] = permute(mm_3, [1, 0])
  mm_4: f32[8,4] = mm(permute_6, primals_3)
  wait_tensor_default: f32[8] = _c10d_functional.wait_tensor(reduce_scatter_tensor_default)
  view_default_2: f32[2,16] = view(mm_4, [2, 16])
  view_default_3: f32[32] = view(view_default_2, [32])
  reduce_scatter_tensor_default_1: f32[16] = _c10d_functional.reduce_scatter_tensor(view_default_3, avg, 2, shard)
  wait_tensor_default_1: f32[16] = _c10d_functional.wait_tensor(reduce_scatter_tensor_default_1)
  return [wait_tensor_default_1, None, None, wait_tensor_default, None]""",
        )

    def test_other_units_are_gathered_and_freed_as_ever(self):
        graphs = trace(biased(), rows(), prepare=gathered_before("up"))
        self.assertExpectedInline(
            graphs.before(LowerCollectives).schedule(),
            """\
forward
                            all_gather down                         256
                            wait up.weight.ready                    256
                            wait up.bias.ready                      256
  addmm                                                             256
                            wait down.gathered                      256
  copy_out down.weight                                              320
  copy_out down.bias                                                328
                            free down.gathered                      232
  addmm                                                             232
                            free down.bias                          224""",
        )
        self.assertExpectedInline(
            graphs.before(LowerCollectives, "backward").schedule(),
            """\
backward
  mm                                                                64
                            free down.weight                        0
  mm                                                                0
  sum.dim_IntList                                                   0
  pack down.packed                                                  96
                            reduce_scatter down                     96
  mm                                                                96
  sum.dim_IntList                                                   96
                            wait down.grad                          0
  pack up.packed                                                    160
                            reduce_scatter up                       160
                            wait up.grad                            0""",
        )

    def test_casts_stay_where_the_program_has_them(self):
        graph = trace(Narrow(), rows(), prepare=gathered_before("up")).after(InsertAllGather)
        self.assertExpectedInline(
            str(graph),
            """\
forward(primals_1: f32[3,4], root: f32[16], up.weight.gathered: f32[32])
  up.weight.ready: f32[32] = fsdp.wait(up.weight.gathered)
  up.weight: f32[8,4] = fsdp.view_out(up.weight.ready, 0)
  convert_element_type: bf16[3,4] = prims.convert_element_type(primals_1, bf16)
  convert_element_type_1: bf16[8,4] = prims.convert_element_type(up.weight, bf16)
  permute: bf16[4,8] = permute(convert_element_type_1, [1, 0])
  mm: bf16[3,8] = mm(convert_element_type, permute)
  return [mm, convert_element_type]""",
        )

    def test_what_was_gathered_is_in_memory_all_the_time(self):
        model = two_layers()
        graphs = trace(model, rows(), prepare=gathered_before("up", "down")).graphs
        moments = memory_of(Work.of(graphs, compiler="aot_eager")).moments
        sizes = [4 * parameter.numel() for parameter in model.parameters()]
        assert {moment.held["gathered"] for moment in moments} == {sum(sizes)}
        assert {moment.held["shards"] for moment in moments} == {sum(sizes) // RANKS}

    def test_without_gradients_nothing_is_freed_either(self):
        with torch.no_grad():
            graph = trace(two_layers(), rows(), prepare=gathered_before("up", "down")).graphs.forward.graph
        assert not any(ops.is_call(node, ops.FREE) or ops.is_all_gather(node) for node in graph.nodes)
