from fsdp_compile.passes.merge_unshards import MergeUnshards
from tests.passes.tiny import CalledTwice, ScaleAndShift, biased, rows, tied
from tests.passes.tracing import Pictures, trace


class TestMergeUnshards(Pictures):
    def test_a_parameter_that_is_read_twice_is_unsharded_once(self):
        graphs = trace(ScaleAndShift(), rows())
        self.assertExpectedInline(
            str(graphs.before(MergeUnshards, "joint")),
            """\
joint(root: f32[4], primals_2: f32[3,4], tangents_1: f32[3,4])
  weight: f32[4] = fsdp.unshard(root, 0)
  mul: f32[3,4] = mul(primals_2, weight)
  weight#2: f32[4] = fsdp.unshard(root, 0)
  add: f32[3,4] = add(mul, weight#2)
  sum_1: f32[1,4] = sum.dim_IntList(tangents_1, [0], True)
  view: f32[4] = view(sum_1, [4])
  root.grad: f32[4] = fsdp.reduce_gradient([view], [0])
  mul_1: f32[3,4] = mul(tangents_1, primals_2)
  sum_2: f32[1,4] = sum.dim_IntList(mul_1, [0], True)
  view_1: f32[4] = view(sum_2, [4])
  root.grad#2: f32[4] = fsdp.reduce_gradient([view_1], [0])
  add_1: f32[4] = add(root.grad, root.grad#2)
  return [add, add_1, None]""",
        )
        self.assertExpectedInline(
            str(graphs.after(MergeUnshards, "joint")),
            """\
joint(root: f32[4], primals_2: f32[3,4], tangents_1: f32[3,4])
  weight: f32[4] = fsdp.unshard(root, 0)
  mul: f32[3,4] = mul(primals_2, weight)
  add: f32[3,4] = add(mul, weight)
  sum_1: f32[1,4] = sum.dim_IntList(tangents_1, [0], True)
  view: f32[4] = view(sum_1, [4])
  root.grad: f32[4] = fsdp.reduce_gradient([view], [0])
  mul_1: f32[3,4] = mul(tangents_1, primals_2)
  sum_2: f32[1,4] = sum.dim_IntList(mul_1, [0], True)
  view_1: f32[4] = view(sum_2, [4])
  root.grad#2: f32[4] = fsdp.reduce_gradient([view_1], [0])
  add_1: f32[4] = add(root.grad, root.grad#2)
  return [add, add_1, None]""",
        )

    def test_a_module_that_is_called_twice_is_unsharded_once(self):
        graph = trace(CalledTwice(), rows()).after(MergeUnshards, "joint")
        self.assertExpectedInline(
            str(graph),
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
  root.grad: f32[8] = fsdp.reduce_gradient([mm_2], [0])
  permute_6: f32[4,3] = permute(mm_3, [1, 0])
  mm_4: f32[4,4] = mm(permute_6, primals_2)
  root.grad#2: f32[8] = fsdp.reduce_gradient([mm_4], [0])
  add: f32[8] = add(root.grad, root.grad#2)
  return [mm_1, add, None]""",
        )

    def test_a_tied_weight_is_one_parameter_under_its_first_name(self):
        graph = trace(tied(), rows()).after(MergeUnshards, "joint")
        self.assertExpectedInline(
            str(graph),
            """\
joint(encode: f32[8], primals_2: f32[3,4], mix: f32[8], tangents_1: f32[3,4])
  encode.weight: f32[4,4] = fsdp.unshard(encode, 0)
  permute: f32[4,4] = permute(encode.weight, [1, 0])
  mm: f32[3,4] = mm(primals_2, permute)
  mix.weight: f32[4,4] = fsdp.unshard(mix, 0)
  permute_1: f32[4,4] = permute(mix.weight, [1, 0])
  mm_1: f32[3,4] = mm(mm, permute_1)
  permute_2: f32[4,4] = permute(encode.weight, [1, 0])
  mm_2: f32[3,4] = mm(mm_1, permute_2)
  permute_3: f32[4,3] = permute(tangents_1, [1, 0])
  mm_3: f32[4,4] = mm(permute_3, mm_1)
  permute_5: f32[4,4] = permute(permute_2, [1, 0])
  mm_4: f32[3,4] = mm(tangents_1, permute_5)
  encode.grad: f32[8] = fsdp.reduce_gradient([mm_3], [0])
  permute_7: f32[4,3] = permute(mm_4, [1, 0])
  mm_5: f32[4,4] = mm(permute_7, mm)
  permute_9: f32[4,4] = permute(permute_1, [1, 0])
  mm_6: f32[3,4] = mm(mm_4, permute_9)
  mix.grad: f32[8] = fsdp.reduce_gradient([mm_5], [0])
  permute_11: f32[4,3] = permute(mm_6, [1, 0])
  mm_7: f32[4,4] = mm(permute_11, primals_2)
  encode.grad#2: f32[8] = fsdp.reduce_gradient([mm_7], [0])
  add: f32[8] = add(encode.grad, encode.grad#2)
  return [mm_2, add, None, mix.grad]""",
        )

    def test_two_parameters_of_a_shard_are_two(self):
        graphs = trace(biased(), rows())
        self.assertEqual(str(graphs.after(MergeUnshards, "joint")), str(graphs.before(MergeUnshards, "joint")))

    def test_a_second_run_changes_nothing(self):
        self.assert_left_alone(trace(ScaleAndShift(), rows()).after(MergeUnshards, "joint"), MergeUnshards())
