import dataclasses

import torch

from fsdp_compile.passes import ops
from fsdp_compile.passes.errors import PassError, VerifyError, pass_error
from fsdp_compile.passes.insert_all_gather import InsertAllGather
from fsdp_compile.passes.pipeline import Pipeline
from tests.passes.tiny import biased, rows, two_layers
from tests.passes.tracing import Pictures, trace


@dataclasses.dataclass(frozen=True)
class ForgetWaits:
    """A pass with a defect: what is gathered is read before it has arrived."""

    def __call__(self, gm):
        for node in gm.graph.nodes:
            if ops.is_call(node, ops.WAIT):
                node.replace_all_uses_with(node.args[0])
        gm.graph.eliminate_dead_code()


@dataclasses.dataclass(frozen=True)
class Refuse:
    """A pass that no graph suits."""

    reason: str = "none"

    def __call__(self, gm):
        raise pass_error(f"the reason is {self.reason}", next(iter(gm.graph.nodes)))


class TestPipeline(Pictures):
    def test_the_pipeline_prints_as_its_passes_with_their_options(self):
        pipeline = Pipeline.of(reshard={"up": True}, forward_prefetch=2, backward_prefetch=0, grouped=True)
        for row in (pipeline.joint, [pipeline.partition], pipeline.forward, pipeline.backward):
            with self.subTest(row=row):
                self.assertTrue(row)
        self.assertExpectedInline(
            "\n".join(map(repr, pipeline.joint)),
            """\
MergeUnshards()
CommuteCasts(parted=frozenset())
MergeGradients()
MergeAllReduces()""",
        )
        self.assertExpectedInline(repr(pipeline.partition), """PartitionJoint(reshard={'up': True})""")
        self.assertExpectedInline(
            "\n".join(map(repr, pipeline.forward)),
            """\
OverlapModelCollectives()
CommuteScales()
InsertReduceScatter(grouped=True)
InsertAllGather(grouped=True, plan=())
InsertFree()
PrefetchAllGather(distance=2, plan=(), lists=())
DelayReduceScatterWait(distance=1)
OverlapCopies(pin_memory=True)
EndLives()
ComputeEarly()""",
        )
        self.assertExpectedInline(
            "\n".join(map(repr, pipeline.backward)),
            """\
OverlapModelCollectives()
CommuteScales()
InsertReduceScatter(grouped=True)
InsertAllGather(grouped=True, plan=())
InsertFree()
PrefetchAllGather(distance=0, plan=(), lists=())
DelayReduceScatterWait(distance=0)
OverlapCopies(pin_memory=True)
EndLives()
ComputeEarly()""",
        )

    def test_equal_options_are_equal_pipelines(self):
        self.assertEqual(Pipeline.of(grouped=True), Pipeline.of(grouped=True))
        self.assertNotEqual(Pipeline.of(forward_prefetch=1), Pipeline.of(forward_prefetch=2))

    def test_the_observer_sees_every_pass_in_order(self):
        steps = trace(two_layers(), rows()).steps
        self.assertExpectedInline(
            "\n".join(f"{graph.name:<9}{type(step).__name__}" for step, graph in steps),
            """\
joint    Captured
joint    MergeUnshards
joint    CommuteCasts
joint    MergeGradients
joint    MergeAllReduces
forward  PartitionJoint
backward PartitionJoint
forward  OverlapModelCollectives
forward  CommuteScales
forward  InsertReduceScatter
forward  InsertAllGather
forward  InsertFree
forward  PrefetchAllGather
forward  DelayReduceScatterWait
forward  OverlapCopies
forward  EndLives
forward  ComputeEarly
forward  LowerCollectives
forward  PinMatmuls
backward OverlapModelCollectives
backward CommuteScales
backward InsertReduceScatter
backward InsertAllGather
backward InsertFree
backward PrefetchAllGather
backward DelayReduceScatterWait
backward OverlapCopies
backward EndLives
backward ComputeEarly
backward LowerCollectives
backward PinMatmuls""",
        )

    def test_without_gradients_only_the_forward_is_rewritten(self):
        with torch.no_grad():
            graphs = trace(two_layers(), rows())
        self.assertExpectedInline(
            "\n".join(f"{graph.name:<9}{type(step).__name__}" for step, graph in graphs.steps),
            """\
forward  MergeUnshards
forward  CommuteCasts
forward  MergeGradients
forward  MergeAllReduces
forward  OverlapModelCollectives
forward  CommuteScales
forward  InsertReduceScatter
forward  InsertAllGather
forward  InsertFree
forward  PrefetchAllGather
forward  DelayReduceScatterWait
forward  OverlapCopies
forward  EndLives
forward  ComputeEarly
forward  LowerCollectives
forward  PinMatmuls""",
        )
        self.assertExpectedInline(
            str(graphs.graphs),
            """\
forward(up: f32[16], arg1_1: f32[3,4], down: f32[8])
  up.pending: f32[32] = fsdp.all_gather(up)
  down.pending: f32[16] = fsdp.all_gather(down)
  up.gathered: f32[32] = fsdp.wait(up.pending)
  up.weight: f32[8,4] = fsdp.view_out(up.gathered, 0)
  permute: f32[4,8] = permute(up.weight, [1, 0])
  mm: f32[3,8] = mm(arg1_1, permute)
  fsdp.free(up.gathered)
  down.gathered: f32[16] = fsdp.wait(down.pending)
  down.weight: f32[2,8] = fsdp.view_out(down.gathered, 0)
  permute_1: f32[8,2] = permute(down.weight, [1, 0])
  mm_1: f32[3,2] = mm(mm, permute_1)
  fsdp.free(down.gathered)
  return [mm_1]""",
        )

    def broken_by(self, step, error):
        """The error of a pipeline that runs `step` after inserting the gathers, and the notes on it."""
        graph = trace(biased(), rows()).before(InsertAllGather)
        pipeline = dataclasses.replace(Pipeline.of(), forward=(InsertAllGather(), step))
        with self.assertRaises(error) as caught:
            pipeline.rewrite_inference(graph.gm)
        return str(caught.exception), caught.exception.__notes__

    def test_a_defect_is_caught_right_after_the_pass_that_has_it(self):
        message, notes = self.broken_by(ForgetWaits(), VerifyError)
        self.assertIn("up.pending needs one wait", message)
        self.assertEqual(notes, ["while running ForgetWaits() on the forward graph"])

    def test_a_refusal_says_which_pass_refused_what(self):
        message, notes = self.broken_by(Refuse("a test"), PassError)
        self.assertExpectedInline(
            message,
            """\
the reason is a test
> up: f32[20], an input
  primals_2: f32[3,4], an input
  down: f32[12], an input""",
        )
        self.assertEqual(notes, ["while running Refuse(reason='a test') on the forward graph"])

    def test_the_lowered_graphs_are_in_torchs_operators_and_the_scheduled_ones_stay_in_the_dialect(self):
        graphs = trace(two_layers(), rows()).graphs
        for scheduled, lowered in (
            (graphs.forward.module, graphs.lowered.forward),
            (graphs.backward.module, graphs.lowered.backward),
        ):
            self.assertTrue(any(ops.is_dialect(node) for node in scheduled.graph.nodes))
            self.assertFalse(any(ops.is_dialect(node) for node in lowered.graph.nodes))
            self.assertNotIn("torch.ops.fsdp", lowered.code)
