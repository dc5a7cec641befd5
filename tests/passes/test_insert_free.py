import torch
from torch import nn

from fsdp_compile.passes import ops
from fsdp_compile.passes.insert_free import InsertFree
from tests.passes.tiny import Fused, biased, rows, three_layers, two_layers
from tests.passes.tracing import Drawing, Pictures, trace


class TestInsertFree(Pictures):
    def test_full_buffers_are_freed_after_their_last_use(self):
        graphs = trace(biased(), rows())
        self.assertExpectedInline(
            str(graphs.after(InsertFree)),
            """\
forward(up: f32[20], primals_2: f32[3,4], down: f32[12])
  up.pending: f32[40] = fsdp.all_gather(up)
  up.gathered: f32[40] = fsdp.wait(up.pending)
  up.weight: f32[8,4] = fsdp.copy_out(up.gathered, 0)
  permute: f32[4,8] = permute(up.weight, [1, 0])
  up.bias: f32[8] = fsdp.copy_out(up.gathered, 16)
  fsdp.free(up.gathered)
  addmm: f32[3,8] = addmm(up.bias, primals_2, permute)
  fsdp.free(up.bias)
  fsdp.free(up.weight)
  down.pending: f32[24] = fsdp.all_gather(down)
  down.gathered: f32[24] = fsdp.wait(down.pending)
  down.weight: f32[2,8] = fsdp.copy_out(down.gathered, 0)
  permute_1: f32[8,2] = permute(down.weight, [1, 0])
  down.bias: f32[2] = fsdp.copy_out(down.gathered, 8)
  fsdp.free(down.gathered)
  addmm_1: f32[3,2] = addmm(down.bias, addmm, permute_1)
  fsdp.free(down.bias)
  return [addmm_1, down.weight, primals_2, addmm]""",
        )

    def test_in_the_grouped_form_the_buffer_lives_until_the_last_parameter_in_it_was_used(self):
        graph = trace(biased(), rows(), grouped=True, reshard={"down": True}).after(InsertFree)
        self.assertExpectedInline(
            str(graph),
            """\
forward(up: f32[20], primals_2: f32[3,4], down: f32[12])
  up.pending: f32[40] = fsdp.all_gather_grouped([up])
  up.gathered: f32[40] = fsdp.wait(up.pending)
  up.weight: f32[8,4] = fsdp.view_out(up.gathered, 0)
  permute: f32[4,8] = permute(up.weight, [1, 0])
  up.bias: f32[8] = fsdp.view_out(up.gathered, 16)
  addmm: f32[3,8] = addmm(up.bias, primals_2, permute)
  fsdp.free(up.gathered)
  down.pending: f32[24] = fsdp.all_gather_grouped([down])
  down.gathered: f32[24] = fsdp.wait(down.pending)
  down.weight: f32[2,8] = fsdp.view_out(down.gathered, 0)
  permute_1: f32[8,2] = permute(down.weight, [1, 0])
  down.bias: f32[2] = fsdp.view_out(down.gathered, 8)
  addmm_1: f32[3,2] = addmm(down.bias, addmm, permute_1)
  fsdp.free(down.gathered)
  return [addmm_1, down, primals_2, addmm]""",
        )

    def test_free_waits_for_views(self):
        drawing = Drawing()
        x, shard = drawing.input("x", 3, 4), drawing.input("shard", 16)
        gathered = drawing.call(ops.WAIT, drawing.gather(shard, "up"))
        weight = drawing.view_out(gathered, "up.weight", 8, 4)
        transposed = drawing.call(torch.ops.aten.t.default, weight)
        drawing.call(torch.ops.aten.sum.default, weight)
        product = drawing.call(torch.ops.aten.mm.default, x, transposed)
        after = drawing.call(torch.ops.aten.sin.default, product)
        graph = drawing.returns(after).then(InsertFree())
        self.assertExpectedInline(
            str(graph),
            """\
forward(x: f32[3,4], up: f32[16])
  up.pending: f32[32] = fsdp.all_gather(up)
  up.gathered: f32[32] = fsdp.wait(up.pending)
  up.weight: f32[8,4] = fsdp.view_out(up.gathered, 0)
  t_default: f32[4,8] = t(up.weight)
  sum_default: f32[] = sum(up.weight)
  mm_default: f32[3,8] = mm(x, t_default)
  fsdp.free(up.gathered)
  sin_default: f32[3,8] = sin(mm_default)
  return [sin_default]""",
        )

    def test_free_waits_for_the_parts_of_a_weight(self):
        graph = trace(Fused(), rows(), reshard={"root": True}).after(InsertFree)
        self.assertExpectedInline(
            str(graph),
            """\
forward(root: f32[16], primals_2: f32[3,4])
  root.pending: f32[32] = fsdp.all_gather(root)
  root.gathered: f32[32] = fsdp.wait(root.pending)
  fused.weight: f32[8,4] = fsdp.view_out(root.gathered, 0)
  split = split(fused.weight, 4)
  getitem: f32[4,4] = getitem(split, 0)
  permute: f32[4,4] = permute(getitem, [1, 0])
  mm: f32[3,4] = mm(primals_2, permute)
  getitem_1: f32[4,4] = getitem(split, 1)
  permute_1: f32[4,4] = permute(getitem_1, [1, 0])
  mm_1: f32[3,4] = mm(mm, permute_1)
  fsdp.free(root.gathered)
  return [mm_1, root, primals_2, mm]""",
        )

    def test_a_parameter_that_is_kept_for_the_backward_is_freed_there(self):
        graphs = trace(three_layers(), rows(), reshard={"mid": False, "top": True})
        self.assertExpectedInline(
            str(graphs.after(InsertFree)),
            """\
forward(low: f32[8], primals_2: f32[3,4], mid: f32[8], top: f32[8])
  low.pending: f32[16] = fsdp.all_gather(low)
  low.gathered: f32[16] = fsdp.wait(low.pending)
  low.weight: f32[4,4] = fsdp.view_out(low.gathered, 0)
  permute: f32[4,4] = permute(low.weight, [1, 0])
  mm: f32[3,4] = mm(primals_2, permute)
  fsdp.free(low.gathered)
  mid.pending: f32[16] = fsdp.all_gather(mid)
  mid.gathered: f32[16] = fsdp.wait(mid.pending)
  mid.weight: f32[4,4] = fsdp.view_out(mid.gathered, 0)
  permute_1: f32[4,4] = permute(mid.weight, [1, 0])
  mm_1: f32[3,4] = mm(mm, permute_1)
  top.pending: f32[16] = fsdp.all_gather(top)
  top.gathered: f32[16] = fsdp.wait(top.pending)
  top.weight: f32[4,4] = fsdp.view_out(top.gathered, 0)
  permute_2: f32[4,4] = permute(top.weight, [1, 0])
  mm_2: f32[3,4] = mm(mm_1, permute_2)
  fsdp.free(top.gathered)
  return [mm_2, mid.weight, top, primals_2, mm, mm_1]""",
        )
        self.assertExpectedInline(
            str(graphs.after(InsertFree, "backward")),
            """\
backward(mid.weight: f32[4,4], top: f32[8], primals_2: f32[3,4], mm: f32[3,4], mm_1: f32[3,4], tangents_1: f32[3,4])
  permute_3: f32[4,3] = permute(tangents_1, [1, 0])
  mm_3: f32[4,4] = mm(permute_3, mm_1)
  top.packed: f32[16] = fsdp.pack([mm_3], [0])
  top.grad.pending: f32[8] = fsdp.reduce_scatter(top.packed)
  top.grad: f32[8] = fsdp.wait(top.grad.pending)
  top.pending: f32[16] = fsdp.all_gather(top)
  top.gathered: f32[16] = fsdp.wait(top.pending)
  top.weight: f32[4,4] = fsdp.view_out(top.gathered, 0)
  permute_2: f32[4,4] = permute(top.weight, [1, 0])
  permute_5: f32[4,4] = permute(permute_2, [1, 0])
  mm_4: f32[3,4] = mm(tangents_1, permute_5)
  fsdp.free(top.gathered)
  permute_7: f32[4,3] = permute(mm_4, [1, 0])
  mm_5: f32[4,4] = mm(permute_7, mm)
  mid.packed: f32[16] = fsdp.pack([mm_5], [0])
  mid.grad.pending: f32[8] = fsdp.reduce_scatter(mid.packed)
  mid.grad: f32[8] = fsdp.wait(mid.grad.pending)
  permute_1: f32[4,4] = permute(mid.weight, [1, 0])
  permute_9: f32[4,4] = permute(permute_1, [1, 0])
  mm_6: f32[3,4] = mm(mm_4, permute_9)
  fsdp.free(mid.weight)
  permute_11: f32[4,3] = permute(mm_6, [1, 0])
  mm_7: f32[4,4] = mm(permute_11, primals_2)
  low.packed: f32[16] = fsdp.pack([mm_7], [0])
  low.grad.pending: f32[8] = fsdp.reduce_scatter(low.packed)
  low.grad: f32[8] = fsdp.wait(low.grad.pending)
  return [low.grad, None, mid.grad, top.grad]""",
        )

    def test_a_graph_without_full_buffers_is_left_alone(self):
        graph = trace(nn.Sequential(nn.Tanh()), rows().requires_grad_()).before(InsertFree)
        self.assert_left_alone(graph, InsertFree())

    def test_a_second_run_changes_nothing(self):
        for grouped in (False, True):
            for name in ("forward", "backward"):
                graphs = trace(two_layers(), rows(), grouped=grouped, reshard={"down": grouped})
                self.assert_left_alone(graphs.after(InsertFree, name), InsertFree())
