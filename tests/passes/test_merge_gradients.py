import torch
from torch import nn

from fsdp_compile.passes import ops
from fsdp_compile.passes.merge_gradients import MergeGradients
from tests.passes.tiny import CalledTwice, Chain, ScaleAndShift, rows, two_layers
from tests.passes.tracing import REDUCTION, Drawing, Pictures, trace


class TestMergeGradients(Pictures):
    def test_the_gradients_of_a_shard_become_one(self):
        graphs = trace(Chain(up=nn.Linear(4, 8)), rows())
        self.assertExpectedInline(
            str(graphs.before(MergeGradients, "joint")),
            """\
joint(root: f32[20], primals_2: f32[3,4], tangents_1: f32[3,8])
  up.weight: f32[8,4] = fsdp.unshard(root, 0)
  up.bias: f32[8] = fsdp.unshard(root, 16)
  permute: f32[4,8] = permute(up.weight, [1, 0])
  addmm: f32[3,8] = addmm(up.bias, primals_2, permute)
  permute_1: f32[8,3] = permute(tangents_1, [1, 0])
  mm: f32[8,4] = mm(permute_1, primals_2)
  sum_1: f32[1,8] = sum.dim_IntList(tangents_1, [0], True)
  view: f32[8] = view(sum_1, [8])
  root.grad: f32[20] = fsdp.reduce_gradient([view], [16])
  root.grad#2: f32[20] = fsdp.reduce_gradient([mm], [0])
  add: f32[20] = add(root.grad, root.grad#2)
  return [addmm, add, None]""",
        )
        self.assertExpectedInline(
            str(graphs.after(MergeGradients, "joint")),
            """\
joint(root: f32[20], primals_2: f32[3,4], tangents_1: f32[3,8])
  up.weight: f32[8,4] = fsdp.unshard(root, 0)
  up.bias: f32[8] = fsdp.unshard(root, 16)
  permute: f32[4,8] = permute(up.weight, [1, 0])
  addmm: f32[3,8] = addmm(up.bias, primals_2, permute)
  permute_1: f32[8,3] = permute(tangents_1, [1, 0])
  mm: f32[8,4] = mm(permute_1, primals_2)
  sum_1: f32[1,8] = sum.dim_IntList(tangents_1, [0], True)
  view: f32[8] = view(sum_1, [8])
  root.grad: f32[20] = fsdp.reduce_gradient([mm, view], [0, 16])
  return [addmm, root.grad, None]""",
        )

    def test_gradients_of_one_parameter_are_added_in_the_order_in_which_autograd_adds_them(self):
        graphs = trace(CalledTwice(), rows())
        self.assertExpectedInline(
            str(graphs.after(MergeGradients, "joint")),
            """\
joint(root: f32[8], primals_2: f32[3,4], tangents_1: f32[3,4])
  mix.weight: f32[4,4] = fsdp.unshard(root, 0)
  permute: f32[4,4] = permute(mix.weight, [1, 0])
  mm: f32[3,4] = mm(primals_2, permute)
  permute_1: f32[4,4] = permute(mix.weight, [1, 0])
  mm_1: f32[3,4] = mm(mm, permute_1)
  permute_2: f32[4,3] = permute(tangents_1, [1, 0])
  mm_2: f32[4,4] = mm(permute_2, mm)
  permute_4: f32[4,4] = permute(permute_1, [1, 0])
  mm_3: f32[3,4] = mm(tangents_1, permute_4)
  permute_6: f32[4,3] = permute(mm_3, [1, 0])
  mm_4: f32[4,4] = mm(permute_6, primals_2)
  add_tensor: f32[4,4] = add(mm_2, mm_4)
  root.grad: f32[8] = fsdp.reduce_gradient([add_tensor], [0])
  return [mm_1, root.grad, None]""",
        )

    def test_a_sum_with_something_else_is_left_alone(self):
        drawing = Drawing()
        gradient, other = drawing.input("gradient", 4, 4), drawing.input("other", 8)
        reduced = drawing.call(
            ops.REDUCE_GRADIENT,
            [gradient],
            None,
            None,
            "up",
            ["up.weight"],
            [0],
            8,
            2,
            "shard",
            torch.float32,
            torch.device("cpu"),
            *REDUCTION,
        )
        graph = drawing.returns(drawing.call(torch.ops.aten.add.Tensor, reduced, other), name="joint")
        self.assert_left_alone(graph, MergeGradients())

    def test_shards_of_one_parameter_are_left_alone(self):
        graphs = trace(two_layers(), rows())
        self.assertEqual(str(graphs.after(MergeGradients, "joint")), str(graphs.before(MergeGradients, "joint")))

    def test_a_second_run_changes_nothing(self):
        for model in (ScaleAndShift(), Chain(up=nn.Linear(4, 8))):
            self.assert_left_alone(trace(model, rows()).after(MergeGradients, "joint"), MergeGradients())
