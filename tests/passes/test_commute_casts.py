"""CommuteCasts: parameters that are cast before they are gathered, and those that stay wide."""

import torch
from expecttest import TestCase
from torch import nn

from fsdp_compile.passes import metadata, ops
from fsdp_compile.passes.commute_casts import CommuteCasts
from fsdp_compile.passes.insert_all_gather import InsertAllGather
from fsdp_compile.passes.lower_collectives import LowerCollectives
from tests.passes.tiny import Bfloat16Product, Chain, Mixed, rows
from tests.passes.tracing import trace


class Reader(nn.Module):
    """A weight that `read` makes something of, beside one that is cast."""

    def __init__(self, read, **options):
        super().__init__()
        self.read = read
        self.weight = nn.Parameter(torch.ones(4, 4, **options))

    def forward(self, x):
        return self.read(x, self.weight)


WIDE = {  # what is read of the weight otherwise
    "both": lambda x, weight: x @ weight.bfloat16() + x.float().sum() * weight.sum().bfloat16(),
    "computed": lambda x, weight: x @ (weight + 1).bfloat16(),
    "wider": lambda x, weight: (x.double() @ weight.double()).bfloat16(),
    "two": lambda x, weight: x @ weight.bfloat16() + (x.half() @ weight.half()).bfloat16(),
}


class Part(nn.Module):
    """A unit in which `num_cast` weights are cast, and one is read as it is."""

    def __init__(self, num_cast, num_wide):
        super().__init__()
        self.cast = nn.ParameterList(nn.Parameter(torch.ones(4, 4)) for _ in range(num_cast))
        self.wide = nn.ParameterList(nn.Parameter(torch.ones(4, 4)) for _ in range(num_wide))

    def forward(self, x):
        for weight in self.cast:
            x = x @ weight.bfloat16()
        for weight in self.wide:
            x = (x.float() @ weight).bfloat16()
        return x


def dtypes_of(graph):
    """What is gathered, by parameter."""
    nodes = graph.gm.graph.nodes
    return {ops.argument(node, "parameter"): node.meta["val"].dtype for node in nodes if ops.is_call(node, ops.UNSHARD)}


class TestCommuteCasts(TestCase):
    maxDiff = None

    def test_a_weight_that_is_used_as_bf16_is_gathered_as_bf16(self):
        graphs = trace(Chain(up=Bfloat16Product()), rows().bfloat16())
        self.assertExpectedInline(
            str(graphs.after(CommuteCasts, "joint")),
            """\
joint(root: f32[8], primals_2: bf16[3,4], tangents_1: bf16[3,4])
  up.weight: bf16[4,4] = fsdp.unshard(root, 0)
  mm: bf16[3,4] = mm(primals_2, up.weight)
  permute: bf16[4,3] = permute(primals_2, [1, 0])
  mm_1: bf16[4,4] = mm(permute, tangents_1)
  convert_element_type_5: f32[4,4] = prims.convert_element_type(mm_1, f32)
  root.grad: f32[8] = fsdp.reduce_gradient([convert_element_type_5], [0])
  return [mm, root.grad, None]""",
        )
        self.assertExpectedInline(
            str(graphs.after(InsertAllGather)),
            """\
forward(root: f32[8], primals_2: bf16[3,4])
  root.bf16: bf16[8] = fsdp.cast(root)
  root.pending: bf16[16] = fsdp.all_gather(root.bf16)
  root.gathered: bf16[16] = fsdp.wait(root.pending)
  up.weight: bf16[4,4] = fsdp.view_out(root.gathered, 0)
  mm: bf16[3,4] = mm(primals_2, up.weight)
  permute: bf16[4,3] = permute(primals_2, [1, 0])
  return [mm, permute]""",
        )

    def test_what_is_used_as_it_is_travels_in_the_same_message(self):
        graphs = trace(Chain(block=Mixed()), rows(), policy=Mixed)
        self.assertExpectedInline(
            str(graphs.after(InsertAllGather)),
            """\
forward(root: f32[36], primals_2: f32[3,4])
  root.bf16: bf16[40] = fsdp.narrow(root, [0, 4, 20], [float32, bfloat16, bfloat16])
  root.pending: bf16[80] = fsdp.all_gather(root.bf16)
  root.gathered: bf16[80] = fsdp.wait(root.pending)
  var_mean = var_mean.correction(primals_2, [1], correction=0, keepdim=True)
  getitem: f32[3,1] = getitem(var_mean, 0)
  getitem_1: f32[3,1] = getitem(var_mean, 1)
  add: f32[3,1] = add(getitem, 1e-05)
  rsqrt: f32[3,1] = rsqrt(add)
  sub: f32[3,4] = sub(primals_2, getitem_1)
  mul: f32[3,4] = mul(sub, rsqrt)
  block.norm.weight: f32[4] = fsdp.copy_out(root.gathered, 0)
  mul_1: f32[3,4] = mul(mul, block.norm.weight)
  convert_element_type: bf16[3,4] = prims.convert_element_type(mul_1, bf16)
  block.up.weight: bf16[8,4] = fsdp.copy_out(root.gathered, 8)
  permute: bf16[4,8] = permute(block.up.weight, [1, 0])
  mm: bf16[3,8] = mm(convert_element_type, permute)
  relu: bf16[3,8] = relu(mm)
  block.down.weight: bf16[4,8] = fsdp.copy_out(root.gathered, 24)
  permute_1: bf16[8,4] = permute(block.down.weight, [1, 0])
  mm_1: bf16[3,4] = mm(relu, permute_1)
  add_1: f32[3,4] = add(primals_2, mm_1)
  return [add_1, block.up.weight, block.down.weight, primals_2, convert_element_type, relu]""",
        )
        self.assertExpectedInline(
            str(graphs.after(LowerCollectives)),
            """\
forward(primals_1: f32[36], primals_2: f32[3,4])
  slice_tensor: f32[4] = slice(primals_1, 0, 0, 4)
  view_dtype: bf16[8] = view.dtype(slice_tensor, bf16)
  slice_tensor_1: f32[32] = slice(primals_1, 0, 4, 36)
  convert_element_type_default: bf16[32] = prims.convert_element_type(slice_tensor_1, bf16)
  cat_default: bf16[40] = cat([view_dtype, convert_element_type_default])
  all_gather_into_tensor_default: bf16[80] = _c10d_functional.all_gather_into_tensor(cat_default, 2, shard)
  wait_tensor_default: bf16[80] = _c10d_functional.wait_tensor(all_gather_into_tensor_default)
  var_mean = var_mean.correction(primals_2, [1], correction=0, keepdim=True)
  getitem: f32[3,1] = getitem(var_mean, 0)
  getitem_1: f32[3,1] = getitem(var_mean, 1)
  add: f32[3,1] = add(getitem, 1e-05)
  rsqrt: f32[3,1] = rsqrt(add)
  sub: f32[3,4] = sub(primals_2, getitem_1)
  mul: f32[3,4] = mul(sub, rsqrt)
  view_default: bf16[2,40] = view(wait_tensor_default, [2, 40])
  slice_copy_tensor: bf16[2,4] = slice_copy(view_default, 1, 0, 4)
  view_dtype_1: f32[2,2] = view.dtype(slice_copy_tensor, f32)
  view_default_1: f32[4] = view(view_dtype_1, [4])
  mul_1: f32[3,4] = mul(mul, view_default_1)
  convert_element_type: bf16[3,4] = prims.convert_element_type(mul_1, bf16)
  convert_element_type.stored: bf16[3,4] = fsdp.store(convert_element_type)
  slice_copy_tensor_1: bf16[2,16] = slice_copy(view_default, 1, 8, 24)
  view_default_2: bf16[8,4] = view(slice_copy_tensor_1, [8, 4])
  view_default_2.stored: bf16[8,4] = fsdp.store(view_default_2)
  permute: bf16[4,8] = permute(view_default_2.stored, [1, 0])
  mm: bf16[3,8] = mm(convert_element_type.stored, permute)
  relu: bf16[3,8] = relu(mm)
  slice_copy_tensor_2: bf16[2,16] = slice_copy(view_default, 1, 24, 40)
  view_default_3: bf16[4,8] = view(slice_copy_tensor_2, [4, 8])
  view_default_3.stored: bf16[4,8] = fsdp.store(view_default_3)
  permute_1: bf16[8,4] = permute(view_default_3.stored, [1, 0])
  mm_1: bf16[3,4] = mm(relu, permute_1)
  add_1: f32[3,4] = add(primals_2, mm_1)
  return [add_1, view_default_2.stored, view_default_3.stored, primals_2, convert_element_type.stored, relu]""",
        )

    def test_in_the_grouped_form_it_is_copied_out(self):
        graphs = trace(Chain(block=Mixed()), rows(), policy=Mixed, grouped=True)
        self.assertExpectedInline(
            str(graphs.after(InsertAllGather)),
            """\
forward(root: f32[36], primals_2: f32[3,4])
  root.bf16: bf16[40] = fsdp.narrow(root, [0, 4, 20], [float32, bfloat16, bfloat16])
  root.pending: bf16[80] = fsdp.all_gather_grouped([root.bf16])
  root.gathered: bf16[80] = fsdp.wait(root.pending)
  var_mean = var_mean.correction(primals_2, [1], correction=0, keepdim=True)
  getitem: f32[3,1] = getitem(var_mean, 0)
  getitem_1: f32[3,1] = getitem(var_mean, 1)
  add: f32[3,1] = add(getitem, 1e-05)
  rsqrt: f32[3,1] = rsqrt(add)
  sub: f32[3,4] = sub(primals_2, getitem_1)
  mul: f32[3,4] = mul(sub, rsqrt)
  block.norm.weight: f32[4] = fsdp.copy_out(root.gathered, 0)
  mul_1: f32[3,4] = mul(mul, block.norm.weight)
  convert_element_type: bf16[3,4] = prims.convert_element_type(mul_1, bf16)
  block.up.weight: bf16[8,4] = fsdp.view_out(root.gathered, 8)
  permute: bf16[4,8] = permute(block.up.weight, [1, 0])
  mm: bf16[3,8] = mm(convert_element_type, permute)
  relu: bf16[3,8] = relu(mm)
  block.down.weight: bf16[4,8] = fsdp.view_out(root.gathered, 24)
  permute_1: bf16[8,4] = permute(block.down.weight, [1, 0])
  mm_1: bf16[3,4] = mm(relu, permute_1)
  add_1: f32[3,4] = add(primals_2, mm_1)
  return [add_1, block.up.weight, block.down.weight, primals_2, convert_element_type, relu]""",
        )

    def test_a_unit_of_which_a_part_is_kept_stays_wide(self):
        model, part = Chain(low=Mixed(), top=Mixed()), metadata.Part(2, "within_node", 0)
        graphs = trace(model, rows(), world_size=4, policy=Mixed, reshard={"low": part})
        found = dtypes_of(graphs.after(CommuteCasts, "joint"))
        self.assertEqual(found["low.up.weight"], torch.float32)
        self.assertEqual(found["top.up.weight"], torch.bfloat16)

    def test_what_else_is_read_of_a_weight_keeps_it_wide(self):
        for name, read in WIDE.items():
            with self.subTest(name):
                graph = trace(Reader(read), rows().bfloat16()).after(CommuteCasts, "joint")
                self.assertEqual(dtypes_of(graph), {"weight": torch.float32})

    def test_a_quarter_of_the_bytes_has_to_be_won(self):
        for num_cast, num_wide, expected in ((1, 1, torch.bfloat16), (1, 2, torch.float32), (3, 2, torch.bfloat16)):
            with self.subTest(num_cast=num_cast, num_wide=num_wide):
                graphs = trace(Chain(only=Part(num_cast, num_wide)), rows().bfloat16(), policy=Part)
                found = dtypes_of(graphs.after(CommuteCasts, "joint"))
                self.assertEqual(found["only.cast.0"], expected)
                self.assertEqual(found["only.wide.0"], torch.float32)
