import torch
from torch import nn
from torch.nn import functional as F

from fsdp_compile.passes.merge_all_reduces import MergeAllReduces
from tests.passes.tiny import rows
from tests.passes.tracing import Pictures, trace

_c10d = torch.ops._c10d_functional


class SummedUp(torch.autograd.Function):
    """What DTensor makes of a parameter that every rank uses on a part of the rows."""

    @staticmethod
    def forward(ctx, parameter, group):
        ctx.group = group
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx, gradient):
        return _c10d.wait_tensor(_c10d.all_reduce(gradient, "sum", ctx.group)), None


class Replicated(nn.Module):
    """Linear; `groups` are those that sum up the gradients of its weight and of its bias, if any do."""

    def __init__(self, *groups):
        super().__init__()
        self.up, self.groups = nn.Linear(4, 8), groups

    def forward(self, x):
        weight, bias = (
            SummedUp.apply(parameter, group) if group else parameter
            for parameter, group in zip(self.up.parameters(), self.groups, strict=True)
        )
        return F.linear(x, weight, bias)


class TestMergeAllReduces(Pictures):
    def test_gradients_of_a_bucket_are_summed_up_in_one_message(self):
        graphs = trace(Replicated("tp", "tp"), rows())
        self.assertExpectedInline(
            str(graphs.before(MergeAllReduces, "joint")),
            """\
joint(root: f32[20], primals_2: f32[3,4], tangents_1: f32[3,8])
  up.weight: f32[8,4] = fsdp.unshard(root, 0)
  up.bias: f32[8] = fsdp.unshard(root, 16)
  permute: f32[4,8] = permute(up.weight, [1, 0])
  addmm: f32[3,8] = addmm(up.bias, primals_2, permute)
  permute_1: f32[8,3] = permute(tangents_1, [1, 0])
  mm: f32[8,4] = mm(permute_1, primals_2)
  sum_1: f32[1,8] = sum.dim_IntList(tangents_1, [0], True)
  view_2: f32[8] = view(sum_1, [8])
  all_reduce: f32[8] = _c10d_functional.all_reduce(view_2, sum, tp)
  wait_tensor: f32[8] = _c10d_functional.wait_tensor(all_reduce)
  all_reduce_1: f32[8,4] = _c10d_functional.all_reduce(mm, sum, tp)
  wait_tensor_1: f32[8,4] = _c10d_functional.wait_tensor(all_reduce_1)
  root.grad: f32[20] = fsdp.reduce_gradient([wait_tensor_1, wait_tensor], [0, 16])
  return [addmm, root.grad, None]""",
        )
        self.assertExpectedInline(
            str(graphs.after(MergeAllReduces, "joint")),
            """\
joint(root: f32[20], primals_2: f32[3,4], tangents_1: f32[3,8])
  up.weight: f32[8,4] = fsdp.unshard(root, 0)
  up.bias: f32[8] = fsdp.unshard(root, 16)
  permute: f32[4,8] = permute(up.weight, [1, 0])
  addmm: f32[3,8] = addmm(up.bias, primals_2, permute)
  permute_1: f32[8,3] = permute(tangents_1, [1, 0])
  mm: f32[8,4] = mm(permute_1, primals_2)
  sum_1: f32[1,8] = sum.dim_IntList(tangents_1, [0], True)
  view_2: f32[8] = view(sum_1, [8])
  reshape_default: f32[8] = reshape(view_2, [-1])
  reshape_default_1: f32[32] = reshape(mm, [-1])
  cat_default: f32[40] = cat([reshape_default, reshape_default_1])
  all_reduce_default: f32[40] = _c10d_functional.all_reduce(cat_default, sum, tp)
  wait_tensor_default: f32[40] = _c10d_functional.wait_tensor(all_reduce_default)
  slice_tensor: f32[8] = slice(wait_tensor_default, 0, 0, 8)
  view_default: f32[8] = view(slice_tensor, [8])
  slice_tensor_1: f32[32] = slice(wait_tensor_default, 0, 8, 40)
  view_default_1: f32[8,4] = view(slice_tensor_1, [8, 4])
  root.grad: f32[20] = fsdp.reduce_gradient([view_default_1, view_default], [0, 16])
  return [addmm, root.grad, None]""",
        )

    def test_what_one_message_cannot_carry_is_left_alone(self):
        for groups in (("tp", ""), ("tp", "cp"), ("", "")):
            graphs = trace(Replicated(*groups), rows())
            with self.subTest(groups=groups):
                self.assertEqual(
                    str(graphs.before(MergeAllReduces, "joint")), str(graphs.after(MergeAllReduces, "joint"))
                )
