import torch

from fsdp_compile.passes.pin_matmuls import PinMatmuls
from tests.passes.tiny import Adapted, CalledTwice, ScaleAndShift, rows, two_layers
from tests.passes.tracing import Drawing, Pictures, trace

add, mm = torch.ops.aten.add.Tensor, torch.ops.aten.mm.default


class TestPinMatmuls(Pictures):
    def test_an_addition_to_an_earlier_matmul_is_pinned(self):
        graphs = trace(CalledTwice(), rows(), reshard={"root": True})
        self.assertExpectedInline(
            str(graphs.before(PinMatmuls, "backward")),
            """\
backward(primals_1: f32[8], primals_2: f32[3,4], mm: f32[3,4], tangents_1: f32[3,4])
  all_gather_into_tensor_default: f32[16] = _c10d_functional.all_gather_into_tensor(primals_1, 2, shard)
  permute_2: f32[4,3] = permute(tangents_1, [1, 0])
  mm_2: f32[4,4] = mm(permute_2, mm)
  wait_tensor_default: f32[16] = _c10d_functional.wait_tensor(all_gather_into_tensor_default)
  view_default: f32[4,4] = view(wait_tensor_default, [4, 4])
  permute: f32[4,4] = permute(view_default, [1, 0])
  permute_4: f32[4,4] = permute(permute, [1, 0])
  mm_3: f32[3,4] = mm(tangents_1, permute_4)
  permute_6: f32[4,3] = permute(mm_3, [1, 0])
  mm_4: f32[4,4] = mm(permute_6, primals_2)
  add_tensor: f32[4,4] = add(mm_2, mm_4)
  view_default_1: f32[2,8] = view(add_tensor, [2, 8])
  view_default_2: f32[16] = view(view_default_1, [16])
  reduce_scatter_tensor_default: f32[8] = _c10d_functional.reduce_scatter_tensor(view_default_2, avg, 2, shard)
  wait_tensor_default_1: f32[8] = _c10d_functional.wait_tensor(reduce_scatter_tensor_default)
  return [wait_tensor_default_1, None]""",
        )
        self.assertExpectedInline(
            str(graphs.after(PinMatmuls, "backward")),
            """\
backward(primals_1: f32[8], primals_2: f32[3,4], mm: f32[3,4], tangents_1: f32[3,4])
  all_gather_into_tensor_default: f32[16] = _c10d_functional.all_gather_into_tensor(primals_1, 2, shard)
  permute_2: f32[4,3] = permute(tangents_1, [1, 0])
  mm_2: f32[4,4] = mm(permute_2, mm)
  wait_tensor_default: f32[16] = _c10d_functional.wait_tensor(all_gather_into_tensor_default)
  view_default: f32[4,4] = view(wait_tensor_default, [4, 4])
  permute: f32[4,4] = permute(view_default, [1, 0])
  permute_4: f32[4,4] = permute(permute, [1, 0])
  mm_3: f32[3,4] = mm(tangents_1, permute_4)
  permute_6: f32[4,3] = permute(mm_3, [1, 0])
  mm_4: f32[4,4] = mm(permute_6, primals_2)
  unsqueeze_default: f32[1,4,4] = unsqueeze(mm_2, 0)
  unsqueeze_default_1: f32[1,4,4] = unsqueeze(mm_4, 0)
  add_tensor_1: f32[1,4,4] = add(unsqueeze_default, unsqueeze_default_1)
  squeeze_dim: f32[4,4] = squeeze.dim(add_tensor_1, 0)
  view_default_1: f32[2,8] = view(squeeze_dim, [2, 8])
  view_default_2: f32[16] = view(view_default_1, [16])
  reduce_scatter_tensor_default: f32[8] = _c10d_functional.reduce_scatter_tensor(view_default_2, avg, 2, shard)
  wait_tensor_default_1: f32[8] = _c10d_functional.wait_tensor(reduce_scatter_tensor_default)
  return [wait_tensor_default_1, None]""",
        )

    def test_a_matmul_just_before_its_addition_is_left_to_the_compiler(self):
        drawing = Drawing()
        x, y, shard = drawing.input("x", 4, 4), drawing.input("y", 4, 4), drawing.input("shard", 8)
        gathered = drawing.call(torch.ops._c10d_functional.all_gather_into_tensor.default, shard, 2, "shard")
        drawing.call(torch.ops._c10d_functional.wait_tensor.default, gathered)
        graph = drawing.returns(drawing.call(add, drawing.call(mm, x, y), x))
        self.assert_left_alone(graph, PinMatmuls())

    def test_a_graph_without_collectives_has_no_schedule_to_keep(self):
        graph = trace(CalledTwice(), rows(), world_size=1).before(PinMatmuls, "backward")
        self.assert_left_alone(graph, PinMatmuls())

    def test_values_stay_the_same(self):
        drawing = Drawing()
        x, y = drawing.input("x", 4, 4), drawing.input("y", 4, 4)
        product = drawing.call(mm, x, y)
        other = drawing.call(mm, y, x)
        total = drawing.call(add, product, other)
        drawing.call(torch.ops._c10d_functional.wait_tensor.default, x)
        graph = drawing.returns(drawing.call(add, product, total))
        values = torch.randn(4, 4), torch.randn(4, 4)
        self.assertTrue(torch.equal(graph.then(PinMatmuls()).gm(*values)[0], graph.gm(*values)[0]))

    def test_a_second_run_changes_nothing(self):
        for model in (CalledTwice(), Adapted(), ScaleAndShift(), two_layers()):
            self.assert_left_alone(trace(model, rows()).after(PinMatmuls, "backward"), PinMatmuls())
