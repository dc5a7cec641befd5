"""What is computed before communication, though it is needed behind it."""

import torch

from fsdp_compile.passes import ops
from fsdp_compile.passes.compute_early import ComputeEarly
from tests.passes.tracing import Drawing, Pictures

mm, mul, add = torch.ops.aten.mm.default, torch.ops.aten.mul.Tensor, torch.ops.aten.add.Tensor
total, copy = torch.ops.aten.sum.dim_IntList, torch.ops.aten.copy_.default


def wait(drawing):
    return drawing.call(ops.WAIT, drawing.gather(drawing.input("shard", 8), "up"))


class TestComputeEarly(Pictures):
    def test_what_a_matmul_reads_behind_a_wait_is_a_part_of_the_kernel_before(self):
        drawing = Drawing()
        x = drawing.input("x", 4, 4)
        scaled = drawing.call(mul, drawing.call(total, x, [0], True), x)
        wait(drawing)
        graph = drawing.returns(drawing.call(mm, scaled, x)).then(ComputeEarly())
        self.assertExpectedInline(
            str(graph),
            """\
forward(x: f32[4,4], up: f32[8])
  sum_dim_int_list: f32[1,4] = sum.dim_IntList(x, [0], True)
  mul_tensor: f32[4,4] = mul(sum_dim_int_list, x)
  mul_tensor.stored: f32[4,4] = fsdp.store(mul_tensor)
  up.pending: f32[16] = fsdp.all_gather(up)
  up.gathered: f32[16] = fsdp.wait(up.pending)
  mm_default: f32[4,4] = mm(mul_tensor.stored, x)
  return [mm_default]""",
        )

    def test_without_communication_between_nothing_changes(self):
        drawing = Drawing()
        x = drawing.input("x", 4, 4)
        wait(drawing)
        scaled = drawing.call(mul, drawing.call(total, x, [0], True), x)
        self.assert_left_alone(drawing.returns(drawing.call(mm, scaled, x)), ComputeEarly())

    def test_what_only_a_matmul_computes_has_no_kernel_to_join(self):
        drawing = Drawing()
        x = drawing.input("x", 4, 4)
        scaled = drawing.call(mul, drawing.call(mm, x, x), x)
        wait(drawing)
        self.assert_left_alone(drawing.returns(drawing.call(mm, scaled, x)), ComputeEarly())

    def test_what_light_operators_read_is_computed_where_they_are(self):
        drawing = Drawing()
        x = drawing.input("x", 4, 4)
        scaled = drawing.call(mul, drawing.call(total, x, [0], True), x)
        wait(drawing)
        self.assert_left_alone(drawing.returns(drawing.call(mm, drawing.call(add, scaled, x), x)), ComputeEarly())

    def test_a_buffer_is_written_when_its_value_is_there_and_the_last_one_was_read(self):
        drawing = Drawing()
        mean, x = drawing.input("mean", 4), drawing.input("x", 4, 4)
        after = drawing.call(add, mean, drawing.call(total, x, [0]))
        before = drawing.call(mul, mean, mean)
        wait(drawing)
        y = drawing.call(mm, x, x)
        drawing.call(copy, mean, after)
        graph = drawing.returns(y, mean, before).then(ComputeEarly())
        self.assertExpectedInline(
            str(graph),
            """\
forward(mean: f32[4], x: f32[4,4], up: f32[8])
  sum_dim_int_list: f32[4] = sum.dim_IntList(x, [0])
  add_tensor: f32[4] = add(mean, sum_dim_int_list)
  mul_tensor: f32[4] = mul(mean, mean)
  copy__default: f32[4] = copy_(mean, add_tensor)
  up.pending: f32[16] = fsdp.all_gather(up)
  up.gathered: f32[16] = fsdp.wait(up.pending)
  mm_default: f32[4,4] = mm(x, x)
  return [mm_default, mean, mul_tensor]""",
        )
