"""One broken graph for each line of the verifier's lists, in their order."""

import operator

import torch

from fsdp_compile.passes import metadata, ops
from fsdp_compile.passes.errors import VerifyError
from fsdp_compile.passes.insert_all_gather import InsertAllGather
from fsdp_compile.passes.insert_free import InsertFree
from fsdp_compile.passes.lower_collectives import LowerCollectives
from fsdp_compile.passes.partition_joint import PartitionJoint
from fsdp_compile.passes.verifier import STAGES, Signature, verify, verify_crossing
from tests.passes.tiny import biased, rows, three_layers
from tests.passes.tracing import STAGE_AFTER, Drawing, Pictures, trace

sin, mm, t = torch.ops.aten.sin.default, torch.ops.aten.mm.default, torch.ops.aten.t.default


def keep(node):
    """`node` as a full parameter that the backward takes over."""
    metadata.note_shard(node, metadata.FullParameter("up.weight", "up"))
    return node


def gathered_weight(drawing):
    """A gathered buffer, and the weight that it holds."""
    gathered = drawing.call(ops.WAIT, drawing.gather(drawing.input("shard", 8), "up"))
    return gathered, drawing.view_out(gathered, "up.weight", 4, 4)


class TestVerify(Pictures):
    def refused(self, drawing, *returned, after=InsertFree, **options):
        return self.assert_raises(VerifyError, verify, drawing.returns(*returned).gm, STAGE_AFTER[after], **options)

    def test_a_sound_graph_passes(self):
        for grouped in (False, True):
            graphs = trace(biased(), rows(), grouped=grouped).graphs
            verify(graphs.forward.module, STAGE_AFTER[InsertFree], freed=True)
            verify(graphs.backward.module, STAGE_AFTER[InsertFree], freed=True)

    def test_1_a_value_that_is_used_before_it_is_defined(self):
        drawing = Drawing()
        first = drawing.call(sin, drawing.input("x", 4))
        second = drawing.call(sin, first)
        second.append(first)
        self.assertIn("not well formed", message := self.refused(drawing, second))
        self.assertIn("sin_default", message)

    def test_2_an_operator_without_a_value(self):
        drawing = Drawing()
        gathered, weight = gathered_weight(drawing)
        del gathered.meta["val"]
        self.assertIn("up.gathered has no value in its metadata", self.refused(drawing, weight))

    def test_2_an_input_without_a_value(self):
        drawing = Drawing()
        shard = drawing.input("shard", 8)
        gathered = drawing.call(ops.WAIT, drawing.gather(shard, "up"))
        del shard.meta["val"]
        self.assertIn("up has no value in its metadata", self.refused(drawing, gathered))

    def test_3_an_output_that_changed(self):
        drawing, before = Drawing(), Drawing()
        signature = Signature.of(before.returns(before.input("x", 3, 4)).gm)
        x = drawing.input("x", 3, 4)
        message = self.refused(drawing, drawing.call(t, x), signature=signature)
        self.assertIn("inputs or outputs changed", message)
        self.assertIn("(4, 3)", message)

    def test_3_an_input_that_is_gone(self):
        drawing, before = Drawing(), Drawing()
        x, _ = before.input("x", 3, 4), before.input("y", 4)
        signature = Signature.of(before.returns(x).gm)
        self.assertIn("inputs or outputs changed", self.refused(drawing, drawing.input("x", 3, 4), signature=signature))

    def test_4_a_collective_that_nothing_waits_for(self):
        drawing = Drawing()
        drawing.gather(drawing.input("shard", 8), "up")
        self.assertExpectedInline(
            self.refused(drawing),
            """\
up.pending needs one wait, and is read by nothing: one fsdp.wait has to read it, and all others read that
  up: f32[8], an input
> up.pending: f32[16] = fsdp.all_gather(up)
  return []""",
        )

    def test_4_a_collective_that_is_waited_for_twice(self):
        drawing = Drawing()
        pending = drawing.gather(drawing.input("shard", 8), "up")
        waits = [drawing.call(ops.WAIT, pending) for _ in range(2)]
        message = self.refused(drawing, *waits)
        self.assertIn("up.pending needs one wait, and is read by up.gathered, up.gathered#2", message)

    def test_4_a_collective_that_is_read_without_a_wait(self):
        drawing = Drawing()
        pending = drawing.gather(drawing.input("shard", 8), "up")
        message = self.refused(drawing, drawing.call(sin, pending))
        self.assertIn("up.pending is read by sin_default without a wait", message)

    def test_5_collectives_that_are_waited_for_out_of_order(self):
        drawing = Drawing()
        first, second = (drawing.gather(drawing.input(name, 8), name) for name in ("up", "down"))
        waits = [drawing.call(ops.WAIT, pending) for pending in (second, first)]
        message = self.refused(drawing, *waits)
        self.assertIn("down.pending starts after a collective that is waited for later", message)

    def test_6_a_buffer_that_is_read_after_its_free(self):
        drawing = Drawing()
        gathered, weight = gathered_weight(drawing)
        drawing.call(ops.FREE, gathered)
        self.assertExpectedInline(
            self.refused(drawing, drawing.call(sin, gathered)),
            """\
free_default frees up.gathered, which sin_default still reads
  up.gathered: f32[16] = fsdp.wait(up.pending)
  up.weight: f32[4,4] = fsdp.view_out(up.gathered, 0)
> fsdp.free(up.gathered)
  sin_default: f32[16] = sin(up.gathered)
  return [sin_default]""",
        )

    def test_6_a_view_that_is_read_after_the_free_of_its_buffer(self):
        drawing = Drawing()
        gathered, weight = gathered_weight(drawing)
        transposed = drawing.call(t, weight)
        drawing.call(ops.FREE, gathered)
        message = self.refused(drawing, drawing.call(sin, transposed))
        self.assertIn("free_default frees up.gathered, which sin_default still reads", message)

    def test_6_a_part_that_is_read_after_the_free_of_the_whole(self):
        drawing = Drawing()
        gathered, weight = gathered_weight(drawing)
        split = drawing.call(torch.ops.aten.split.Tensor, weight, 2)
        drawing.call(ops.FREE, gathered)
        part = drawing.call(operator.getitem, split, 1)
        message = self.refused(drawing, part)
        self.assertIn("free_default frees up.gathered", message)

    def test_6_a_buffer_that_is_freed_twice(self):
        drawing = Drawing()
        gathered, weight = gathered_weight(drawing)
        drawing.call(ops.FREE, gathered)
        drawing.call(ops.FREE, gathered)
        self.assertIn("free_default", self.refused(drawing))

    def test_6_a_buffer_that_is_returned_and_freed(self):
        drawing = Drawing()
        gathered, weight = gathered_weight(drawing)
        drawing.call(ops.FREE, gathered)
        self.assertIn("free_default frees up.gathered, which output still reads", self.refused(drawing, weight))

    def test_7_a_buffer_that_is_never_freed(self):
        drawing = Drawing()
        gathered, weight = gathered_weight(drawing)
        product = drawing.call(sin, weight)
        self.assertIn("up.gathered is not freed", self.refused(drawing, product, freed=True))

    def test_7_a_kept_parameter_that_is_never_freed(self):
        drawing = Drawing()
        weight = keep(drawing.input("weight", 4, 4))
        self.assertIn("weight is not freed", self.refused(drawing, drawing.call(sin, weight), freed=True))

    def test_7_a_buffer_that_is_freed_late(self):
        drawing = Drawing()
        gathered, weight = gathered_weight(drawing)
        first = drawing.call(sin, weight)
        second = drawing.call(sin, first)
        drawing.call(ops.FREE, gathered)
        message = self.refused(drawing, second, freed=True)
        self.assertIn("up.gathered is freed late, after sin_default_1", message)

    def test_7_without_freed_a_buffer_need_not_be_freed_yet(self):
        drawing = Drawing()
        _, weight = gathered_weight(drawing)
        verify(drawing.returns(drawing.call(sin, weight)).gm, STAGE_AFTER[InsertFree])

    def test_8_a_gradient_of_another_size_than_its_shard(self):
        drawing = Drawing()
        gradient = drawing.input("gradient", 4, 4)
        arguments = [gradient], None, None, "up", ["up.weight"], [0], 8, 2, "shard", torch.float32, "avg"
        pending = drawing.call(ops.REDUCE_SCATTER_GROUPED, *arguments)
        reduced = drawing.call(ops.WAIT, pending)
        pending.meta["val"] = pending.meta["val"][:4]
        message = self.refused(drawing, reduced)
        self.assertIn("up.grad.pending returns 4 elements for a shard of 8", message)

    def test_9_a_free_before_there_are_gathers(self):
        drawing = Drawing()
        drawing.call(ops.FREE, keep(drawing.input("weight", 4, 4)))
        self.assertExpectedInline(
            self.refused(drawing, after=PartitionJoint),
            """\
free_default calls fsdp.free, which is not legal after PartitionJoint
  up.weight: f32[4,4], an input
> fsdp.free(up.weight)
  return []""",
        )

    def test_9_a_read_of_a_parameter_when_gathers_are_there(self):
        graph = trace(biased(), rows()).before(InsertAllGather).gm
        message = self.assert_raises(VerifyError, verify, graph, STAGE_AFTER[InsertAllGather])
        self.assertIn("up.weight calls fsdp.unshard, which is not legal after InsertAllGather", message)

    def test_9_an_operator_that_is_left_after_lowering(self):
        graph = trace(biased(), rows()).graphs.forward.module
        message = self.assert_raises(VerifyError, verify, graph, STAGE_AFTER[LowerCollectives])
        self.assertIn("up.pending calls fsdp.all_gather, which is not legal after LowerCollectives", message)

    def test_9_every_operator_is_legal_after_some_pass(self):
        self.assertEqual({each for stage in STAGES for each in stage.operators}, set(ops.OPERATORS))


class TestVerifyCrossing(Pictures):
    """Forward and backward of three layers, of which `top` is kept; then one thing is broken."""

    def sides(self):
        graphs = trace(three_layers(), rows())
        return graphs.after(PartitionJoint).gm, graphs.after(PartitionJoint, "backward").gm

    def refused(self, forward, backward):
        return self.assert_raises(VerifyError, verify_crossing, forward, backward, 1)

    def save_as_well(self, forward, backward, wanted):
        """Save what `wanted` accepts of the forward's nodes, in place of its last saved value."""
        output = forward.graph.output_node()
        [node] = [node for node in forward.graph.nodes if wanted(node)]
        output.args = ((*output.args[0][:-1], node),)
        return self.refused(forward, backward)

    def test_what_partition_joint_makes_passes(self):
        verify_crossing(*self.sides(), 1)

    def test_1_a_full_parameter_is_saved_that_is_not_kept(self):
        def is_full(node):
            return ops.is_call(node, ops.UNSHARD) and ops.argument(node, "parameter") == "mid.weight"

        message = self.save_as_well(*self.sides(), is_full)
        self.assertIn("is full and saved for the backward, but not kept", message)
        self.assertIn("mid.weight", message)

    def test_1_a_view_of_a_full_parameter_is_saved(self):
        message = self.save_as_well(*self.sides(), lambda node: node.name == "permute_1")
        self.assertIn("permute_1 is full and saved for the backward, but not kept", message)

    def test_1_a_view_of_a_kept_parameter_is_saved(self):
        message = self.save_as_well(*self.sides(), lambda node: node.name == "permute_2")
        self.assertIn("permute_2 is full and saved for the backward, but not kept", message)

    def test_2_the_forward_saves_less_than_the_backward_takes(self):
        forward, backward = self.sides()
        output = forward.graph.output_node()
        output.args = (output.args[0][:-1],)
        self.assertIn("the forward saves 4 values, the backward takes 5", self.refused(forward, backward))

    def test_3_the_gradient_of_a_shard_has_another_size(self):
        forward, backward = self.sides()
        output = backward.graph.output_node()
        [gradient] = [node for node in backward.graph.nodes if node.name == "mm_3"]
        output.args = ((gradient, *output.args[0][1:]),)
        message = self.refused(forward, backward)
        self.assertIn("low has the gradient (torch.float32, (4, 4)), which is not of its shape", message)
