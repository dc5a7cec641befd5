import operator

import torch
import torch._functorch.config
import torch.fx
import torch.nn.functional as F
from torch import nn

from fsdp_compile.passes.errors import PassError
from fsdp_compile.passes.halves import Halves, Unshard, _save_early
from fsdp_compile.passes.merge_gradients import MergeGradients
from fsdp_compile.passes.metadata import Part
from fsdp_compile.passes.partition_joint import Crossing, PartitionJoint
from tests.models import ScaledInBackward
from tests.passes.tiny import Checkpointed, linear, rows, three_layers, two_layers, two_products
from tests.passes.tracing import Drawing, Pictures, trace


class DroppedWeights(nn.Module):
    """Dropout of a weight, whose result depends on the random numbers as well."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = linear(4, 4)

    def forward(self, x):
        return torch.sin(F.linear(torch.sin(x), F.dropout(self.mix.weight)))


class DroppedActivations(nn.Module):
    """Dropout between two layers, both of which need in the backward what went in."""

    def __init__(self) -> None:
        super().__init__()
        self.up = linear(4, 8)
        self.down = linear(8, 2)

    def forward(self, x):
        return self.down(F.dropout(self.up(x)))


@torch.library.custom_op("tests::draw", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def draw(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A random operator with two results."""
    return torch.rand_like(like), torch.rand_like(like)


@draw.register_fake
def _(like):
    return torch.empty_like(like), torch.empty_like(like)


class DrawnPair(torch.autograd.Function):
    """The forward reads the first of two random results, the backward the second."""

    @staticmethod
    def forward(ctx, x):
        first, second = draw(x)
        ctx.save_for_backward(second)
        return x * first

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


class Drawn(DroppedActivations):
    def forward(self, x):
        return self.down(torch.sin(DrawnPair.apply(self.up(x))))


class Attends(DroppedActivations):
    def forward(self, x):
        heads = self.up(x)[None, None]
        return self.down(F.scaled_dot_product_attention(heads, heads, heads)[0, 0])


class Counts(nn.Module):
    """A counter that the backward needs as it was and as it is; the view of another buffer as it was."""

    def __init__(self):
        super().__init__()
        self.mix = linear(4, 4)
        self.register_buffer("count", torch.tensor(0.0))
        self.register_buffer("rows", torch.ones(2, 4))

    def forward(self, x):
        before = torch.cos(self.count)
        x = self.mix(x) * self.rows.neg()[0]
        self.count += 1
        self.rows *= 2
        return x * before * self.count


class CountsBackwards(Counts):
    def forward(self, x):
        x = self.mix(x) * self.rows.neg()[0]
        self.rows += 1
        return ScaledInBackward.apply(x, self.rows, 2)


def first_line(graph):
    return str(graph).partition("\n")[0]


def last_line(graph):
    return str(graph).splitlines()[-1].strip()


def body(graph):
    """All but the line of the inputs."""
    return str(graph).partition("\n")[2]


class TestPartitionJoint(Pictures):
    def test_shards_are_saved_and_the_backward_unshards_again(self):
        graphs = trace(three_layers(), rows())
        self.assertExpectedInline(
            str(graphs.after(MergeGradients, "joint")),
            """\
joint(low: f32[8], primals_2: f32[3,4], mid: f32[8], top: f32[8], tangents_1: f32[3,4])
  low.weight: f32[4,4] = fsdp.unshard(low, 0)
  permute: f32[4,4] = permute(low.weight, [1, 0])
  mm: f32[3,4] = mm(primals_2, permute)
  mid.weight: f32[4,4] = fsdp.unshard(mid, 0)
  permute_1: f32[4,4] = permute(mid.weight, [1, 0])
  mm_1: f32[3,4] = mm(mm, permute_1)
  top.weight: f32[4,4] = fsdp.unshard(top, 0)
  permute_2: f32[4,4] = permute(top.weight, [1, 0])
  mm_2: f32[3,4] = mm(mm_1, permute_2)
  permute_3: f32[4,3] = permute(tangents_1, [1, 0])
  mm_3: f32[4,4] = mm(permute_3, mm_1)
  permute_5: f32[4,4] = permute(permute_2, [1, 0])
  mm_4: f32[3,4] = mm(tangents_1, permute_5)
  top.grad: f32[8] = fsdp.reduce_gradient([mm_3], [0])
  permute_7: f32[4,3] = permute(mm_4, [1, 0])
  mm_5: f32[4,4] = mm(permute_7, mm)
  permute_9: f32[4,4] = permute(permute_1, [1, 0])
  mm_6: f32[3,4] = mm(mm_4, permute_9)
  mid.grad: f32[8] = fsdp.reduce_gradient([mm_5], [0])
  permute_11: f32[4,3] = permute(mm_6, [1, 0])
  mm_7: f32[4,4] = mm(permute_11, primals_2)
  low.grad: f32[8] = fsdp.reduce_gradient([mm_7], [0])
  return [mm_2, low.grad, None, mid.grad, top.grad]""",
        )
        self.assertExpectedInline(
            str(graphs.after(PartitionJoint)),
            """\
forward(low: f32[8], primals_2: f32[3,4], mid: f32[8], top: f32[8])
  low.weight: f32[4,4] = fsdp.unshard(low, 0)
  mid.weight: f32[4,4] = fsdp.unshard(mid, 0)
  top.weight: f32[4,4] = fsdp.unshard(top, 0)
  permute: f32[4,4] = permute(low.weight, [1, 0])
  mm: f32[3,4] = mm(primals_2, permute)
  permute_1: f32[4,4] = permute(mid.weight, [1, 0])
  mm_1: f32[3,4] = mm(mm, permute_1)
  permute_2: f32[4,4] = permute(top.weight, [1, 0])
  mm_2: f32[3,4] = mm(mm_1, permute_2)
  return [mm_2, mid, top.weight, primals_2, mm, mm_1]""",
        )
        self.assertExpectedInline(
            str(graphs.after(PartitionJoint, "backward")),
            """\
backward(mid: f32[8], top.weight: f32[4,4], primals_2: f32[3,4], mm: f32[3,4], mm_1: f32[3,4], tangents_1: f32[3,4])
  mid.weight: f32[4,4] = fsdp.unshard(mid, 0)
  permute_3: f32[4,3] = permute(tangents_1, [1, 0])
  mm_3: f32[4,4] = mm(permute_3, mm_1)
  permute_2: f32[4,4] = permute(top.weight, [1, 0])
  permute_5: f32[4,4] = permute(permute_2, [1, 0])
  mm_4: f32[3,4] = mm(tangents_1, permute_5)
  top.grad: f32[8] = fsdp.reduce_gradient([mm_3], [0])
  permute_7: f32[4,3] = permute(mm_4, [1, 0])
  mm_5: f32[4,4] = mm(permute_7, mm)
  permute_1: f32[4,4] = permute(mid.weight, [1, 0])
  permute_9: f32[4,4] = permute(permute_1, [1, 0])
  mm_6: f32[3,4] = mm(mm_4, permute_9)
  mid.grad: f32[8] = fsdp.reduce_gradient([mm_5], [0])
  permute_11: f32[4,3] = permute(mm_6, [1, 0])
  mm_7: f32[4,4] = mm(permute_11, primals_2)
  low.grad: f32[8] = fsdp.reduce_gradient([mm_7], [0])
  return [low.grad, None, mid.grad, top.grad]""",
        )

    def test_what_only_the_backward_needs_is_computed_as_soon_as_it_can_be(self):
        """But for what follows from inputs, which are there anyway, and for random numbers, which keep their order."""
        aten = torch.ops.aten
        drawing = Drawing()
        x, w = drawing.input("x", 4, 4), drawing.input("w", 4, 4)
        sin = drawing.call(aten.sin.default, x)
        var_mean = drawing.call(aten.var_mean.correction, sin, [1])
        variance, mean = (drawing.call(operator.getitem, var_mean, index) for index in (0, 1))
        y = drawing.call(aten.mm.default, drawing.call(aten.sub.Tensor, sin, mean), w)
        rsqrt = drawing.call(aten.rsqrt.default, variance)
        noise = drawing.call(aten.bernoulli.p, sin, 0.5)
        exp, transposed = drawing.call(aten.exp.default, x), drawing.call(aten.t.default, y)
        half = drawing.call(aten.div.Tensor, rsqrt, 2)
        forward = drawing.returns(y, rsqrt, noise, exp, half, transposed)
        _save_early(forward.gm.graph, 1)
        forward.gm.graph.lint()
        self.assertExpectedInline(
            str(forward),
            """\
forward(x: f32[4,4], w: f32[4,4])
  sin_default: f32[4,4] = sin(x)
  var_mean_correction = var_mean.correction(sin_default, [1])
  getitem: f32[4] = getitem(var_mean_correction, 0)
  rsqrt_default: f32[4] = rsqrt(getitem)
  div_tensor: f32[4] = div(rsqrt_default, 2)
  getitem_1: f32[4] = getitem(var_mean_correction, 1)
  sub_tensor: f32[4,4] = sub(sin_default, getitem_1)
  mm_default: f32[4,4] = mm(sub_tensor, w)
  t_default: f32[4,4] = t(mm_default)
  bernoulli_p: f32[4,4] = bernoulli.p(sin_default, 0.5)
  exp_default: f32[4,4] = exp(x)
  return [mm_default, rsqrt_default, bernoulli_p, exp_default, div_tensor, t_default]""",
        )

    def test_the_last_unit_stays_unless_it_is_to_be_resharded_and_others_on_request(self):
        def saved(**reshard):
            return last_line(trace(three_layers(), rows(), reshard=reshard).after(PartitionJoint))

        self.assertExpectedInline(saved(), """return [mm_2, mid, top.weight, primals_2, mm, mm_1]""")
        self.assertExpectedInline(
            saved(low=False, mid=False, top=False), """return [mm_2, mid.weight, top.weight, primals_2, mm, mm_1]"""
        )
        self.assertExpectedInline(saved(mid=False, top=True), """return [mm_2, mid.weight, top, primals_2, mm, mm_1]""")
        self.assertExpectedInline(
            saved(low=True, mid=True, top=True), """return [mm_2, mid, top, primals_2, mm, mm_1]"""
        )

    def test_what_follows_from_a_weight_is_computed_again_in_the_backward(self):
        graphs = trace(two_products(), rows().bfloat16().requires_grad_())
        self.assertExpectedInline(
            last_line(graphs.after(PartitionJoint)), """return [mm_1, top.weight, low, permute, permute_2]"""
        )
        self.assertExpectedInline(
            str(graphs.after(PartitionJoint, "backward")),
            """\
backward(top.weight: f32[4,4], low: f32[8], permute: bf16[4,3], permute_2: bf16[4,3], tangents_1: bf16[3,4])
  low.weight: f32[4,4] = fsdp.unshard(low, 0)
  mul_1: f32[4,4] = mul(top.weight, 2)
  convert_element_type_3: bf16[4,4] = prims.convert_element_type(mul_1, bf16)
  permute_4: bf16[4,4] = permute(convert_element_type_3, [1, 0])
  mul: f32[4,4] = mul(low.weight, 2)
  convert_element_type: bf16[4,4] = prims.convert_element_type(mul, bf16)
  permute_5: bf16[4,4] = permute(convert_element_type, [1, 0])
  mm_2: bf16[4,4] = mm(permute, tangents_1)
  mm_3: bf16[3,4] = mm(tangents_1, permute_4)
  convert_element_type_10: f32[4,4] = prims.convert_element_type(mm_2, f32)
  mul_2: f32[4,4] = mul(convert_element_type_10, 2)
  top.grad: f32[8] = fsdp.reduce_gradient([mul_2], [0])
  mm_4: bf16[4,4] = mm(permute_2, mm_3)
  mm_5: bf16[3,4] = mm(mm_3, permute_5)
  convert_element_type_15: f32[4,4] = prims.convert_element_type(mm_4, f32)
  mul_3: f32[4,4] = mul(convert_element_type_15, 2)
  low.grad: f32[8] = fsdp.reduce_gradient([mul_3], [0])
  return [low.grad, mm_5, top.grad]""",
        )

    def test_frozen_units_are_unsharded_again_and_have_no_gradient(self):
        model = three_layers()
        model.mid.requires_grad_(False)
        self.assertExpectedInline(
            str(trace(model, rows()).after(PartitionJoint, "backward")),
            """\
backward(mid: f32[8], top.weight: f32[4,4], primals_2: f32[3,4], mm_1: f32[3,4], tangents_1: f32[3,4])
  mid.weight: f32[4,4] = fsdp.unshard(mid, 0)
  permute_3: f32[4,3] = permute(tangents_1, [1, 0])
  mm_3: f32[4,4] = mm(permute_3, mm_1)
  permute_2: f32[4,4] = permute(top.weight, [1, 0])
  permute_5: f32[4,4] = permute(permute_2, [1, 0])
  mm_4: f32[3,4] = mm(tangents_1, permute_5)
  top.grad: f32[8] = fsdp.reduce_gradient([mm_3], [0])
  permute_1: f32[4,4] = permute(mid.weight, [1, 0])
  permute_7: f32[4,4] = permute(permute_1, [1, 0])
  mm_5: f32[3,4] = mm(mm_4, permute_7)
  permute_8: f32[4,3] = permute(mm_5, [1, 0])
  mm_6: f32[4,4] = mm(permute_8, primals_2)
  low.grad: f32[8] = fsdp.reduce_gradient([mm_6], [0])
  return [low.grad, None, None, top.grad]""",
        )

    def test_a_frozen_first_layer_is_not_needed_in_the_backward(self):
        model = two_layers()
        model.up.requires_grad_(False)
        self.assertExpectedInline(last_line(trace(model, rows()).after(PartitionJoint)), """return [mm_1, mm]""")

    def test_a_checkpointed_unit_is_computed_again_from_its_shard(self):
        graphs = trace(Checkpointed(first=linear(4, 4), second=linear(4, 4)), rows())
        self.assertExpectedInline(
            last_line(graphs.after(PartitionJoint)), """return [sin_1, first, second.weight, primals_1, sin]"""
        )

    def test_what_follows_from_random_numbers_is_saved(self):
        graphs = trace(DroppedWeights(), rows().requires_grad_())
        self.assertExpectedInline(
            str(graphs.after(PartitionJoint)),
            """\
forward(primals_1: f32[3,4], root: f32[8])
  mix.weight: f32[4,4] = fsdp.unshard(root, 0)
  sin: f32[3,4] = sin(primals_1)
  inductor_seeds_default: i64[1] = prims.inductor_seeds(1, cpu)
  inductor_lookup_seed_default: i64[] = prims.inductor_lookup_seed(inductor_seeds_default, 0)
  inductor_random_default: f32[4,4] = prims.inductor_random([4, 4], inductor_lookup_seed_default, rand)
  gt: b8[4,4] = gt.Scalar(inductor_random_default, 0.5)
  mul: f32[4,4] = mul(gt, mix.weight)
  mul_1: f32[4,4] = mul(mul, 2.0)
  permute: f32[4,4] = permute(mul_1, [1, 0])
  permute_3: f32[4,4] = permute(permute, [1, 0])
  mm: f32[3,4] = mm(sin, permute)
  sin_1: f32[3,4] = sin(mm)
  return [sin_1, primals_1, sin, gt, mm, permute_3]""",
        )

    @torch._functorch.config.patch(activation_memory_budget=0.0)
    def test_random_numbers_are_drawn_once_whatever_the_memory_budget(self):
        graphs = trace(DroppedActivations(), rows())
        self.assertExpectedInline(
            last_line(graphs.after(PartitionJoint)),
            """return [mm_1, up, down.weight, inductor_seeds_default, primals_2]""",
        )
        self.assertExpectedInline(
            body(graphs.after(PartitionJoint, "backward")),
            """\
  up.weight: f32[8,4] = fsdp.unshard(up, 0)
  permute_2: f32[2,3] = permute(tangents_1, [1, 0])
  permute: f32[4,8] = permute(up.weight, [1, 0])
  mm: f32[3,8] = mm(primals_2, permute)
  inductor_lookup_seed_default: i64[] = prims.inductor_lookup_seed(inductor_seeds_default_1, 0)
  inductor_random_default: f32[3,8] = prims.inductor_random([3, 8], inductor_lookup_seed_default, rand)
  gt: b8[3,8] = gt.Scalar(inductor_random_default, 0.5)
  mul: f32[3,8] = mul(gt, mm)
  mul_1: f32[3,8] = mul(mul, 2.0)
  mm_2: f32[2,8] = mm(permute_2, mul_1)
  permute_1: f32[8,2] = permute(down.weight, [1, 0])
  permute_4: f32[2,8] = permute(permute_1, [1, 0])
  mm_3: f32[3,8] = mm(tangents_1, permute_4)
  down.grad: f32[8] = fsdp.reduce_gradient([mm_2], [0])
  convert_element_type: f32[3,8] = prims.convert_element_type(gt, f32)
  mul_2: f32[3,8] = mul(convert_element_type, 2.0)
  mul_3: f32[3,8] = mul(mm_3, mul_2)
  permute_6: f32[8,3] = permute(mul_3, [1, 0])
  mm_4: f32[8,4] = mm(permute_6, primals_2)
  up.grad: f32[16] = fsdp.reduce_gradient([mm_4], [0])
  return [up.grad, None, down.grad]""",
        )

    @torch._functorch.config.patch(activation_memory_budget=0.0)
    def test_of_several_random_results_the_one_is_saved_that_the_backward_reads(self):
        graphs = trace(Drawn(), rows())
        self.assertExpectedInline(
            last_line(graphs.after(PartitionJoint)), """return [mm_1, up, down.weight, getitem, getitem_2, primals_2]"""
        )
        self.assertNotIn("tests.draw", str(graphs.after(PartitionJoint, "backward")))

    @torch._functorch.config.patch(activation_memory_budget=0.0)
    def test_attention_without_dropout_is_computed_again(self):
        graphs = trace(Attends(), rows())
        self.assertExpectedInline(
            last_line(graphs.after(PartitionJoint)), """return [mm_1, up, down.weight, primals_2]"""
        )

    def test_the_size_of_a_dynamic_batch_is_saved_last_and_taken_first(self):
        x = rows()
        torch._dynamo.mark_dynamic(x, 0)
        graphs = trace(two_layers(), x)
        self.assertExpectedInline(
            last_line(graphs.after(PartitionJoint)), """return [mm_1, down.weight, primals_3, mm, primals_2]"""
        )
        self.assertExpectedInline(
            first_line(graphs.after(PartitionJoint, "backward")),
            """\
backward(primals_2, down.weight: f32[2,8], primals_3: f32[s33,4], mm: f32[s33,8], tangents_1: f32[s33,2])""",
        )

    def test_what_follows_from_an_input_that_is_written_is_saved(self):
        self.assertExpectedInline(
            last_line(trace(Counts(), rows()).after(PartitionJoint)),
            """return [mul_3, primals_1, primals_4, clone_default, primals_3, select]""",
        )

    @torch._functorch.config.patch(activation_memory_budget=0.0)
    def test_an_input_that_is_written_is_saved_as_it_was_before(self):
        graphs = trace(Counts(), rows())
        self.assertExpectedInline(
            str(graphs.after(PartitionJoint)),
            """\
forward(primals_1: f32[], root: f32[8], primals_3: f32[3,4], primals_4: f32[2,4])
  mix.weight: f32[4,4] = fsdp.unshard(root, 0)
  cos: f32[] = cos(primals_1)
  permute: f32[4,4] = permute(mix.weight, [1, 0])
  mm: f32[3,4] = mm(primals_3, permute)
  neg: f32[2,4] = neg(primals_4)
  select: f32[4] = select.int(neg, 0, 0)
  mul: f32[3,4] = mul(mm, select)
  add: f32[] = add(primals_1, 1)
  mul_1: f32[2,4] = mul(primals_4, 2)
  mul_2: f32[3,4] = mul(mul, cos)
  mul_3: f32[3,4] = mul(mul_2, add)
  clone_default: f32[] = clone(primals_1)
  copy_: f32[] = copy_(primals_1, add)
  clone_default_1: f32[2,4] = clone(primals_4)
  copy__1: f32[2,4] = copy_(primals_4, mul_1)
  return [mul_3, primals_1, primals_4, clone_default, clone_default_1, primals_3]""",
        )
        self.assertExpectedInline(
            str(graphs.after(PartitionJoint, "backward")),
            """\
backward(clone_default: f32[], clone_default_1: f32[2,4], primals_3: f32[3,4], tangents_1: f32[3,4])
  add: f32[] = add(clone_default, 1)
  mul_4: f32[3,4] = mul(tangents_1, add)
  cos: f32[] = cos(clone_default)
  mul_5: f32[3,4] = mul(mul_4, cos)
  neg: f32[2,4] = neg(clone_default_1)
  select: f32[4] = select.int(neg, 0, 0)
  mul_6: f32[3,4] = mul(mul_5, select)
  permute_1: f32[4,3] = permute(mul_6, [1, 0])
  mm_1: f32[4,4] = mm(permute_1, primals_3)
  root.grad: f32[8] = fsdp.reduce_gradient([mm_1], [0])
  return [None, root.grad, None, None]""",
        )

    @torch._functorch.config.patch(activation_memory_budget=0.0)
    def test_an_input_that_the_backward_writes_as_well_is_read_as_it_was_and_written_itself(self):
        graphs = trace(CountsBackwards(), rows())
        self.assertExpectedInline(
            last_line(graphs.after(PartitionJoint)), """return [mul, primals_3, clone_default, primals_2, primals_3]"""
        )
        self.assertExpectedInline(
            str(graphs.after(PartitionJoint, "backward")),
            """\
backward(clone_default: f32[2,4], primals_2: f32[3,4], primals_3: f32[2,4], tangents_1: f32[3,4])
  neg: f32[2,4] = neg(clone_default)
  select: f32[4] = select.int(neg, 0, 0)
  mul_2: f32[3,4] = mul(tangents_1, select)
  permute_1: f32[4,3] = permute(mul_2, [1, 0])
  mm_1: f32[4,4] = mm(permute_1, primals_2)
  root.grad: f32[8] = fsdp.reduce_gradient([mm_1], [0])
  add: f32[2,4] = add(clone_default, 1)
  mul_1: f32[2,4] = mul(add, 2)
  copy__1: f32[2,4] = copy_(primals_3, mul_1)
  return [root.grad, None, None]""",
        )

    def test_a_graph_without_shards_is_cut_by_the_partitioner_alone(self):
        graphs = trace(nn.Sequential(nn.Tanh()), rows().requires_grad_())
        self.assertExpectedInline(
            str(graphs.after(PartitionJoint)),
            """\
forward(primals_1: f32[3,4])
  tanh: f32[3,4] = tanh(primals_1)
  return [tanh, tanh]""",
        )
        self.assertExpectedInline(
            str(graphs.after(PartitionJoint, "backward")),
            """\
backward(tanh: f32[3,4], tangents_1: f32[3,4])
  mul: f32[3,4] = mul(tanh, tanh)
  sub: f32[3,4] = sub(1, mul)
  mul_1: f32[3,4] = mul(tangents_1, sub)
  return [mul_1]""",
        )

    def test_what_crosses_prints(self):
        joint = trace(three_layers(), rows()).after(MergeGradients, "joint").gm
        crossing = Crossing.of(Halves.of(joint, 1, ()), {"mid": Part(2, "shard/2", 1)})
        self.assertExpectedInline(
            str(crossing),
            """\
gather mid.weight again over shard/2
keep top.weight""",
        )

    def test_a_saved_value_that_the_backward_does_not_take_is_refused(self):
        forward, backward = Drawing(), Drawing()
        x = forward.input("x", 4)
        saved = forward.call(torch.ops.aten.sin.default, x)
        backward.input("cos", 4)
        parameter = {"x": Unshard("shard", (), "unit", "x", world_size=2, dtype=torch.float32)}
        graphs = forward.returns(x, saved).gm, backward.returns().gm
        message = self.assert_raises(PassError, Crossing.of, Halves(*graphs, 1, parameter), {})
        self.assertExpectedInline(
            message,
            """\
the partitioner saved this, which the backward does not take
  x: f32[4], an input
> sin_default: f32[4] = sin(x)
  return [x, sin_default]""",
        )
