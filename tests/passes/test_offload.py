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
            slot = name, f"{name}.weight", 0, [4, 4], 2, "shard", dtype, CUDA
            x = drawing.call(mm, x, drawing.call(ops.UNSHARD, shard, None, "reduce", *slot, *REDUCTION))
        return drawing.returns(x)


def one_reduction():
    drawing = Drawing()
    with drawing.mode:
        x = on_device(drawing.input("x", 4, 4))
        gradient = drawing.call(mm, x, x)
        slot = "low", ["low.weight"], [0], 8, 2, "shard", torch.float32, torch.device("cpu")
        return drawing.returns(drawing.call(ops.REDUCE_GRADIENT, [gradient], None, *slot, *REDUCTION), name="backward")


class TestOffload(Pictures):
    def test_a_shard_is_copied_to_the_device_one_unit_ahead_of_its_gather(self):
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

    def test_lowered_the_copies_are_those_of_torch(self):
        graph = one_reduction().then(InsertReduceScatter()).then(LowerCollectives())
        self.assertExpectedInline(
            str(graph),
            """\
backward(x: f32[4,4])
  mm_default: f32[4,4] = mm(x, x)
  view_default: f32[2,8] = view(mm_default, [2, 8])
  view_default_1: f32[16] = view(view_default, [16])
  reduce_scatter_tensor_default: f32[8] = _c10d_functional.reduce_scatter_tensor(view_default_1, avg, 2, shard)
  wait_tensor_default: f32[8] = _c10d_functional.wait_tensor(reduce_scatter_tensor_default)
  device_put_default: f32[8] = prims.device_put(wait_tensor_default, cpu)
  return [device_put_default]""",
        )
