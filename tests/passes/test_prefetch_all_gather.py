import torch
from torch import nn

from fsdp_compile.passes import ops
from fsdp_compile.passes.errors import PassError
from fsdp_compile.passes.plan import Gather, StepPlan
from fsdp_compile.passes.prefetch_all_gather import PrefetchAllGather
from tests.passes.tiny import Adapted, Chain, four_layers, rows, three_layers
from tests.passes.tracing import Drawing, Pictures, trace


class Masked(nn.Module):
    """One unit with two buckets, which one kernel reads."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(4, dtype=torch.bfloat16), requires_grad=False)
        self.trained = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.frozen.float() * self.trained


class TestPrefetchAllGather(Pictures):
    def test_a_gather_starts_one_unit_ahead(self):
        graphs = trace(three_layers(), rows())
        self.assertExpectedInline(
            str(graphs.after(PrefetchAllGather)),
            """\
forward(low: f32[8], primals_2: f32[3,4], mid: f32[8], top: f32[8])
  low.pending: f32[16] = fsdp.all_gather(low)
  mid.pending: f32[16] = fsdp.all_gather(mid)
  low.gathered: f32[16] = fsdp.wait(low.pending)
  low.weight: f32[4,4] = fsdp.view_out(low.gathered, 0)
  permute: f32[4,4] = permute(low.weight, [1, 0])
  mm: f32[3,4] = mm(primals_2, permute)
  fsdp.free(low.gathered)
  top.pending: f32[16] = fsdp.all_gather(top)
  mid.gathered: f32[16] = fsdp.wait(mid.pending)
  mid.weight: f32[4,4] = fsdp.view_out(mid.gathered, 0)
  permute_1: f32[4,4] = permute(mid.weight, [1, 0])
  mm_1: f32[3,4] = mm(mm, permute_1)
  fsdp.free(mid.gathered)
  top.gathered: f32[16] = fsdp.wait(top.pending)
  top.weight: f32[4,4] = fsdp.view_out(top.gathered, 0)
  permute_2: f32[4,4] = permute(top.weight, [1, 0])
  mm_2: f32[3,4] = mm(mm_1, permute_2)
  return [mm_2, mid, top.weight, primals_2, mm, mm_1]""",
        )

    def test_a_plan_says_before_which_parameter_a_gather_starts(self):
        gathers = [
            Gather(("low",), False, None),
            Gather(("mid",), False, "mid.weight"),
            Gather(("top",), False, "mid.weight"),
        ]
        graph = trace(three_layers(), rows(), plan=StepPlan((), tuple(gathers), (), 1)).after(PrefetchAllGather)
        self.assertExpectedInline(
            str(graph),
            """\
forward(low: f32[8], primals_2: f32[3,4], mid: f32[8], top: f32[8])
  low.pending: f32[16] = fsdp.all_gather(low)
  low.gathered: f32[16] = fsdp.wait(low.pending)
  low.weight: f32[4,4] = fsdp.view_out(low.gathered, 0)
  permute: f32[4,4] = permute(low.weight, [1, 0])
  mm: f32[3,4] = mm(primals_2, permute)
  fsdp.free(low.gathered)
  mid.pending: f32[16] = fsdp.all_gather(mid)
  top.pending: f32[16] = fsdp.all_gather(top)
  mid.gathered: f32[16] = fsdp.wait(mid.pending)
  mid.weight: f32[4,4] = fsdp.view_out(mid.gathered, 0)
  permute_1: f32[4,4] = permute(mid.weight, [1, 0])
  mm_1: f32[3,4] = mm(mm, permute_1)
  fsdp.free(mid.gathered)
  top.gathered: f32[16] = fsdp.wait(top.pending)
  top.weight: f32[4,4] = fsdp.view_out(top.gathered, 0)
  permute_2: f32[4,4] = permute(top.weight, [1, 0])
  mm_2: f32[3,4] = mm(mm_1, permute_2)
  return [mm_2, mid, top.weight, primals_2, mm, mm_1]""",
        )

    def test_two_gathers_for_one_kernel_start_before_the_waits_for_both(self):
        gathers = [Gather((f"root/{kind}",), False, "frozen") for kind in ("bfloat16.frozen", "float32")]
        graph = trace(Masked(), rows(), plan=StepPlan((), tuple(gathers), (), 1)).after(PrefetchAllGather)
        self.assertExpectedInline(
            str(graph),
            """\
forward(root/bfloat16.frozen: bf16[8], primals_2: f32[3,4], root/float32: f32[4])
  root/bfloat16.frozen.pending: bf16[16] = fsdp.all_gather(root/bfloat16.frozen)
  root/float32.pending: f32[8] = fsdp.all_gather(root/float32)
  root/bfloat16.frozen.gathered: bf16[16] = fsdp.wait(root/bfloat16.frozen.pending)
  root/float32.gathered: f32[8] = fsdp.wait(root/float32.pending)
  frozen: bf16[4] = fsdp.copy_out(root/bfloat16.frozen.gathered, 0)
  fsdp.free(root/bfloat16.frozen.gathered)
  convert_element_type: f32[4] = prims.convert_element_type(frozen, f32)
  mul: f32[3,4] = mul(primals_2, convert_element_type)
  trained: f32[4] = fsdp.copy_out(root/float32.gathered, 0)
  fsdp.free(root/float32.gathered)
  mul_1: f32[3,4] = mul(mul, trained)
  fsdp.free(trained)
  return [mul_1, frozen, primals_2]""",
        )

    def test_a_plan_moves_what_is_joined_with_its_gather(self):
        gathers = Gather(("low",), False, None), Gather(("mid", "top"), False, "low.weight")
        graph = trace(three_layers(), rows(), plan=StepPlan((), gathers, (), 1)).after(PrefetchAllGather)
        self.assertExpectedInline(
            str(graph),
            """\
forward(low: f32[8], primals_2: f32[3,4], mid: f32[8], top: f32[8])
  low.pending: f32[16] = fsdp.all_gather(low)
  mid,top.joined: f32[16] = fsdp.join([mid, top])
  mid,top.pending: f32[32] = fsdp.all_gather(mid,top.joined)
  low.gathered: f32[16] = fsdp.wait(low.pending)
  low.weight: f32[4,4] = fsdp.view_out(low.gathered, 0)
  permute: f32[4,4] = permute(low.weight, [1, 0])
  mm: f32[3,4] = mm(primals_2, permute)
  fsdp.free(low.gathered)
  mid,top.gathered: f32[32] = fsdp.wait(mid,top.pending)
  mid.weight: f32[4,4] = fsdp.copy_out(mid,top.gathered, 0)
  permute_1: f32[4,4] = permute(mid.weight, [1, 0])
  mm_1: f32[3,4] = mm(mm, permute_1)
  fsdp.free(mid.weight)
  top.weight: f32[4,4] = fsdp.copy_out(mid,top.gathered, 8)
  fsdp.free(mid,top.gathered)
  permute_2: f32[4,4] = permute(top.weight, [1, 0])
  mm_2: f32[3,4] = mm(mm_1, permute_2)
  return [mm_2, mid, top.weight, primals_2, mm, mm_1]""",
        )

    def test_a_gather_that_a_plan_for_other_shapes_starts_too_late_starts_before_its_wait(self):
        starts = {"low": "mid.weight", "mid": "top.weight", "top": "mid.weight"}
        gathers = tuple(Gather((bucket,), False, start) for bucket, start in starts.items())
        graph = trace(three_layers(), rows(), plan=StepPlan((), gathers, (), 1)).after(PrefetchAllGather)
        self.assertExpectedInline(
            graph.schedule(),
            """\
forward
                            all_gather low                          64
                            wait low.gathered                       64
  mm                                                                64
                            free low.gathered                       0
                            all_gather mid                          64
                            all_gather top                          128
                            wait mid.gathered                       128
  mm                                                                128
                            free mid.gathered                       64
                            wait top.gathered                       64
  mm                                                                64""",
        )

    def test_a_plan_for_another_program(self):
        plan = StepPlan((), (Gather(("low",), False, "no.weight"),), (), 1)
        with self.assertRaisesRegex(PassError, "low is planned to start before no.weight, which"):
            trace(three_layers(), rows(), plan=plan)

    def test_with_distance_0_a_gather_starts_when_it_is_needed(self):
        graph = trace(four_layers(), rows(), forward_prefetch=0).after(PrefetchAllGather)
        self.assertExpectedInline(
            graph.schedule(),
            """\
forward
                            all_gather first                        64
                            wait first.gathered                     64
  mm                                                                64
                            free first.gathered                     0
                            all_gather second                       64
                            wait second.gathered                    64
  mm                                                                64
                            free second.gathered                    0
                            all_gather third                        64
                            wait third.gathered                     64
  mm                                                                64
                            free third.gathered                     0
                            all_gather fourth                       64
                            wait fourth.gathered                    64
  mm                                                                64""",
        )

    def test_with_distance_2_three_units_are_gathered_at_a_time(self):
        graph = trace(four_layers(), rows(), forward_prefetch=2).after(PrefetchAllGather)
        self.assertExpectedInline(
            graph.schedule(),
            """\
forward
                            all_gather first                        64
                            all_gather second                       128
                            all_gather third                        192
                            wait first.gathered                     192
  mm                                                                192
                            free first.gathered                     128
                            all_gather fourth                       192
                            wait second.gathered                    192
  mm                                                                192
                            free second.gathered                    128
                            wait third.gathered                     128
  mm                                                                128
                            free third.gathered                     64
                            wait fourth.gathered                    64
  mm                                                                64""",
        )

    def test_a_distance_beyond_the_graph_starts_everything_at_the_top(self):
        graph = trace(three_layers(), rows(), forward_prefetch=9).after(PrefetchAllGather)
        self.assertExpectedInline(
            graph.schedule(),
            """\
forward
                            all_gather low                          64
                            all_gather mid                          128
                            all_gather top                          192
                            wait low.gathered                       192
  mm                                                                192
                            free low.gathered                       128
                            wait mid.gathered                       128
  mm                                                                128
                            free mid.gathered                       64
                            wait top.gathered                       64
  mm                                                                64""",
        )

    def test_a_unit_that_was_kept_counts_so_that_its_neighbour_is_gathered_behind_it(self):
        graph = trace(four_layers(), rows()).after(PrefetchAllGather, "backward")
        self.assertExpectedInline(
            graph.schedule(),
            """\
backward
                            all_gather third                        128
  mm                                                                128
  pack fourth.packed                                                192
                            reduce_scatter fourth                   192
                            wait fourth.grad                        128
  mm                                                                128
                            free fourth.weight                      64
  mm                                                                64
  pack third.packed                                                 128
                            reduce_scatter third                    128
                            wait third.grad                         64
                            all_gather second                       128
                            wait third.gathered                     128
  mm                                                                128
                            free third.gathered                     64
  mm                                                                64
  pack second.packed                                                128
                            reduce_scatter second                   128
                            wait second.grad                        64
                            wait second.gathered                    64
  mm                                                                64
                            free second.gathered                    0
  mm                                                                0
  pack first.packed                                                 64
                            reduce_scatter first                    64
                            wait first.grad                         0""",
        )

    def test_the_buckets_of_a_unit_start_together(self):
        graph = trace(Chain(first=Adapted(), second=Adapted()), rows()).after(PrefetchAllGather)
        self.assertExpectedInline(
            graph.schedule(),
            """\
forward
                            all_gather first/bfloat16.frozen        32
                            all_gather first/float32                96
                            all_gather second/bfloat16.frozen       128
                            all_gather second/float32               192
                            wait first/bfloat16.frozen.gathered     192
  prims.convert_element_type                                        192
                            free first/bfloat16.frozen.gathered     160
  mm                                                                160
                            wait first/float32.gathered             160
  mm                                                                160
                            free first/float32.gathered             96
                            wait second/bfloat16.frozen.gathered    96
  add                                                               96
  prims.convert_element_type                                        96
  mm                                                                96
                            wait second/float32.gathered            96
  mm                                                                96
  add                                                               96""",
        )

    def test_a_gather_with_two_waits_is_refused(self):
        drawing = Drawing()
        pending = drawing.gather(drawing.input("shard", 8), "up")
        graph = drawing.returns(drawing.call(ops.WAIT, pending), drawing.call(ops.WAIT, pending))
        message = self.assert_raises(PassError, graph.then, PrefetchAllGather())
        self.assertIn("up.pending needs one wait", message)

    def test_a_graph_without_gathers_is_left_alone(self):
        graph = trace(nn.Sequential(nn.Tanh()), rows().requires_grad_()).before(PrefetchAllGather)
        self.assert_left_alone(graph, PrefetchAllGather())

    def test_a_second_run_changes_nothing(self):
        for distance in (0, 1, 2):
            for name in ("forward", "backward"):
                graphs = trace(four_layers(), rows(), forward_prefetch=distance, backward_prefetch=distance)
                self.assert_left_alone(graphs.after(PrefetchAllGather, name), PrefetchAllGather(distance))
