"""Shards on the CPU, a forward on another device: the copies are in the graph, ahead of gathers, after reductions.

No such device is needed: the graphs are of tensors that have no memory.
"""

import torch

from fsdp_compile.passes import ops
from fsdp_compile.passes.delay_reduce_scatter_wait import DelayReduceScatterWait
from fsdp_compile.passes.insert_all_gather import InsertAllGather
from fsdp_compile.passes.insert_free import InsertFree
from fsdp_compile.passes.insert_reduce_scatter import InsertReduceScatter
from fsdp_compile.passes.lower_collectives import LowerCollectives
from fsdp_compile.passes.overlap_copies import OverlapCopies
from fsdp_compile.passes.prefetch_all_gather import PrefetchAllGather
from tests.passes.tracing import REDUCTION, Drawing, Pictures

CUDA = torch.device("cuda", 0)
mm = torch.ops.aten.mm.default


def on_device(node):
    node.meta["val"] = node.meta["val"].to(CUDA)
    return node


def three_products(dtype=None):
    """x @ low @ mid @ top, the shards on the CPU."""
    drawing = Drawing()
    with drawing.mode:
        x = on_device(drawing.input("x", 3, 4))
        shards = {name: drawing.input(name, 8) for name in ("low", "mid", "top")}
        for name, shard in shards.items():
            slot = name, f"{name}.weight", 0, [4, 4], 2, "shard", dtype, CUDA, ""
            x = drawing.call(mm, x, drawing.call(ops.UNSHARD, shard, None, None, "reduce", *slot, *REDUCTION))
        return drawing.returns(x)


def one_reduction():
    drawing = Drawing()
    with drawing.mode:
        x = on_device(drawing.input("x", 4, 4))
        gradient = drawing.call(mm, x, x)
        slot = "low", ["low.weight"], [0], 8, 2, "shard", torch.float32, torch.device("cpu")
        return drawing.returns(
            drawing.call(ops.REDUCE_GRADIENT, [gradient], None, None, *slot, *REDUCTION), name="backward"
        )


class TestOverlapCopies(Pictures):
    def test_a_shard_is_copied_one_unit_ahead_of_its_gather(self):
        graph = three_products().then(InsertAllGather()).then(InsertFree()).then(PrefetchAllGather())
        self.assertExpectedInline(
            graph.schedule(),
            """\
forward
  move                                                              0
                            all_gather low                          64
  move                                                              64
                            all_gather mid                          128
  move                                                              128
                            wait low.gathered                       128
  mm                                                                128
                            free low.gathered                       64
                            all_gather top                          128
                            wait mid.gathered                       128
  mm                                                                128
                            free mid.gathered                       64
                            wait top.gathered                       64
  mm                                                                64
                            free top.gathered                       0""",
        )

    def test_it_is_copied_before_it_is_cast(self):
        graph = three_products(torch.bfloat16).then(InsertAllGather())
        moved = [node for node in graph.gm.graph.nodes if ops.is_conversion(node)][:2]
        self.assertEqual([node.target for node in moved], [ops.MOVE, ops.CAST])

    def test_a_gradient_is_copied_back_when_it_is_reduced(self):
        graph = one_reduction().then(InsertReduceScatter()).then(DelayReduceScatterWait())
        self.assertExpectedInline(
            str(graph),
            """\
backward(x: f32[4,4])
  mm_default: f32[4,4] = mm(x, x)
  low.packed: f32[16] = fsdp.pack([mm_default], [0])
  low.grad.pending: f32[8] = fsdp.reduce_scatter(low.packed)
  low.grad: f32[8] = fsdp.wait(low.grad.pending)
  low.grad.cpu: f32[8] = fsdp.move(low.grad, cpu)
  return [low.grad.cpu]""",
        )

    def test_lowered_a_gradient_is_waited_for_at_the_end(self):
        graph = one_reduction().then(InsertReduceScatter()).then(OverlapCopies()).then(LowerCollectives())
        self.assertExpectedInline(
            str(graph),
            """\
backward(x: f32[4,4])
  mm_default: f32[4,4] = mm(x, x)
  view_default: f32[2,8] = view(mm_default, [2, 8])
  view_default_1: f32[16] = view(view_default, [16])
  reduce_scatter_tensor_default: f32[8] = _c10d_functional.reduce_scatter_tensor(view_default_1, avg, 2, shard)
  wait_tensor_default: f32[8] = _c10d_functional.wait_tensor(reduce_scatter_tensor_default)
  wait_tensor_default.cpu.pending: f32[8] = fsdp.copy_start(wait_tensor_default, cpu)
  wait_tensor_default.cpu: f32[8] = fsdp.copy_wait(wait_tensor_default.cpu.pending, wait_tensor_default)
  copies_done_default = fsdp.copies_done([wait_tensor_default.cpu])
  return [wait_tensor_default.cpu]""",
        )

    def test_lowered_a_shard_is_waited_for_before_its_gather(self):
        graph = three_products(torch.bfloat16).then(InsertAllGather()).then(PrefetchAllGather()).then(OverlapCopies())
        self.assertExpectedInline(
            str(graph),
            """\
forward(x: f32[3,4], low: f32[8], mid: f32[8], top: f32[8])
  low.cuda:0.pending: f32[8] = fsdp.copy_start(low, cuda:0)
  low.cuda:0: f32[8] = fsdp.copy_wait(low.cuda:0.pending, low)
  low.cuda:0.bf16: bf16[8] = fsdp.cast(low.cuda:0)
  low.pending: bf16[16] = fsdp.all_gather(low.cuda:0.bf16)
  mid.cuda:0.pending: f32[8] = fsdp.copy_start(mid, cuda:0)
  mid.cuda:0: f32[8] = fsdp.copy_wait(mid.cuda:0.pending, mid)
  mid.cuda:0.bf16: bf16[8] = fsdp.cast(mid.cuda:0)
  mid.pending: bf16[16] = fsdp.all_gather(mid.cuda:0.bf16)
  top.cuda:0.pending: f32[8] = fsdp.copy_start(top, cuda:0)
  low.gathered: bf16[16] = fsdp.wait(low.pending)
  low.weight: bf16[4,4] = fsdp.view_out(low.gathered, 0)
  mm_default: f32[3,4] = mm(x, low.weight)
  top.cuda:0: f32[8] = fsdp.copy_wait(top.cuda:0.pending, top)
  top.cuda:0.bf16: bf16[8] = fsdp.cast(top.cuda:0)
  top.pending: bf16[16] = fsdp.all_gather(top.cuda:0.bf16)
  mid.gathered: bf16[16] = fsdp.wait(mid.pending)
  mid.weight: bf16[4,4] = fsdp.view_out(mid.gathered, 0)
  mm_default_1: f32[3,4] = mm(mm_default, mid.weight)
  top.gathered: bf16[16] = fsdp.wait(top.pending)
  top.weight: bf16[4,4] = fsdp.view_out(top.gathered, 0)
  mm_default_2: f32[3,4] = mm(mm_default_1, top.weight)
  copies_done_default = fsdp.copies_done([low, mid, top])
  return [mm_default_2]""",
        )

    def test_gradients_are_copied_to_pinned_memory_if_asked_to(self):
        for pin_memory in (True, False):
            graph = one_reduction().then(InsertReduceScatter()).then(OverlapCopies(pin_memory)).gm.graph
            (start,) = (node for node in graph.nodes if ops.is_call(node, ops.COPY_START))
            self.assertIs(ops.argument(start, "pin_memory"), pin_memory)
