import torch
from torch import nn

from fsdp_compile.layout.options import GradientReduction
from fsdp_compile.passes import ops
from fsdp_compile.passes.insert_reduce_scatter import InsertReduceScatter
from tests.passes.tiny import Adapted, Chain, Normed, ScaleAndShift, Tempered, biased, rows, two_layers
from tests.passes.tracing import Pictures, trace


class Returned(nn.Module):
    """Its output is its parameter, whose gradient is thus an input of the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.other = nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        return x @ self.other, self.weight


class TestInsertReduceScatter(Pictures):
    def test_gradients_are_packed_and_reduced_as_soon_as_the_last_of_them_is_known(self):
        graphs = trace(biased(), rows())
        self.assertExpectedInline(
            str(graphs.after(InsertReduceScatter, "backward")),
            """\
backward(down.weight: f32[2,8], primals_2: f32[3,4], addmm: f32[3,8], tangents_1: f32[3,2])
  permute_1: f32[8,2] = permute(down.weight, [1, 0])
  permute_2: f32[2,8] = permute(permute_1, [1, 0])
  mm: f32[3,8] = mm(tangents_1, permute_2)
  permute_3: f32[2,3] = permute(tangents_1, [1, 0])
  mm_1: f32[2,8] = mm(permute_3, addmm)
  sum_1: f32[1,2] = sum.dim_IntList(tangents_1, [0], True)
  view: f32[2] = view(sum_1, [2])
  down.packed: f32[24] = fsdp.pack([mm_1, view], [0, 8])
  down.grad.pending: f32[12] = fsdp.reduce_scatter(down.packed)
  down.grad: f32[12] = fsdp.wait(down.grad.pending)
  permute_6: f32[8,3] = permute(mm, [1, 0])
  mm_2: f32[8,4] = mm(permute_6, primals_2)
  sum_2: f32[1,8] = sum.dim_IntList(mm, [0], True)
  view_1: f32[8] = view(sum_2, [8])
  up.packed: f32[40] = fsdp.pack([mm_2, view_1], [0, 16])
  up.grad.pending: f32[20] = fsdp.reduce_scatter(up.packed)
  up.grad: f32[20] = fsdp.wait(up.grad.pending)
  return [up.grad, None, down.grad]""",
        )

    def test_the_gradient_of_a_0_d_parameter_is_all_reduced_over_every_rank(self):
        graph = trace(Tempered(), rows(), replicas=2).after(InsertReduceScatter, "backward")
        self.assertExpectedInline(
            str(graph),
            """\
backward(temperature: f32[4], primals_2: f32[3,4], mm: f32[3,4], tangents_1: f32[3,4])
  temperature#2: f32[] = fsdp.unshard(temperature, 0)
  mul_1: f32[3,4] = mul(tangents_1, mm)
  mul_2: f32[3,4] = mul(tangents_1, temperature#2)
  sum_1: f32[] = sum(mul_1)
  temperature.packed: f32[4] = fsdp.pack([sum_1], [0])
  temperature.grad.pending: f32[4] = fsdp.all_reduce(temperature.packed)
  temperature.grad: f32[4] = fsdp.wait(temperature.grad.pending)
  permute_1: f32[4,3] = permute(mul_2, [1, 0])
  mm_1: f32[4,4] = mm(permute_1, primals_2)
  mix.packed: f32[16] = fsdp.pack([mm_1], [0])
  mix.grad.pending: f32[8] = fsdp.reduce_scatter(mix.packed)
  mix.grad: f32[8] = fsdp.wait(mix.grad.pending)
  mix.grad.pending#2: f32[8] = fsdp.all_reduce(mix.grad)
  mix.grad#2: f32[8] = fsdp.wait(mix.grad.pending#2)
  return [mix.grad#2, None, temperature.grad]""",
        )
        groups = [ops.argument(node, "group") for node in graph.gm.graph.nodes if ops.is_reduction(node)]
        self.assertEqual(groups, ["world", "shard", "replicate"])

    def test_a_reduction_begins_behind_the_kernel_that_computes_the_last_gradient(self):
        """The gradient of a norm's input, which is light, is computed together with that of its scale."""
        graphs = trace(Chain(low=Normed(), top=Normed()), rows(), policy=Normed)
        lines = str(graphs.after(InsertReduceScatter, "backward")).splitlines()
        [packed] = [index for index, line in enumerate(lines) if line.startswith("  top.packed")]
        self.assertExpectedInline(
            "\n".join(lines[packed - 4 : packed + 5]),
            """\
  mul_9: f32[3,4] = mul(div, sub_4)
  mul_10: f32[3,4] = mul(mm_3, mul_2)
  sum_3: f32[4] = sum.dim_IntList(mul_10, [0])
  add_4: f32[3,4] = add(tangents_1, mul_9)
  top.packed: f32[24] = fsdp.pack([sum_3, mm_2], [0, 4])
  top.grad.pending: f32[12] = fsdp.reduce_scatter(top.packed)
  top.grad: f32[12] = fsdp.wait(top.grad.pending)
  permute_6: f32[4,3] = permute(add_4, [1, 0])
  mm_4: f32[4,4] = mm(permute_6, mul_1)""",
        )

    def test_reductions_that_begin_in_the_same_place_begin_in_the_order_of_their_gradients(self):
        graphs = trace(Chain(low=ScaleAndShift(), top=ScaleAndShift()), rows(), policy=ScaleAndShift)
        self.assertExpectedInline(
            str(graphs.after(InsertReduceScatter, "backward")),
            """\
backward(low: f32[4], top.weight: f32[4], primals_2: f32[3,4], tangents_1: f32[3,4])
  low.weight: f32[4] = fsdp.unshard(low, 0)
  sum_1: f32[1,4] = sum.dim_IntList(tangents_1, [0], True)
  view: f32[4] = view(sum_1, [4])
  mul: f32[3,4] = mul(primals_2, low.weight)
  add: f32[3,4] = add(mul, low.weight)
  mul_2: f32[3,4] = mul(tangents_1, add)
  mul_3: f32[3,4] = mul(tangents_1, top.weight)
  sum_2: f32[1,4] = sum.dim_IntList(mul_2, [0], True)
  view_1: f32[4] = view(sum_2, [4])
  add_tensor: f32[4] = add(view, view_1)
  sum_3: f32[1,4] = sum.dim_IntList(mul_3, [0], True)
  view_2: f32[4] = view(sum_3, [4])
  mul_4: f32[3,4] = mul(mul_3, primals_2)
  sum_4: f32[1,4] = sum.dim_IntList(mul_4, [0], True)
  view_3: f32[4] = view(sum_4, [4])
  add_tensor_1: f32[4] = add(view_2, view_3)
  top.packed: f32[8] = fsdp.pack([add_tensor], [0])
  top.grad.pending: f32[4] = fsdp.reduce_scatter(top.packed)
  top.grad: f32[4] = fsdp.wait(top.grad.pending)
  low.packed: f32[8] = fsdp.pack([add_tensor_1], [0])
  low.grad.pending: f32[4] = fsdp.reduce_scatter(low.packed)
  low.grad: f32[4] = fsdp.wait(low.grad.pending)
  return [low.grad, None, top.grad]""",
        )

    def test_only_trained_parameters_have_a_reduction(self):
        graph = trace(Adapted(), rows()).after(InsertReduceScatter, "backward")
        self.assertExpectedInline(
            str(graph),
            """\
backward(permute: f32[4,3], tangents_1: f32[3,4])
  mm_2: f32[4,4] = mm(permute, tangents_1)
  root/float32.packed: f32[16] = fsdp.pack([mm_2], [0])
  root/float32.grad.pending: f32[8] = fsdp.reduce_scatter(root/float32.packed)
  root/float32.grad: f32[8] = fsdp.wait(root/float32.grad.pending)
  return [None, None, root/float32.grad]""",
        )

    def test_a_gradient_that_is_an_input_is_reduced_below_the_inputs(self):
        graph = trace(Returned(), rows(), policy=lambda **_: False).after(InsertReduceScatter, "backward")
        self.assertExpectedInline(
            str(graph),
            """\
backward(permute: f32[4,3], tangents_1: f32[3,4], tangents_2: f32[4])
  mm_1: f32[4,4] = mm(permute, tangents_1)
  root.packed: f32[24] = fsdp.pack([tangents_2, mm_1], [0, 4])
  root.grad.pending: f32[12] = fsdp.reduce_scatter(root.packed)
  root.grad: f32[12] = fsdp.wait(root.grad.pending)
  return [root.grad, None]""",
        )

    def test_gradients_are_averaged_or_summed(self):
        for reduction in ("avg", "sum"):
            traced = trace(two_layers(), rows(), replicas=2, reduction=GradientReduction(reduction))
            graph = traced.after(InsertReduceScatter, "backward")
            nodes = [node for node in graph.gm.graph.nodes if ops.is_reduction(node)]
            self.assertEqual([ops.argument(node, "reduction") for node in nodes], 4 * [reduction])

    def test_a_forward_is_left_alone(self):
        graphs = trace(biased(), rows())
        self.assertEqual(str(graphs.after(InsertReduceScatter)), str(graphs.before(InsertReduceScatter)))

    def test_a_second_run_changes_nothing(self):
        for grouped in (False, True):
            graph = trace(biased(), rows(), grouped=grouped).after(InsertReduceScatter, "backward")
            self.assert_left_alone(graph, InsertReduceScatter(grouped))
