from fsdp_compile.passes.delay_reduce_scatter_wait import DelayReduceScatterWait
from fsdp_compile.passes.insert_free import InsertFree
from fsdp_compile.passes.verifier import verify
from tests.passes.tiny import Tempered, four_layers, rows, three_layers, two_layers
from tests.passes.tracing import STAGE_AFTER, Pictures, trace


class TestDelayReduceScatterWait(Pictures):
    def test_a_reduction_is_waited_for_just_before_the_next_one_is_packed(self):
        graphs = trace(two_layers(), rows())
        self.assertExpectedInline(
            str(graphs.after(DelayReduceScatterWait, "backward")),
            """\
backward(down.weight: f32[2,8], primals_2: f32[3,4], mm: f32[3,8], tangents_1: f32[3,2])
  permute_2: f32[2,3] = permute(tangents_1, [1, 0])
  mm_2: f32[2,8] = mm(permute_2, mm)
  down.packed: f32[16] = fsdp.pack([mm_2], [0])
  down.grad.pending: f32[8] = fsdp.reduce_scatter(down.packed)
  permute_1: f32[8,2] = permute(down.weight, [1, 0])
  permute_4: f32[2,8] = permute(permute_1, [1, 0])
  mm_3: f32[3,8] = mm(tangents_1, permute_4)
  fsdp.free(down.weight)
  permute_6: f32[8,3] = permute(mm_3, [1, 0])
  mm_4: f32[8,4] = mm(permute_6, primals_2)
  down.grad: f32[8] = fsdp.wait(down.grad.pending)
  up.packed: f32[32] = fsdp.pack([mm_4], [0])
  up.grad.pending: f32[16] = fsdp.reduce_scatter(up.packed)
  up.grad: f32[16] = fsdp.wait(up.grad.pending)
  return [up.grad, None, down.grad]""",
        )

    def test_with_distance_0_every_reduction_is_waited_for_at_once(self):
        graph = trace(three_layers(), rows()).before(DelayReduceScatterWait, "backward")
        self.assertExpectedInline(
            graph.then(DelayReduceScatterWait(0)).schedule(),
            """\
backward
                            all_gather mid                          128
  mm                                                                128
  pack top.packed                                                   192
                            reduce_scatter top                      192
                            wait top.grad                           128
  mm                                                                128
                            free top.weight                         64
  mm                                                                64
  pack mid.packed                                                   128
                            reduce_scatter mid                      128
                            wait mid.grad                           64
                            wait mid.gathered                       64
  mm                                                                64
                            free mid.gathered                       0
  mm                                                                0
  pack low.packed                                                   64
                            reduce_scatter low                      64
                            wait low.grad                           0""",
        )

    def test_with_distance_2_two_reductions_are_under_way(self):
        graph = trace(three_layers(), rows()).before(DelayReduceScatterWait, "backward")
        self.assertExpectedInline(
            graph.then(DelayReduceScatterWait(2)).schedule(),
            """\
backward
                            all_gather mid                          128
  mm                                                                128
  pack top.packed                                                   192
                            reduce_scatter top                      192
  mm                                                                192
                            free top.weight                         128
  mm                                                                128
  pack mid.packed                                                   192
                            reduce_scatter mid                      192
                            wait mid.gathered                       192
  mm                                                                192
                            free mid.gathered                       128
  mm                                                                128
                            wait top.grad                           64
  pack low.packed                                                   128
                            reduce_scatter low                      128
                            wait mid.grad                           64
                            wait low.grad                           0""",
        )

    def test_the_reduction_over_replicas_follows_the_wait_for_the_one_over_shards(self):
        graph = trace(three_layers(), rows(), replicas=2).after(DelayReduceScatterWait, "backward")
        self.assertExpectedInline(
            graph.schedule(),
            """\
backward
                            all_gather mid                          128
  mm                                                                128
  pack top.packed                                                   192
                            reduce_scatter top                      192
  mm                                                                192
                            free top.weight                         128
  mm                                                                128
                            wait top.grad                           64
                            all_reduce top                          64
  pack mid.packed                                                   128
                            reduce_scatter mid                      128
                            wait mid.gathered                       128
  mm                                                                128
                            free mid.gathered                       64
  mm                                                                64
                            wait top.grad#2                         64
                            wait mid.grad                           0
                            all_reduce mid                          0
  pack low.packed                                                   64
                            reduce_scatter low                      64
                            wait mid.grad#2                         64
                            wait low.grad                           0
                            all_reduce low                          0
                            wait low.grad#2                         0""",
        )

    def test_several_reductions_are_waited_for_in_the_order_in_which_they_start(self):
        before = trace(three_layers(), rows(), replicas=2).before(DelayReduceScatterWait, "backward")
        for distance in range(5):
            verify(before.then(DelayReduceScatterWait(distance)).gm, STAGE_AFTER[InsertFree])
        self.assertExpectedInline(
            "\n".join(
                line
                for line in before.then(DelayReduceScatterWait(2)).schedule().splitlines()
                if "grad" in line or "reduce" in line
            ),
            """\
                            reduce_scatter top                      192
                            reduce_scatter mid                      192
                            wait top.grad                           64
                            all_reduce top                          64
                            reduce_scatter low                      128
                            wait mid.grad                           64
                            all_reduce mid                          64
                            wait top.grad#2                         64
                            wait low.grad                           0
                            all_reduce low                          0
                            wait mid.grad#2                         0
                            wait low.grad#2                         0""",
        )

    def test_the_all_reduce_of_a_0_d_parameter_is_delayed_as_well(self):
        graph = trace(Tempered(), rows()).after(DelayReduceScatterWait, "backward")
        self.assertExpectedInline(
            graph.schedule(),
            """\
backward
  mul                                                               0
  mul                                                               0
  sum                                                               0
  pack temperature.packed                                           16
                            all_reduce temperature                  16
  mm                                                                16
                            wait temperature.grad                   0
  pack mix.packed                                                   64
                            reduce_scatter mix                      64
                            wait mix.grad                           0""",
        )

    def test_a_forward_is_left_alone(self):
        graph = trace(two_layers(), rows()).before(DelayReduceScatterWait)
        self.assert_left_alone(graph, DelayReduceScatterWait())

    def test_a_second_run_changes_nothing(self):
        for replicas in (1, 2):
            graph = trace(four_layers(), rows(), replicas=replicas).before(DelayReduceScatterWait, "backward")
            for distance in (0, 1, 2):
                once = graph.then(DelayReduceScatterWait(distance))
                self.assert_left_alone(once, DelayReduceScatterWait(distance))
