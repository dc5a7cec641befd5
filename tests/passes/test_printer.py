import torch
from torch import nn

from fsdp_compile.passes import ops
from fsdp_compile.passes.printer import print_graph
from tests.passes.tiny import Bfloat16Product, Chain, biased, four_layers, linear, rows, two_layers
from tests.passes.tracing import Drawing, Pictures, trace

aten = torch.ops.aten


class TestPrintGraph(Pictures):
    def test_shards_are_named_by_their_bucket_and_parameters_by_their_name_in_the_model(self):
        graphs = trace(Chain(block=Chain(up=nn.Linear(4, 8))), rows()).graphs
        self.assertExpectedInline(
            str(graphs.forward),
            """\
forward(root: f32[20], primals_2: f32[3,4])
  root.pending: f32[40] = fsdp.all_gather(root)
  root.gathered: f32[40] = fsdp.wait(root.pending)
  block.up.weight: f32[8,4] = fsdp.copy_out(root.gathered, 0)
  permute: f32[4,8] = permute(block.up.weight, [1, 0])
  block.up.bias: f32[8] = fsdp.copy_out(root.gathered, 16)
  fsdp.free(root.gathered)
  addmm: f32[3,8] = addmm(block.up.bias, primals_2, permute)
  fsdp.free(block.up.bias)
  fsdp.free(block.up.weight)
  return [addmm, primals_2]""",
        )
        self.assertExpectedInline(
            str(graphs.backward),
            """\
backward(primals_2: f32[3,4], tangents_1: f32[3,8])
  permute_1: f32[8,3] = permute(tangents_1, [1, 0])
  mm: f32[8,4] = mm(permute_1, primals_2)
  sum_1: f32[1,8] = sum.dim_IntList(tangents_1, [0], True)
  view: f32[8] = view(sum_1, [8])
  root.packed: f32[40] = fsdp.pack([mm, view], [0, 16])
  root.grad.pending: f32[20] = fsdp.reduce_scatter(root.packed)
  root.grad: f32[20] = fsdp.wait(root.grad.pending)
  return [root.grad, None]""",
        )

    def test_an_operator_without_a_value_has_no_left_side(self):
        drawing = Drawing()
        drawing.call(ops.FREE, drawing.input("full", 4))
        self.assertExpectedInline(
            str(drawing.returns()),
            """\
forward(full: f32[4])
  fsdp.free(full)
  return []""",
        )

    def test_only_aten_and_default_overloads_go_without_saying(self):
        drawing = Drawing()
        x = drawing.input("x", 4)
        cast = drawing.call(torch.ops.prims.convert_element_type.default, x, torch.float16)
        power = drawing.call(aten.pow.Tensor_Scalar, cast, 2)
        total = drawing.call(aten.sum.dim_IntList, power, [0], True)
        self.assertExpectedInline(
            str(drawing.returns(total, None)),
            """\
forward(x: f32[4])
  convert_element_type_default: f16[4] = prims.convert_element_type(x, f16)
  pow_tensor_scalar: f16[4] = pow.Tensor_Scalar(convert_element_type_default, 2)
  sum_dim_int_list: f16[1] = sum.dim_IntList(pow_tensor_scalar, [0], True)
  return [sum_dim_int_list, None]""",
        )

    def test_dtypes_have_short_names(self):
        drawing = Drawing()
        x = drawing.input("x", 2)
        for name in ("float64", "float16", "bfloat16", "int64", "int8", "uint8", "bool", "float8_e4m3fn"):
            drawing.call(torch.ops.prims.convert_element_type.default, x, getattr(torch, name))
        self.assertExpectedInline(
            str(drawing.returns()),
            """\
forward(x: f32[2])
  convert_element_type_default: f64[2] = prims.convert_element_type(x, f64)
  convert_element_type_default_1: f16[2] = prims.convert_element_type(x, f16)
  convert_element_type_default_2: bf16[2] = prims.convert_element_type(x, bf16)
  convert_element_type_default_3: i64[2] = prims.convert_element_type(x, i64)
  convert_element_type_default_4: i8[2] = prims.convert_element_type(x, i8)
  convert_element_type_default_5: u8[2] = prims.convert_element_type(x, u8)
  convert_element_type_default_6: b8[2] = prims.convert_element_type(x, b8)
  convert_element_type_default_7: float8_e4m3fn[2] = prims.convert_element_type(x, float8_e4m3fn)
  return []""",
        )

    def test_a_name_that_is_taken_gets_a_number(self):
        drawing = Drawing()
        shard = drawing.input("shard", 8)
        for _ in range(3):
            drawing.call(ops.WAIT, drawing.gather(shard, "up"))
        self.assertExpectedInline(
            str(drawing.returns()),
            """\
forward(up: f32[8])
  up.pending: f32[16] = fsdp.all_gather(up)
  up.gathered: f32[16] = fsdp.wait(up.pending)
  up.pending#2: f32[16] = fsdp.all_gather(up)
  up.gathered#2: f32[16] = fsdp.wait(up.pending#2)
  up.pending#3: f32[16] = fsdp.all_gather(up)
  up.gathered#3: f32[16] = fsdp.wait(up.pending#3)
  return []""",
        )

    def test_keyword_arguments_and_lists(self):
        drawing = Drawing()
        x = drawing.input("x", 4)
        full = drawing.graph.call_function(aten.full.default, ([4], 0), {"dtype": torch.int8, "pin_memory": None})
        joined = drawing.call(aten.cat.default, [x, x])
        self.assertExpectedInline(
            str(drawing.returns(joined, full)),
            """\
forward(x: f32[4])
  full_default = full([4], 0, dtype=i8, pin_memory=None)
  cat_default: f32[8] = cat([x, x])
  return [cat_default, full_default]""",
        )

    def test_sizes_of_a_dynamic_batch_are_symbols(self):
        x = rows()
        torch._dynamo.mark_dynamic(x, 0)
        self.assertExpectedInline(
            str(trace(Chain(up=nn.Linear(4, 8)), x).graphs.forward),
            """\
forward(root: f32[20], primals_2, primals_3: f32[s33,4])
  root.pending: f32[40] = fsdp.all_gather(root)
  root.gathered: f32[40] = fsdp.wait(root.pending)
  up.weight: f32[8,4] = fsdp.copy_out(root.gathered, 0)
  permute: f32[4,8] = permute(up.weight, [1, 0])
  up.bias: f32[8] = fsdp.copy_out(root.gathered, 16)
  fsdp.free(root.gathered)
  addmm: f32[s33,8] = addmm(up.bias, primals_3, permute)
  fsdp.free(up.bias)
  fsdp.free(up.weight)
  return [addmm, primals_3, primals_2]""",
        )

    def test_the_title_says_which_graph_it_is(self):
        drawing = Drawing()
        self.assertEqual(
            print_graph(drawing.returns(drawing.input("x", 2)).gm, "joint").splitlines()[0], "joint(x: f32[2])"
        )


class TestPrintSchedule(Pictures):
    def test_compute_is_on_the_left_communication_on_the_right_full_bytes_at_the_margin(self):
        self.assertExpectedInline(
            trace(biased(), rows()).graphs.schedule(),
            """\
forward
                            all_gather up                           160
                            all_gather down                         256
                            wait up.gathered                        256
  copy_out up.weight                                                384
  copy_out up.bias                                                  416
                            free up.gathered                        256
  addmm                                                             256
                            free up.bias                            224
                            free up.weight                          96
                            wait down.gathered                      96
  copy_out down.weight                                              160
  copy_out down.bias                                                168
                            free down.gathered                      72
  addmm                                                             72
                            free down.bias                          64
backward
  mm                                                                64
                            free down.weight                        0
  mm                                                                0
  sum.dim_IntList                                                   0
  pack down.packed                                                  96
                            reduce_scatter down                     96
  mm                                                                96
  sum.dim_IntList                                                   96
                            wait down.grad                          0
  pack up.packed                                                    160
                            reduce_scatter up                       160
                            wait up.grad                            0""",
        )

    def test_what_is_kept_is_alive_at_the_end_of_the_forward_and_at_the_top_of_the_backward(self):
        graphs = trace(four_layers(), rows(), reshard={"second": False, "fourth": True}).graphs
        self.assertExpectedInline(
            graphs.schedule(),
            """\
forward
                            all_gather first                        64
                            all_gather second                       128
                            wait first.gathered                     128
  mm                                                                128
                            free first.gathered                     64
                            all_gather third                        128
                            wait second.gathered                    128
  mm                                                                128
                            all_gather fourth                       192
                            wait third.gathered                     192
  mm                                                                192
                            free third.gathered                     128
                            wait fourth.gathered                    128
  mm                                                                128
                            free fourth.gathered                    64
backward
                            all_gather fourth                       128
  mm                                                                128
  pack fourth.packed                                                192
                            reduce_scatter fourth                   192
                            all_gather third                        256
                            wait fourth.gathered                    256
  mm                                                                256
                            free fourth.gathered                    192
  mm                                                                192
                            wait fourth.grad                        128
  pack third.packed                                                 192
                            reduce_scatter third                    192
                            wait third.gathered                     192
  mm                                                                192
                            free third.gathered                     128
  mm                                                                128
                            wait third.grad                         64
  pack second.packed                                                128
                            reduce_scatter second                   128
  mm                                                                128
                            free second.weight                      64
  mm                                                                64
                            wait second.grad                        0
  pack first.packed                                                 64
                            reduce_scatter first                    64
                            wait first.grad                         0""",
        )

    def test_bytes_count_the_dtype(self):
        self.assertExpectedInline(
            trace(Chain(up=Bfloat16Product()), rows().bfloat16()).graphs.schedule(),
            """\
forward
  cast                                                              0
                            all_gather root                         32
                            wait root.gathered                      32
  mm                                                                32
                            free root.gathered                      0
backward
  mm                                                                0
  prims.convert_element_type                                        0
  pack root.packed                                                  64
                            reduce_scatter root                     64
                            wait root.grad                          0""",
        )

    def test_a_long_name_stands_apart_from_the_bytes(self):
        model = Chain(up=linear(4, 8), down_in_the_encoder_of_the_model=linear(8, 2))
        self.assertExpectedInline(
            trace(model, rows()).graphs.forward.schedule(),
            """\
forward
                            all_gather up                           128
                            all_gather down_in_the_encoder_of_the_model 192
                            wait up.gathered                        192
  mm                                                                192
                            free up.gathered                        64
                            wait down_in_the_encoder_of_the_model.gathered 64
  mm                                                                64""",
        )

    def test_the_grouped_form_holds_a_unit_once(self):
        self.assertExpectedInline(
            trace(two_layers(), rows(), grouped=True).graphs.forward.schedule(),
            """\
forward
                            all_gather_grouped up                   128
                            all_gather_grouped down                 192
                            wait up.gathered                        192
  mm                                                                192
                            free up.gathered                        64
                            wait down.gathered                      64
  mm                                                                64""",
        )
