"""Parameters that are scaled and cast to float8 are gathered in it; see also tests/integrations/test_float8.py."""

import pytest
import torch
from expecttest import TestCase
from torch import nn

from fsdp_compile.passes import metadata, ops
from fsdp_compile.passes.commute_scales import CommuteScales
from fsdp_compile.passes.lower_collectives import LowerCollectives
from tests.passes.tiny import rows
from tests.passes.tracing import trace

F8 = torch.float8_e4m3fn


class Float8(nn.Module):
    """A frozen weight of four rows, read in float8, and another that is trained."""

    def __init__(self, read=lambda scaled, weight, scale: scaled):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)
        self.trained, self.read = nn.Linear(4, 4, bias=False), read

    def forward(self, x):
        scale = 448.0 / self.weight.abs().max()
        narrow = (self.weight.t() * scale).clamp(-448.0, 448.0).to(F8)
        return self.trained(x @ (self.read(narrow.float(), self.weight, scale) / scale))


class Float8Rows(nn.Module):
    """A frozen weight of four rows, each read in float8 by a scale of its own, or each column so."""

    def __init__(self, dim=0, largest=lambda view, dim: view.abs().amax(dim, keepdim=True), of_view=torch.t):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)
        self.trained, self.dim, self.largest, self.of_view = nn.Linear(4, 4, bias=False), dim, largest, of_view

    def forward(self, x):
        scale = 448.0 / self.largest(self.weight.t(), self.dim)
        narrow = (self.of_view(self.weight) * scale).clamp(-448.0, 448.0).to(F8)
        return self.trained(x @ (narrow.float() / scale))


class Float8Blocks(nn.Module):
    """A frozen weight of four rows, of which each half is read in float8 by a scale of its own, a power of two."""

    def __init__(self, size=2, shape=(4, 2), dim=-1):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)
        self.trained, self.size, self.shape, self.dim = nn.Linear(4, 4, bias=False), size, shape, dim

    def forward(self, x):
        blocks = self.weight.view(*self.shape, self.size)
        largest = blocks.abs().amax(self.dim).unsqueeze(self.dim)
        exponent = torch.where(largest > 0, largest.log2().ceil(), 0.0).to(torch.int8)
        narrow = (blocks * torch.exp2(8.0 - exponent.float())).clamp(-448.0, 448.0).to(F8)
        wide = narrow.float() * torch.exp2(exponent.float() - 8.0)
        return self.trained(x @ wide.view(4, 4))


def traced(module, **options):
    return trace(module, rows(), policy=[], reshard={"": True}, **options)


def gathered(trace):
    """The dtypes in which parameters are gathered in the forward."""
    nodes = trace.after(CommuteScales).gm.graph.nodes
    return {ops.argument(node, "parameter"): node.meta["val"].dtype for node in nodes if ops.is_call(node, ops.UNSHARD)}


class TestCommuteScales(TestCase):
    maxDiff = None

    def test_the_maximum_is_reduced_and_the_shard_is_scaled(self):
        graphs = traced(Float8())
        self.assertExpectedInline(
            str(graphs.after(CommuteScales)),
            """\
forward(root/float32.frozen: f32[8], primals_2: f32[3,4], root/float32: f32[8])
  slice_tensor: f32[8] = slice(root/float32.frozen, 0, 0, 8)
  abs_default: f32[8] = abs(slice_tensor)
  amax_default: f32[1] = amax(abs_default, [0], True)
  cat_default: f32[1] = cat([amax_default])
  all_reduce_default: f32[1] = _c10d_functional.all_reduce(cat_default, max, shard)
  wait_tensor_default: f32[1] = _c10d_functional.wait_tensor(all_reduce_default)
  select_int: f32[] = select.int(wait_tensor_default, 0, 0)
  reciprocal: f32[] = reciprocal(select_int)
  mul: f32[] = mul(reciprocal, 448.0)
  root/float32.frozen.scaled: f32[8] = fsdp.scale(root/float32.frozen, [mul], [0])
  weight: float8_e4m3fn[4,4] = fsdp.unshard(root/float32.frozen.scaled, 0)
  trained.weight: f32[4,4] = fsdp.unshard(root/float32, 0)
  permute: float8_e4m3fn[4,4] = permute(weight, [1, 0])
  convert_element_type_1: f32[4,4] = prims.convert_element_type(permute, f32)
  div: f32[4,4] = div(convert_element_type_1, mul)
  mm: f32[3,4] = mm(primals_2, div)
  permute_1: f32[4,4] = permute(trained.weight, [1, 0])
  mm_1: f32[3,4] = mm(mm, permute_1)
  return [mm_1, mm]""",
        )
        self.assertExpectedInline(
            str(graphs.graphs.forward),
            """\
forward(root/float32.frozen: f32[8], primals_2: f32[3,4], root/float32: f32[8])
  slice_tensor: f32[8] = slice(root/float32.frozen, 0, 0, 8)
  abs_default: f32[8] = abs(slice_tensor)
  amax_default: f32[1] = amax(abs_default, [0], True)
  cat_default: f32[1] = cat([amax_default])
  all_reduce_default: f32[1] = _c10d_functional.all_reduce(cat_default, max, shard)
  wait_tensor_default: f32[1] = _c10d_functional.wait_tensor(all_reduce_default)
  select_int: f32[] = select.int(wait_tensor_default, 0, 0)
  reciprocal: f32[] = reciprocal(select_int)
  mul: f32[] = mul(reciprocal, 448.0)
  root/float32.frozen.scaled: f32[8] = fsdp.scale(root/float32.frozen, [mul], [0])
  root/float32.frozen.i8: i8[8] = fsdp.narrow(root/float32.frozen.scaled, [0], [float8_e4m3fn])
  root/float32.frozen.pending: i8[16] = fsdp.all_gather(root/float32.frozen.i8)
  root/float32.pending: f32[16] = fsdp.all_gather(root/float32)
  root/float32.frozen.gathered: i8[16] = fsdp.wait(root/float32.frozen.pending)
  weight: float8_e4m3fn[4,4] = fsdp.copy_out(root/float32.frozen.gathered, 0)
  fsdp.free(root/float32.frozen.gathered)
  permute: float8_e4m3fn[4,4] = permute(weight, [1, 0])
  convert_element_type_1: f32[4,4] = prims.convert_element_type(permute, f32)
  fsdp.free(weight)
  div: f32[4,4] = div(convert_element_type_1, mul)
  mm: f32[3,4] = mm(primals_2, div)
  root/float32.gathered: f32[16] = fsdp.wait(root/float32.pending)
  trained.weight: f32[4,4] = fsdp.view_out(root/float32.gathered, 0)
  permute_1: f32[4,4] = permute(trained.weight, [1, 0])
  mm_1: f32[3,4] = mm(mm, permute_1)
  fsdp.free(root/float32.gathered)
  return [mm_1, mm]""",
        )
        self.assertExpectedInline(
            str(graphs.after(LowerCollectives)),
            """\
forward(primals_1: f32[8], primals_2: f32[3,4], primals_3: f32[8])
  slice_tensor: f32[8] = slice(primals_1, 0, 0, 8)
  abs_default: f32[8] = abs(slice_tensor)
  amax_default: f32[1] = amax(abs_default, [0], True)
  cat_default: f32[1] = cat([amax_default])
  all_reduce_default: f32[1] = _c10d_functional.all_reduce(cat_default, max, shard)
  wait_tensor_default: f32[1] = _c10d_functional.wait_tensor(all_reduce_default)
  select_int: f32[] = select.int(wait_tensor_default, 0, 0)
  reciprocal: f32[] = reciprocal(select_int)
  mul: f32[] = mul(reciprocal, 448.0)
  mul_tensor: f32[8] = mul(primals_1, mul)
  clamp_min_default: f32[8] = clamp_min(mul_tensor, -448.0)
  clamp_max_default: f32[8] = clamp_max(clamp_min_default, 448.0)
  convert_element_type_default: float8_e4m3fn[8] = prims.convert_element_type(clamp_max_default, float8_e4m3fn)
  view_dtype: i8[8] = view.dtype(convert_element_type_default, i8)
  cat_default_1: i8[8] = cat([view_dtype])
  all_gather_into_tensor_default: i8[16] = _c10d_functional.all_gather_into_tensor(cat_default_1, 2, shard)
  all_gather_into_tensor_default_1: f32[16] = _c10d_functional.all_gather_into_tensor(primals_3, 2, shard)
  wait_tensor_default_1: i8[16] = _c10d_functional.wait_tensor(all_gather_into_tensor_default)
  view_default: i8[2,8] = view(wait_tensor_default_1, [2, 8])
  slice_copy_tensor: i8[2,8] = slice_copy(view_default, 1, 0, 8)
  view_dtype_1: float8_e4m3fn[2,8] = view.dtype(slice_copy_tensor, float8_e4m3fn)
  view_default_1: float8_e4m3fn[4,4] = view(view_dtype_1, [4, 4])
  permute: float8_e4m3fn[4,4] = permute(view_default_1, [1, 0])
  convert_element_type_1: f32[4,4] = prims.convert_element_type(permute, f32)
  div: f32[4,4] = div(convert_element_type_1, mul)
  mm: f32[3,4] = mm(primals_2, div)
  wait_tensor_default_2: f32[16] = _c10d_functional.wait_tensor(all_gather_into_tensor_default_1)
  view_default_2: f32[4,4] = view(wait_tensor_default_2, [4, 4])
  permute_1: f32[4,4] = permute(view_default_2, [1, 0])
  mm_1: f32[3,4] = mm(mm, permute_1)
  return [mm_1, mm]""",
        )

    def test_scales_of_rows_are_gathered(self):
        self.assertExpectedInline(
            str(traced(Float8Rows(0)).after(CommuteScales)),
            """\
forward(root/float32.frozen: f32[8], primals_2: f32[3,4], root/float32: f32[8])
  slice_tensor: f32[8] = slice(root/float32.frozen, 0, 0, 8)
  view_default: f32[2,4] = view(slice_tensor, [2, -1])
  abs_default: f32[2,4] = abs(view_default)
  amax_default: f32[2] = amax(abs_default, [1])
  reciprocal_1: f32[2] = reciprocal(amax_default)
  mul_2: f32[2] = mul(reciprocal_1, 448.0)
  view_default_1: f32[2,1] = view(mul_2, [2, 1])
  cat_default: f32[2] = cat([mul_2])
  all_gather_into_tensor_default: f32[4] = _c10d_functional.all_gather_into_tensor(cat_default, 2, shard)
  wait_tensor_default: f32[4] = _c10d_functional.wait_tensor(all_gather_into_tensor_default)
  view_default_2: f32[2,2] = view(wait_tensor_default, [2, 2])
  slice_copy_tensor: f32[2,2] = slice_copy(view_default_2, 1, 0, 2)
  view_default_3: f32[4] = view(slice_copy_tensor, [4])
  slice_tensor_1: f32[4] = slice(view_default_3, 0, 0, 4)
  view_default_4: f32[1,4] = view(slice_tensor_1, [1, 4])
  root/float32.frozen.scaled: f32[8] = fsdp.scale(root/float32.frozen, [view_default_1], [0])
  weight: float8_e4m3fn[4,4] = fsdp.unshard(root/float32.frozen.scaled, 0)
  trained.weight: f32[4,4] = fsdp.unshard(root/float32, 0)
  permute: float8_e4m3fn[4,4] = permute(weight, [1, 0])
  convert_element_type_1: f32[4,4] = prims.convert_element_type(permute, f32)
  div: f32[4,4] = div(convert_element_type_1, view_default_4)
  mm: f32[3,4] = mm(primals_2, div)
  permute_2: f32[4,4] = permute(trained.weight, [1, 0])
  mm_1: f32[3,4] = mm(mm, permute_2)
  return [mm_1, mm]""",
        )

    def test_what_is_read_of_blocks_is_gathered(self):
        """Exponents in a byte each, and not what a rank scales its own rows with."""
        self.assertExpectedInline(
            str(traced(Float8Blocks()).after(CommuteScales)),
            """\
forward(root/float32.frozen: f32[8], primals_2: f32[3,4], root/float32: f32[8])
  slice_tensor: f32[8] = slice(root/float32.frozen, 0, 0, 8)
  view_default: f32[4,2] = view(slice_tensor, [4, -1])
  abs_default: f32[4,2] = abs(view_default)
  amax_default: f32[4] = amax(abs_default, [1])
  gt_1: b8[4] = gt.Scalar(amax_default, 0)
  log2_1: f32[4] = log2(amax_default)
  ceil_1: f32[4] = ceil(log2_1)
  full_default_1: f32[] = full([], 0.0, dtype=f32, layout=torch.strided, device=cpu, pin_memory=False)
  where_1: f32[4] = where.self(gt_1, ceil_1, full_default_1)
  convert_element_type_4: i8[4] = prims.convert_element_type(where_1, i8)
  convert_element_type_5: f32[4] = prims.convert_element_type(convert_element_type_4, f32)
  sub_2: f32[4] = sub(8.0, convert_element_type_5)
  exp2_2: f32[4] = exp2(sub_2)
  view_default_1: f32[4,1] = view(exp2_2, [4, 1])
  cat_default: i8[4] = cat([convert_element_type_4])
  all_gather_into_tensor_default: i8[8] = _c10d_functional.all_gather_into_tensor(cat_default, 2, shard)
  wait_tensor_default: i8[8] = _c10d_functional.wait_tensor(all_gather_into_tensor_default)
  view_default_2: i8[2,4] = view(wait_tensor_default, [2, 4])
  slice_copy_tensor: i8[2,4] = slice_copy(view_default_2, 1, 0, 4)
  view_default_3: i8[8] = view(slice_copy_tensor, [8])
  slice_tensor_1: i8[8] = slice(view_default_3, 0, 0, 8)
  view_default_4: i8[4,2,1] = view(slice_tensor_1, [4, 2, 1])
  root/float32.frozen.scaled: f32[8] = fsdp.scale(root/float32.frozen, [view_default_1], [0])
  weight: float8_e4m3fn[4,4] = fsdp.unshard(root/float32.frozen.scaled, 0)
  trained.weight: f32[4,4] = fsdp.unshard(root/float32, 0)
  view: float8_e4m3fn[4,2,2] = view(weight, [4, 2, 2])
  convert_element_type_1: f32[4,2,1] = prims.convert_element_type(view_default_4, f32)
  convert_element_type_3: f32[4,2,2] = prims.convert_element_type(view, f32)
  sub_1: f32[4,2,1] = sub(convert_element_type_1, 8.0)
  exp2_1: f32[4,2,1] = exp2(sub_1)
  mul_1: f32[4,2,2] = mul(convert_element_type_3, exp2_1)
  view_1: f32[4,4] = view(mul_1, [4, 4])
  mm: f32[3,4] = mm(primals_2, view_1)
  permute: f32[4,4] = permute(trained.weight, [1, 0])
  mm_1: f32[3,4] = mm(mm, permute)
  return [mm_1, mm]""",
        )

    def test_maxima_of_columns_are_reduced(self):
        self.assertExpectedInline(
            str(traced(Float8Rows(1)).after(LowerCollectives)),
            """\
forward(primals_1: f32[8], primals_2: f32[3,4], primals_3: f32[8])
  slice_tensor: f32[8] = slice(primals_1, 0, 0, 8)
  view_default: f32[2,4] = view(slice_tensor, [2, -1])
  abs_default: f32[2,4] = abs(view_default)
  amax_default: f32[4] = amax(abs_default, [0], False)
  cat_default: f32[4] = cat([amax_default])
  all_reduce_default: f32[4] = _c10d_functional.all_reduce(cat_default, max, shard)
  wait_tensor_default: f32[4] = _c10d_functional.wait_tensor(all_reduce_default)
  slice_tensor_1: f32[4] = slice(wait_tensor_default, 0, 0, 4)
  view_default_1: f32[4,1] = view(slice_tensor_1, [4, 1])
  reciprocal: f32[4,1] = reciprocal(view_default_1)
  mul: f32[4,1] = mul(reciprocal, 448.0)
  view_default_2: f32[1,4] = view(mul, [1, 4])
  view_default_3: f32[2,4] = view(primals_1, [-1, 4])
  mul_tensor: f32[2,4] = mul(view_default_3, view_default_2)
  clamp_min_default: f32[2,4] = clamp_min(mul_tensor, -448.0)
  clamp_max_default: f32[2,4] = clamp_max(clamp_min_default, 448.0)
  view_default_4: f32[8] = view(clamp_max_default, [-1])
  convert_element_type_default: float8_e4m3fn[8] = prims.convert_element_type(view_default_4, float8_e4m3fn)
  view_dtype: i8[8] = view.dtype(convert_element_type_default, i8)
  cat_default_1: i8[8] = cat([view_dtype])
  all_gather_into_tensor_default: i8[16] = _c10d_functional.all_gather_into_tensor(cat_default_1, 2, shard)
  all_gather_into_tensor_default_1: f32[16] = _c10d_functional.all_gather_into_tensor(primals_3, 2, shard)
  wait_tensor_default_1: i8[16] = _c10d_functional.wait_tensor(all_gather_into_tensor_default)
  view_default_5: i8[2,8] = view(wait_tensor_default_1, [2, 8])
  slice_copy_tensor: i8[2,8] = slice_copy(view_default_5, 1, 0, 8)
  view_dtype_1: float8_e4m3fn[2,8] = view.dtype(slice_copy_tensor, float8_e4m3fn)
  view_default_6: float8_e4m3fn[4,4] = view(view_dtype_1, [4, 4])
  permute: float8_e4m3fn[4,4] = permute(view_default_6, [1, 0])
  convert_element_type_1: f32[4,4] = prims.convert_element_type(permute, f32)
  div: f32[4,4] = div(convert_element_type_1, mul)
  mm: f32[3,4] = mm(primals_2, div)
  wait_tensor_default_2: f32[16] = _c10d_functional.wait_tensor(all_gather_into_tensor_default_1)
  view_default_7: f32[4,4] = view(wait_tensor_default_2, [4, 4])
  permute_2: f32[4,4] = permute(view_default_7, [1, 0])
  mm_1: f32[3,4] = mm(mm, permute_2)
  return [mm_1, mm]""",
        )


OTHER_READS = {
    "wide": lambda narrow, weight, scale: narrow + weight,
    "another scale": lambda narrow, weight, scale: narrow + (weight * 2.0).clamp(-448.0, 448.0).to(F8).float(),
    "its sum": lambda narrow, weight, scale: narrow * weight.sum(),
    "without bounds": lambda narrow, weight, scale: narrow + (weight.t() * scale).to(F8).float(),
    "uneven bounds": lambda narrow, weight, scale: narrow + (weight * scale).clamp(-1.0, 448.0).to(F8).float(),
    "bfloat16": lambda narrow, weight, scale: narrow + (weight * scale).clamp(-448.0, 448.0).bfloat16().float(),
}


@pytest.mark.parametrize("read", OTHER_READS.values(), ids=OTHER_READS)
def test_what_is_read_in_another_way_stays_wide(read):
    assert gathered(traced(Float8()))["weight"] == F8
    assert gathered(traced(Float8(read)))["weight"] == torch.float32


OTHER_ROWS = {
    "rows for columns": Float8Rows(of_view=lambda weight: weight),
    "columns for rows": Float8Rows(dim=1, of_view=lambda weight: weight),
    "without the dimension": Float8Rows(largest=lambda view, dim: view.abs().amax(dim)),
    "sorted": Float8Rows(largest=lambda view, dim: view.abs().amax(dim, keepdim=True).cumsum(1)),
    "signed": Float8Rows(largest=lambda view, dim: view.amax(dim, keepdim=True)),
    "with the smallest": Float8Rows(
        largest=lambda view, dim: view.abs().amax(dim, keepdim=True) + view.abs().amin(dim, keepdim=True)
    ),
    "of both": Float8Rows(
        largest=lambda view, dim: view.abs().amax(dim, keepdim=True) + view.abs().amax(1 - dim, keepdim=True).t()
    ),
}


OTHER_BLOCKS = {
    "more than a row": Float8Blocks(size=8, shape=(2,)),
    "parts of several rows": Float8Blocks(size=4, shape=(2, 2), dim=1),
    "every other element": Float8Blocks(size=2, shape=(4, 2), dim=1),
}


@pytest.mark.parametrize("module", OTHER_BLOCKS.values(), ids=OTHER_BLOCKS)
def test_what_is_no_block_of_a_row_leaves_a_weight_wide(module):
    for shape in ((8,), (4, 2), (2, 4)):
        assert gathered(traced(Float8Blocks(shape=shape)))["weight"] == F8
    assert gathered(traced(module))["weight"] == torch.float32


@pytest.mark.parametrize("module", OTHER_ROWS.values(), ids=OTHER_ROWS)
def test_scales_of_something_else_than_these_rows_leave_a_weight_wide(module):
    assert gathered(traced(Float8Rows()))["weight"] == F8
    assert gathered(traced(module))["weight"] == torch.float32


def test_maxima_of_rows_that_are_returned_leave_a_weight_wide():
    class Returned(Float8Rows):
        def forward(self, x):
            return super().forward(x), self.weight.t().abs().amax(0, keepdim=True)

    assert gathered(traced(Returned()))["weight"] == torch.float32


def test_a_shard_of_doubles_stays_wide():
    """What else is read of it would lose bits in float32."""
    assert gathered(trace(Float8().double(), rows().double(), policy=[], reshard={"": True}))["weight"] == torch.float64


def test_of_several_dtypes_that_are_scaled_one_is_gathered_in_float8():
    class Two(nn.Module):
        """The second is scaled as bfloat16."""

        def __init__(self):
            super().__init__()
            self.one, self.other = Float8(), Float8()
            self.other.trained = self.one.trained = nn.Identity()

        def forward(self, x):
            rounded = self.other.weight.bfloat16()
            scale = 448.0 / rounded.abs().max()
            narrow = (rounded.t().float() * scale).clamp(-448.0, 448.0).to(F8)
            return self.one(x) @ (narrow.float() / scale)

    assert gathered(traced(Two())) == {"one.weight": F8, "other.weight": torch.bfloat16}


@pytest.mark.parametrize("module", [Float8(), Float8Rows()])
def test_a_unit_that_keeps_a_part_for_the_backward_stays_wide(module):
    part = metadata.Part(2, "shard/2", 0)
    graphs = trace(module, rows().requires_grad_(), policy=[], world_size=4, reshard={"root": part})
    assert gathered(graphs)["weight"] == torch.float32
    assert "fsdp.part" in str(graphs.after(CommuteScales)) and "fsdp.reshard" in str(graphs.graphs.forward)


def test_what_is_not_sharded_is_left_alone():
    assert gathered(traced(Float8(), world_size=1, replicas=2))["weight"] == torch.float32
