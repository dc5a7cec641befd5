import torch
from torch import nn

from fsdp_compile.passes.equal_units import EqualUnits
from fsdp_compile.passes.fewer_units import skip_units
from fsdp_compile.passes.merge_gradients import MergeGradients
from tests.passes.tiny import Chain, linear, rows
from tests.passes.tracing import Pictures, trace


def joint_of(model, *inputs):
    return trace(model, *inputs, policy=nn.Linear).after(MergeGradients, "joint")


def five_layers():
    return Chain(**{name: linear(4, 4) for name in ("a", "b", "c", "d", "e")})


class Residual(nn.Module):
    """Every layer adds the input of the model, or of the layer so many before it."""

    def __init__(self, before=None):
        super().__init__()
        self.layers, self.before = nn.ModuleList([linear(4, 4) for _ in range(10)]), before

    def forward(self, x):
        seen = [x]
        for layer in self.layers:
            added = seen[0] if self.before is None else seen[max(0, len(seen) - self.before)]
            seen.append(torch.tanh(layer(seen[-1])) + added)
        return seen[-1]


class TestFewerUnits(Pictures):
    def test_the_units_before_and_behind_are_joined(self):
        graph = joint_of(five_layers(), rows())
        equal = EqualUnits.of(graph.gm.graph)
        self.assertEqual((list(equal.names), equal.num_units), (["b", "c", "d"], 5))
        self.assertTrue(skip_units(equal, 1, 2))
        graph.gm.graph.lint()
        self.assertExpectedInline(
            str(graph),
            """\
joint(a: f32[8], primals_2: f32[3,4], b: f32[8], primals_4: f32[8], d: f32[8], e: f32[8], tangents_1: f32[3,4])
  a.weight: f32[4,4] = fsdp.unshard(a, 0)
  permute: f32[4,4] = permute(a.weight, [1, 0])
  mm: f32[3,4] = mm(primals_2, permute)
  b.weight: f32[4,4] = fsdp.unshard(b, 0)
  permute_1: f32[4,4] = permute(b.weight, [1, 0])
  mm_1: f32[3,4] = mm(mm, permute_1)
  d.weight: f32[4,4] = fsdp.unshard(d, 0)
  permute_3: f32[4,4] = permute(d.weight, [1, 0])
  mm_3: f32[3,4] = mm(mm_1, permute_3)
  e.weight: f32[4,4] = fsdp.unshard(e, 0)
  permute_4: f32[4,4] = permute(e.weight, [1, 0])
  mm_4: f32[3,4] = mm(mm_3, permute_4)
  permute_5: f32[4,3] = permute(tangents_1, [1, 0])
  mm_5: f32[4,4] = mm(permute_5, mm_3)
  permute_7: f32[4,4] = permute(permute_4, [1, 0])
  mm_6: f32[3,4] = mm(tangents_1, permute_7)
  e.grad: f32[8] = fsdp.reduce_gradient([mm_5], [0])
  permute_9: f32[4,3] = permute(mm_6, [1, 0])
  mm_7: f32[4,4] = mm(permute_9, mm_1)
  permute_11: f32[4,4] = permute(permute_3, [1, 0])
  d.grad: f32[8] = fsdp.reduce_gradient([mm_7], [0])
  mm_10: f32[3,4] = mm(mm_6, permute_11)
  permute_17: f32[4,3] = permute(mm_10, [1, 0])
  mm_11: f32[4,4] = mm(permute_17, mm)
  permute_19: f32[4,4] = permute(permute_1, [1, 0])
  mm_12: f32[3,4] = mm(mm_10, permute_19)
  b.grad: f32[8] = fsdp.reduce_gradient([mm_11], [0])
  permute_21: f32[4,3] = permute(mm_12, [1, 0])
  mm_13: f32[4,4] = mm(permute_21, primals_2)
  a.grad: f32[8] = fsdp.reduce_gradient([mm_13], [0])
  return [mm_4, a.grad, None, b.grad, None, d.grad, e.grad]""",
        )

    def test_a_unit_may_read_what_is_left_and_no_other_unit_but_its_neighbour(self):
        for model, is_skipped in ((Residual(), True), (Residual(before=1), True), (Residual(before=3), False)):
            graph = joint_of(model, rows())
            text = str(graph)
            equal = EqualUnits.of(graph.gm.graph)
            self.assertGreater(len(equal.names), 4)
            self.assertEqual(skip_units(equal, 1, 4), is_skipped)
            graph.gm.graph.lint()
            self.assertEqual(str(graph) == text, not is_skipped)

    def test_layers_of_different_shapes_or_operators_are_not_equal(self):
        for model in (
            Chain(a=linear(4, 5), b=linear(5, 6), c=linear(6, 7), d=linear(7, 4)),
            Chain(a=linear(4, 4), b=nn.Tanh(), c=linear(4, 4), d=nn.ReLU(), e=linear(4, 4), f=nn.SiLU()),
        ):
            self.assertIsNone(EqualUnits.of(joint_of(model, rows()).gm.graph))
