from torch import nn

from fsdp_compile.passes.insert_all_gather import InsertAllGather
from fsdp_compile.passes.lower_collectives import LowerCollectives
from fsdp_compile.passes.plan import Gather, StepPlan
from tests.passes.tiny import (
    Adapted,
    Checkpointed,
    Tempered,
    biased,
    linear,
    rows,
    tied,
    two_products,
)
from tests.passes.tracing import Pictures, trace


class TestInsertAllGather(Pictures):
    def test_a_unit_is_gathered_once_and_each_parameter_copied_out_where_it_is_used(self):
        graphs = trace(biased(), rows())
        self.assertExpectedInline(
            str(graphs.before(InsertAllGather)),
            """\
forward(up: f32[20], primals_2: f32[3,4], down: f32[12])
  up.weight: f32[8,4] = fsdp.unshard(up, 0)
  up.bias: f32[8] = fsdp.unshard(up, 16)
  down.weight: f32[2,8] = fsdp.unshard(down, 0)
  down.bias: f32[2] = fsdp.unshard(down, 8)
  permute: f32[4,8] = permute(up.weight, [1, 0])
  addmm: f32[3,8] = addmm(up.bias, primals_2, permute)
  permute_1: f32[8,2] = permute(down.weight, [1, 0])
  addmm_1: f32[3,2] = addmm(down.bias, addmm, permute_1)
  return [addmm_1, down.weight, primals_2, addmm]""",
        )
        self.assertExpectedInline(
            str(graphs.after(InsertAllGather)),
            """\
forward(up: f32[20], primals_2: f32[3,4], down: f32[12])
  up.pending: f32[40] = fsdp.all_gather(up)
  up.gathered: f32[40] = fsdp.wait(up.pending)
  up.weight: f32[8,4] = fsdp.copy_out(up.gathered, 0)
  permute: f32[4,8] = permute(up.weight, [1, 0])
  up.bias: f32[8] = fsdp.copy_out(up.gathered, 16)
  addmm: f32[3,8] = addmm(up.bias, primals_2, permute)
  down.pending: f32[24] = fsdp.all_gather(down)
  down.gathered: f32[24] = fsdp.wait(down.pending)
  down.weight: f32[2,8] = fsdp.copy_out(down.gathered, 0)
  permute_1: f32[8,2] = permute(down.weight, [1, 0])
  down.bias: f32[2] = fsdp.copy_out(down.gathered, 8)
  addmm_1: f32[3,2] = addmm(down.bias, addmm, permute_1)
  return [addmm_1, down.weight, primals_2, addmm]""",
        )

    def test_a_plan_has_units_gathered_at_once(self):
        plan = StepPlan((), (Gather(("up", "down"), is_grouped=False, start=None),), (), 1)
        graph = trace(biased(), rows(), plan=plan).after(InsertAllGather)
        self.assertExpectedInline(
            str(graph),
            """\
forward(up: f32[20], primals_2: f32[3,4], down: f32[12])
  up,down.joined: f32[32] = fsdp.join([up, down])
  up,down.pending: f32[64] = fsdp.all_gather(up,down.joined)
  up,down.gathered: f32[64] = fsdp.wait(up,down.pending)
  up.weight: f32[8,4] = fsdp.copy_out(up,down.gathered, 0)
  permute: f32[4,8] = permute(up.weight, [1, 0])
  up.bias: f32[8] = fsdp.copy_out(up,down.gathered, 16)
  addmm: f32[3,8] = addmm(up.bias, primals_2, permute)
  down.weight: f32[2,8] = fsdp.copy_out(up,down.gathered, 20)
  permute_1: f32[8,2] = permute(down.weight, [1, 0])
  down.bias: f32[2] = fsdp.copy_out(up,down.gathered, 28)
  addmm_1: f32[3,2] = addmm(down.bias, addmm, permute_1)
  return [addmm_1, down.weight, primals_2, addmm]""",
        )

    def test_a_plan_selects_the_form_of_every_gather(self):
        plan = StepPlan((), (Gather(("up", "down"), is_grouped=True, start=None),), (), 1)
        graphs = trace(biased(), rows(), plan=plan)
        self.assertExpectedInline(
            str(graphs.after(InsertAllGather)),
            """\
forward(up: f32[20], primals_2: f32[3,4], down: f32[12])
  up,down.pending: f32[64] = fsdp.all_gather_grouped([up, down])
  up,down.gathered: f32[64] = fsdp.wait(up,down.pending)
  up.weight: f32[8,4] = fsdp.view_out(up,down.gathered, 0)
  permute: f32[4,8] = permute(up.weight, [1, 0])
  up.bias: f32[8] = fsdp.view_out(up,down.gathered, 16)
  addmm: f32[3,8] = addmm(up.bias, primals_2, permute)
  down.weight: f32[2,8] = fsdp.view_out(up,down.gathered, 20)
  permute_1: f32[8,2] = permute(down.weight, [1, 0])
  down.bias: f32[2] = fsdp.view_out(up,down.gathered, 28)
  addmm_1: f32[3,2] = addmm(down.bias, addmm, permute_1)
  return [addmm_1, down.weight, primals_2, addmm]""",
        )
        # The backward, which the plan does not name, gathers as it would without.
        without = trace(biased(), rows()).after(InsertAllGather, "backward")
        self.assertEqual(str(graphs.after(InsertAllGather, "backward")), str(without))
        self.assertExpectedInline(
            str(graphs.after(LowerCollectives)),
            """\
forward(primals_1: f32[20], primals_2: f32[3,4], primals_3: f32[12])
  slice_tensor: f32[16] = slice(primals_1, 0, 0, 16)
  slice_tensor_1: f32[4] = slice(primals_1, 0, 16, 20)
  slice_tensor_2: f32[8] = slice(primals_3, 0, 0, 8)
  slice_tensor_3: f32[1] = slice(primals_3, 0, 8, 9)
  all_gather_into_tensor_coalesced_default = _c10d_functional.all_gather_into_tensor_coalesced([slice_tensor, slice_tensor_1, slice_tensor_2, slice_tensor_3], 2, shard)
  getitem: f32[32] = getitem(all_gather_into_tensor_coalesced_default, 0)
  getitem_1: f32[8] = getitem(all_gather_into_tensor_coalesced_default, 1)
  getitem_2: f32[16] = getitem(all_gather_into_tensor_coalesced_default, 2)
  getitem_3: f32[2] = getitem(all_gather_into_tensor_coalesced_default, 3)
  wait_tensor_default: f32[32] = _c10d_functional.wait_tensor(getitem)
  wait_tensor_default_1: f32[8] = _c10d_functional.wait_tensor(getitem_1)
  wait_tensor_default_2: f32[16] = _c10d_functional.wait_tensor(getitem_2)
  wait_tensor_default_3: f32[2] = _c10d_functional.wait_tensor(getitem_3)
  view_default: f32[8,4] = view(wait_tensor_default, [8, 4])
  permute: f32[4,8] = permute(view_default, [1, 0])
  view_default_1: f32[8] = view(wait_tensor_default_1, [8])
  addmm: f32[3,8] = addmm(view_default_1, primals_2, permute)
  view_default_2: f32[2,8] = view(wait_tensor_default_2, [2, 8])
  permute_1: f32[8,2] = permute(view_default_2, [1, 0])
  view_default_3: f32[2] = view(wait_tensor_default_3, [2])
  addmm_1: f32[3,2] = addmm(view_default_3, addmm, permute_1)
  return [addmm_1, view_default_2, primals_2, addmm]""",  # noqa: E501
        )

    def test_the_backward_computes_what_follows_from_a_weight_only_where_it_is_needed(self):
        graphs = trace(two_products(), rows().bfloat16().requires_grad_(), reshard={"top": True})
        self.assertExpectedInline(
            str(graphs.after(InsertAllGather, "backward")),
            """\
backward(top: f32[8], low: f32[8], permute: bf16[4,3], permute_2: bf16[4,3], tangents_1: bf16[3,4])
  mm_2: bf16[4,4] = mm(permute, tangents_1)
  top.pending: f32[16] = fsdp.all_gather(top)
  top.gathered: f32[16] = fsdp.wait(top.pending)
  top.weight: f32[4,4] = fsdp.view_out(top.gathered, 0)
  mul_1: f32[4,4] = mul(top.weight, 2)
  convert_element_type_3: bf16[4,4] = prims.convert_element_type(mul_1, bf16)
  permute_4: bf16[4,4] = permute(convert_element_type_3, [1, 0])
  mm_3: bf16[3,4] = mm(tangents_1, permute_4)
  convert_element_type_10: f32[4,4] = prims.convert_element_type(mm_2, f32)
  mul_2: f32[4,4] = mul(convert_element_type_10, 2)
  top.packed: f32[16] = fsdp.pack([mul_2], [0])
  top.grad.pending: f32[8] = fsdp.reduce_scatter(top.packed)
  top.grad: f32[8] = fsdp.wait(top.grad.pending)
  mm_4: bf16[4,4] = mm(permute_2, mm_3)
  low.pending: f32[16] = fsdp.all_gather(low)
  low.gathered: f32[16] = fsdp.wait(low.pending)
  low.weight: f32[4,4] = fsdp.view_out(low.gathered, 0)
  mul: f32[4,4] = mul(low.weight, 2)
  convert_element_type: bf16[4,4] = prims.convert_element_type(mul, bf16)
  permute_5: bf16[4,4] = permute(convert_element_type, [1, 0])
  mm_5: bf16[3,4] = mm(mm_3, permute_5)
  convert_element_type_15: f32[4,4] = prims.convert_element_type(mm_4, f32)
  mul_3: f32[4,4] = mul(convert_element_type_15, 2)
  low.packed: f32[16] = fsdp.pack([mul_3], [0])
  low.grad.pending: f32[8] = fsdp.reduce_scatter(low.packed)
  low.grad: f32[8] = fsdp.wait(low.grad.pending)
  return [low.grad, mm_5, top.grad]""",
        )

    def test_frozen_and_trained_parameters_of_a_unit_are_gathered_apart(self):
        graph = trace(Adapted(), rows()).after(InsertAllGather)
        self.assertExpectedInline(
            str(graph),
            """\
forward(root/bfloat16.frozen: bf16[8], primals_2: f32[3,4], root/float32: f32[8])
  root/bfloat16.frozen.pending: bf16[16] = fsdp.all_gather(root/bfloat16.frozen)
  root/bfloat16.frozen.gathered: bf16[16] = fsdp.wait(root/bfloat16.frozen.pending)
  frozen: bf16[4,4] = fsdp.view_out(root/bfloat16.frozen.gathered, 0)
  convert_element_type: f32[4,4] = prims.convert_element_type(frozen, f32)
  mm: f32[3,4] = mm(primals_2, convert_element_type)
  root/float32.pending: f32[16] = fsdp.all_gather(root/float32)
  root/float32.gathered: f32[16] = fsdp.wait(root/float32.pending)
  trained: f32[4,4] = fsdp.view_out(root/float32.gathered, 0)
  mm_1: f32[3,4] = mm(primals_2, trained)
  add: f32[3,4] = add(mm, mm_1)
  permute: f32[4,3] = permute(primals_2, [1, 0])
  return [add, permute]""",
        )

    def test_a_tied_weight_is_gathered_once(self):
        graph = trace(tied(), rows()).after(InsertAllGather)
        self.assertExpectedInline(
            str(graph),
            """\
forward(encode: f32[8], primals_2: f32[3,4], mix: f32[8])
  encode.pending: f32[16] = fsdp.all_gather(encode)
  encode.gathered: f32[16] = fsdp.wait(encode.pending)
  encode.weight: f32[4,4] = fsdp.view_out(encode.gathered, 0)
  permute: f32[4,4] = permute(encode.weight, [1, 0])
  mm: f32[3,4] = mm(primals_2, permute)
  mix.pending: f32[16] = fsdp.all_gather(mix)
  mix.gathered: f32[16] = fsdp.wait(mix.pending)
  mix.weight: f32[4,4] = fsdp.view_out(mix.gathered, 0)
  permute_1: f32[4,4] = permute(mix.weight, [1, 0])
  mm_1: f32[3,4] = mm(mm, permute_1)
  mm_2: f32[3,4] = mm(mm_1, permute)
  return [mm_2, encode.weight, mix, primals_2, mm, mm_1]""",
        )

    def test_a_unit_that_is_computed_again_is_gathered_once_for_all_of_the_backward(self):
        graph = trace(Checkpointed(first=linear(4, 4), second=linear(4, 4)), rows()).after(InsertAllGather, "backward")
        self.assertExpectedInline(
            str(graph),
            """\
backward(first: f32[8], second.weight: f32[4,4], primals_1: f32[3,4], sin: f32[3,4], tangents_1: f32[3,4])
  permute_1: f32[4,4] = permute(second.weight, [1, 0])
  mm_1: f32[3,4] = mm(sin, permute_1)
  cos: f32[3,4] = cos(mm_1)
  mul: f32[3,4] = mul(tangents_1, cos)
  permute_2: f32[4,3] = permute(mul, [1, 0])
  mm_2: f32[4,4] = mm(permute_2, sin)
  second.packed: f32[16] = fsdp.pack([mm_2], [0])
  second.grad.pending: f32[8] = fsdp.reduce_scatter(second.packed)
  second.grad: f32[8] = fsdp.wait(second.grad.pending)
  permute_4: f32[4,4] = permute(permute_1, [1, 0])
  mm_3: f32[3,4] = mm(mul, permute_4)
  first.pending: f32[16] = fsdp.all_gather(first)
  first.gathered: f32[16] = fsdp.wait(first.pending)
  first.weight: f32[4,4] = fsdp.view_out(first.gathered, 0)
  permute: f32[4,4] = permute(first.weight, [1, 0])
  mm: f32[3,4] = mm(primals_1, permute)
  cos_1: f32[3,4] = cos(mm)
  mul_1: f32[3,4] = mul(mm_3, cos_1)
  permute_6: f32[4,3] = permute(mul_1, [1, 0])
  mm_4: f32[4,4] = mm(permute_6, primals_1)
  first.packed: f32[16] = fsdp.pack([mm_4], [0])
  first.grad.pending: f32[8] = fsdp.reduce_scatter(first.packed)
  first.grad: f32[8] = fsdp.wait(first.grad.pending)
  return [None, first.grad, second.grad]""",
        )

    def test_0_d_parameters_are_whole_on_every_rank_and_need_no_gather(self):
        graph = trace(Tempered(), rows()).after(InsertAllGather)
        self.assertExpectedInline(
            str(graph),
            """\
forward(mix: f32[8], primals_2: f32[3,4], temperature.shard: f32[4])
  mix.pending: f32[16] = fsdp.all_gather(mix)
  mix.gathered: f32[16] = fsdp.wait(mix.pending)
  mix.weight: f32[4,4] = fsdp.view_out(mix.gathered, 0)
  permute: f32[4,4] = permute(mix.weight, [1, 0])
  mm: f32[3,4] = mm(primals_2, permute)
  temperature: f32[] = fsdp.view_out(temperature.shard, 0)
  mul: f32[3,4] = mul(mm, temperature)
  return [mul, temperature.shard, primals_2, mm]""",
        )

    def test_a_graph_that_reads_no_shard_is_left_alone(self):
        graph = trace(nn.Sequential(nn.Tanh()), rows().requires_grad_()).before(InsertAllGather)
        self.assert_left_alone(graph, InsertAllGather())

    def test_a_second_run_changes_nothing(self):
        for grouped in (False, True):
            for name in ("forward", "backward"):
                graphs = trace(biased(), rows(), grouped=grouped, reshard={"down": True})
                self.assert_left_alone(graphs.after(InsertAllGather, name), InsertAllGather(grouped))
