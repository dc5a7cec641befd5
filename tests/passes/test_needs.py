"""What each pass refuses: a graph that does not have what its *Needs* line says."""

from importlib import import_module

import torch

from docs.generate_passes import PASSES
from fsdp_compile.passes import ops
from fsdp_compile.passes.commute_casts import CommuteCasts
from fsdp_compile.passes.commute_scales import CommuteScales
from fsdp_compile.passes.compute_early import ComputeEarly
from fsdp_compile.passes.delay_reduce_scatter_wait import DelayReduceScatterWait
from fsdp_compile.passes.end_lives import EndLives
from fsdp_compile.passes.errors import PassError
from fsdp_compile.passes.halves import Halves
from fsdp_compile.passes.insert_all_gather import InsertAllGather
from fsdp_compile.passes.insert_free import InsertFree
from fsdp_compile.passes.insert_reduce_scatter import InsertReduceScatter
from fsdp_compile.passes.lower_collectives import LowerCollectives
from fsdp_compile.passes.outline_blocks import OutlineBlocks
from fsdp_compile.passes.overlap_copies import OverlapCopies
from fsdp_compile.passes.pin_matmuls import PinMatmuls
from fsdp_compile.passes.plan import Gather
from fsdp_compile.passes.prefetch_all_gather import PrefetchAllGather
from fsdp_compile.passes.update_in_backward import UpdateInBackward
from tests.passes.tracing import REDUCTION, Drawing, Pictures


def read(drawing, shard, bucket="up", dtype=None):
    arguments = "reduce", bucket, f"{bucket}.weight", 0, [4, 4], 2, "shard", dtype, None, "", *REDUCTION
    return drawing.call(ops.UNSHARD, shard, None, None, *arguments)


def reduced(drawing, gradient):
    shard = torch.float32, torch.device("cpu")
    arguments = None, None, "up", ["up.weight"], [0], 8, 2, "shard", *shard, *REDUCTION
    return drawing.call(ops.REDUCE_GRADIENT, [gradient], *arguments)


def one_read():
    drawing = Drawing()
    return drawing.returns(read(drawing, drawing.input("shard", 8)))


def two_reads():
    drawing = Drawing()
    shard = drawing.input("shard", 8)
    return drawing.returns(read(drawing, shard), read(drawing, shard))


class TestNeeds(Pictures):
    def refused(self, graph, step):
        return self.assert_raises(PassError, graph.then, step)

    def test_partition_joint_needs_one_unshard_per_parameter(self):
        message = self.refused(two_reads(), lambda gm: Halves.of(gm, 1, ()))
        self.assertExpectedInline(
            message,
            """\
up.weight#2 reads the same parameter as up.weight: run MergeUnshards first
  up: f32[8], an input
  up.weight: f32[4,4] = fsdp.unshard(up, 0)
> up.weight#2: f32[4,4] = fsdp.unshard(up, 0)
  return [up.weight, up.weight#2]""",
        )

    def test_commute_casts_needs_one_unshard_per_parameter(self):
        message = self.refused(two_reads(), CommuteCasts())
        self.assertIn("reads the same parameter as up.weight: run MergeUnshards first", message)

    def test_commute_scales_needs_one_unshard_per_parameter(self):
        message = self.refused(two_reads(), CommuteScales())
        self.assertIn("reads the same parameter as up.weight: run MergeUnshards first", message)

    def test_insert_all_gather_needs_one_unshard_per_parameter(self):
        self.assertExpectedInline(
            self.refused(two_reads(), InsertAllGather()),
            """\
up.weight#2 reads the same parameter as up.weight: run MergeUnshards first
  up: f32[8], an input
  up.weight: f32[4,4] = fsdp.unshard(up, 0)
> up.weight#2: f32[4,4] = fsdp.unshard(up, 0)
  return [up.weight, up.weight#2]""",
        )

    def test_insert_all_gather_needs_a_plan_for_buckets_of_one_kind(self):
        drawing = Drawing()
        up, down = drawing.input("up", 8), drawing.input("down", 8)
        graph = drawing.returns(read(drawing, up), read(drawing, down, "down", torch.bfloat16))
        message = self.refused(graph, InsertAllGather(plan=(Gather(("up", "down"), is_grouped=False, start=None),)))
        self.assertExpectedInline(
            message,
            """\
down is of another group, dtype or device than up: gather each by itself
  down: f32[8], an input
  up.weight: f32[4,4] = fsdp.unshard(up, 0)
> down.weight: bf16[4,4] = fsdp.unshard(down, 0)
  return [up.weight, down.weight]""",
        )

    def test_insert_reduce_scatter_needs_one_reduce_gradient_per_bucket(self):
        drawing = Drawing()
        gradients = [reduced(drawing, drawing.input(name, 4, 4)) for name in ("first", "second")]
        graph = drawing.returns(drawing.call(torch.ops.aten.add.Tensor, *gradients))
        self.assertExpectedInline(
            self.refused(graph, InsertReduceScatter()),
            """\
add_tensor adds up gradients of one shard: run MergeGradients first
  second: f32[4,4], an input
  up.grad#2: f32[8] = fsdp.reduce_gradient([second], [0])
> add_tensor: f32[8] = add(up.grad, up.grad#2)
  return [add_tensor]""",
        )

    def test_insert_free_needs_gathers_in_place(self):
        self.assertExpectedInline(
            self.refused(one_read(), InsertFree()),
            """\
up.weight calls fsdp.unshard: run InsertAllGather first
  up: f32[8], an input
> up.weight: f32[4,4] = fsdp.unshard(up, 0)
  return [up.weight]""",
        )

    def test_prefetch_all_gather_needs_every_gather_waited_for_once(self):
        drawing = Drawing()
        graph = drawing.returns(drawing.gather(drawing.input("shard", 8), "up"))
        self.assertExpectedInline(
            self.refused(graph, PrefetchAllGather()),
            """\
up.pending needs one wait: one fsdp.wait has to read it, and all others read that
  up: f32[8], an input
> up.pending: f32[16] = fsdp.all_gather(up)
  return [up.pending]""",
        )

    def test_delay_reduce_scatter_wait_needs_every_reduction_waited_for_once(self):
        drawing = Drawing()
        packed = drawing.input("packed", 16)
        graph = drawing.returns(drawing.call(ops.REDUCE_SCATTER, packed, "up", 2, "shard", "avg"))
        self.assertExpectedInline(
            self.refused(graph, DelayReduceScatterWait()),
            """\
up.grad.pending needs one wait: one fsdp.wait has to read it, and all others read that
  packed: f32[16], an input
> up.grad.pending: f32[8] = fsdp.reduce_scatter(packed)
  return [up.grad.pending]""",
        )

    def test_end_lives_needs_frees_in_place(self):
        drawing = Drawing()
        gathered = drawing.call(ops.WAIT, drawing.gather(drawing.input("shard", 8), "up"))
        graph = drawing.returns(drawing.call(torch.ops.aten.sin.default, drawing.view_out(gathered, "up.weight", 4, 4)))
        self.assertExpectedInline(
            self.refused(graph, EndLives()),
            """\
up.gathered has no free at its end: run InsertFree first
  up: f32[8], an input
  up.pending: f32[16] = fsdp.all_gather(up)
> up.gathered: f32[16] = fsdp.wait(up.pending)
  up.weight: f32[4,4] = fsdp.view_out(up.gathered, 0)
  sin_default: f32[4,4] = sin(up.weight)""",
        )

    def test_lower_collectives_needs_gathers_in_place(self):
        self.assertExpectedInline(
            self.refused(one_read(), LowerCollectives()),
            """\
up.weight calls fsdp.unshard: run InsertAllGather first
  up: f32[8], an input
> up.weight: f32[4,4] = fsdp.unshard(up, 0)
  return [up.weight]""",
        )

    def test_lower_collectives_needs_reductions_in_place(self):
        drawing = Drawing()
        graph = drawing.returns(reduced(drawing, drawing.input("gradient", 4, 4)))
        self.assertExpectedInline(
            self.refused(graph, LowerCollectives()),
            """\
up.grad calls fsdp.reduce_gradient: run InsertReduceScatter first
  gradient: f32[4,4], an input
> up.grad: f32[8] = fsdp.reduce_gradient([gradient], [0])
  return [up.grad]""",
        )

    def test_lower_collectives_needs_copies_overlapped(self):
        drawing = Drawing()
        graph = drawing.returns(drawing.call(ops.MOVE, drawing.input("shard", 8), torch.device("meta")))
        self.assertExpectedInline(
            self.refused(graph, LowerCollectives()),
            """\
shard.meta calls fsdp.move: run OverlapCopies first
  shard: f32[8], an input
> shard.meta: f32[8] = fsdp.move(shard, meta)
  return [shard.meta]""",
        )

    def test_compute_early_needs_gathers_and_reductions_in_place(self):
        self.assertIn("run InsertAllGather first", self.refused(one_read(), ComputeEarly()))
        drawing = Drawing()
        graph = drawing.returns(reduced(drawing, drawing.input("gradient", 4, 4)))
        self.assertIn("run InsertReduceScatter first", self.refused(graph, ComputeEarly()))

    def test_overlap_copies_needs_gathers_in_place(self):
        self.assertExpectedInline(
            self.refused(one_read(), OverlapCopies()),
            """\
up.weight calls fsdp.unshard: run InsertAllGather first
  up: f32[8], an input
> up.weight: f32[4,4] = fsdp.unshard(up, 0)
  return [up.weight]""",
        )

    def test_overlap_copies_needs_reductions_in_place(self):
        drawing = Drawing()
        graph = drawing.returns(reduced(drawing, drawing.input("gradient", 4, 4)))
        self.assertExpectedInline(
            self.refused(graph, OverlapCopies()),
            """\
up.grad calls fsdp.reduce_gradient: run InsertReduceScatter first
  gradient: f32[4,4], an input
> up.grad: f32[8] = fsdp.reduce_gradient([gradient], [0])
  return [up.grad]""",
        )

    def test_update_in_backward_needs_gathers_and_reductions(self):
        drawing = Drawing()
        graph = drawing.returns(reduced(drawing, drawing.input("gradient", 4, 4)))
        message = self.refused(graph, UpdateInBackward())
        self.assertExpectedInline(
            message,
            """\
up.grad calls fsdp.reduce_gradient: run InsertReduceScatter first
  gradient: f32[4,4], an input
> up.grad: f32[8] = fsdp.reduce_gradient([gradient], [0])
  return [up.grad]""",
        )

    def test_pin_matmuls_needs_a_lowered_graph(self):
        self.refuses_the_dialect(PinMatmuls())

    def test_outline_blocks_needs_a_lowered_graph(self):
        self.refuses_the_dialect(OutlineBlocks())

    def refuses_the_dialect(self, step):
        drawing = Drawing()
        graph = drawing.returns(drawing.call(ops.WAIT, drawing.gather(drawing.input("shard", 8), "up")))
        self.assertExpectedInline(
            self.refused(graph, step),
            """\
up.pending calls fsdp.all_gather: run LowerCollectives first
  up: f32[8], an input
> up.pending: f32[16] = fsdp.all_gather(up)
  up.gathered: f32[16] = fsdp.wait(up.pending)
  return [up.gathered]""",
        )

    def test_every_pass_that_needs_something_is_here(self):
        tests = [name for name in dir(self) if name.startswith("test_")]
        for name in PASSES:
            needs_something = "Needs    nothing" not in import_module(f"fsdp_compile.passes.{name}").__doc__
            self.assertEqual(any(test.startswith(f"test_{name}_needs") for test in tests), needs_something, name)
