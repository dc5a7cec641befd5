import torch

from fsdp_compile.passes import ops
from fsdp_compile.passes.errors import VerifyError
from fsdp_compile.passes.forms import NO_REGIONS
from fsdp_compile.passes.lower_collectives import LowerCollectives
from fsdp_compile.passes.update_in_backward import UpdateInBackward
from fsdp_compile.passes.verifier import Signature, verify
from tests.passes.tiny import rows, three_layers, two_layers
from tests.passes.tracing import STAGE_AFTER, Drawing, Pictures, trace


class TestUpdateInBackward(Pictures):
    def test_a_shard_is_updated_behind_the_wait_for_its_gradient(self):
        graphs = trace(two_layers(), rows(), updates=2)
        self.assertExpectedInline(
            str(graphs.after(UpdateInBackward, "backward")),
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
  fsdp.update(down.grad)
  up.packed: f32[32] = fsdp.pack([mm_4], [0])
  up.grad.pending: f32[16] = fsdp.reduce_scatter(up.packed)
  up.grad: f32[16] = fsdp.wait(up.grad.pending)
  fsdp.update(up.grad)
  return [None, None, None]""",
        )

    def test_the_schedule_of_three_layers(self):
        graph = trace(three_layers(), rows(), updates=2).after(UpdateInBackward, "backward")
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
  update top.grad                                                   64
  pack mid.packed                                                   128
                            reduce_scatter mid                      128
                            wait mid.gathered                       128
  mm                                                                128
                            free mid.gathered                       64
  mm                                                                64
                            wait mid.grad                           0
  update mid.grad                                                   0
  pack low.packed                                                   64
                            reduce_scatter low                      64
                            wait low.grad                           0
  update low.grad                                                   0""",
        )

    def test_a_shard_that_is_not_gathered_is_updated_behind_the_last_reader_of_its_parameters(self):
        graph = trace(two_layers(), rows(), world_size=1, replicas=2, updates=0, reductions=0, backward_prefetch=0)
        self.assertExpectedInline(
            str(graph.after(UpdateInBackward, "backward")),
            """\
backward(down.weight.shard: f32[16], primals_2: f32[3,4], mm: f32[3,8], tangents_1: f32[3,2])
  permute_2: f32[2,3] = permute(tangents_1, [1, 0])
  mm_2: f32[2,8] = mm(permute_2, mm)
  down.packed: f32[16] = fsdp.pack([mm_2], [0])
  down.grad.pending: f32[16] = fsdp.all_reduce(down.packed)
  down.grad: f32[16] = fsdp.wait(down.grad.pending)
  down.weight: f32[2,8] = fsdp.view_out(down.weight.shard, 0)
  permute_1: f32[8,2] = permute(down.weight, [1, 0])
  permute_4: f32[2,8] = permute(permute_1, [1, 0])
  mm_3: f32[3,8] = mm(tangents_1, permute_4)
  fsdp.update(down.grad)
  permute_6: f32[8,3] = permute(mm_3, [1, 0])
  mm_4: f32[8,4] = mm(permute_6, primals_2)
  up.packed: f32[32] = fsdp.pack([mm_4], [0])
  up.grad.pending: f32[32] = fsdp.all_reduce(up.packed)
  up.grad: f32[32] = fsdp.wait(up.grad.pending)
  fsdp.update(up.grad)
  return [None, None, None]""",
        )

    def test_gradients_that_are_kept_for_a_later_step_are_returned(self):
        drawing = Drawing()
        gradient = drawing.input("gradient", 4, 4)
        packed = drawing.call(
            ops.PACK, [gradient], None, None, "up", ["up.weight"], [0], 8, 2, torch.float32, *NO_REGIONS
        )
        graph = drawing.returns(packed, name="backward")
        assert str(graph.then(UpdateInBackward(2))) == str(graph)

    def test_lowered_it_is_a_call_of_the_optimizer(self):
        lowered = trace(two_layers(), rows(), updates=2).after(LowerCollectives, "backward")
        found = [(*update.args[1:], update.args[0].target) for update in ops.updates(lowered.gm.graph)]
        wait = torch.ops._c10d_functional.wait_tensor.default
        assert found == [("down", 2, 2, wait), ("up", 0, 2, wait)]

    def test_the_outputs_are_the_same_to_the_verifier(self):
        graphs = trace(two_layers(), rows(), updates=2)
        before, after = (graph(UpdateInBackward, "backward").gm for graph in (graphs.before, graphs.after))
        assert Signature.of(before) == Signature.of(after)

    def refused(self, edit, **options):
        gm = trace(two_layers(), rows(), updates=2, **options).after(UpdateInBackward, "backward").gm
        edit(gm.graph, *ops.updates(gm.graph))
        return self.assert_raises(VerifyError, verify, gm, STAGE_AFTER[UpdateInBackward])

    def test_an_update_before_a_reader_of_the_shard_is_caught(self):
        def edit(graph, down, up):
            down.args[0].append(down)

        message = self.refused(edit, world_size=1, replicas=2, reductions=0, backward_prefetch=0)
        self.assertExpectedInline(
            message,
            """\
down.update updates a shard that down.weight reads after that
  down.grad.pending: f32[16] = fsdp.all_reduce(down.packed)
  down.grad: f32[16] = fsdp.wait(down.grad.pending)
> fsdp.update(down.grad)
  down.weight: f32[2,8] = fsdp.view_out(down.weight.shard, 0)
  permute_1: f32[8,2] = permute(down.weight, [1, 0])""",
        )

    def test_a_gradient_that_is_returned_as_well_is_caught(self):
        def edit(graph, down, up):
            output = graph.output_node()
            output.args = ((up.args[0], None, None),)

        self.assertExpectedInline(
            self.refused(edit),
            """\
up.update takes up.grad, which is returned as well
  up.grad.pending: f32[16] = fsdp.reduce_scatter(up.packed)
  up.grad: f32[16] = fsdp.wait(up.grad.pending)
> fsdp.update(up.grad)
  return [up.grad, None, None]""",
        )

    def test_a_second_update_is_caught(self):
        def edit(graph, down, up):
            with graph.inserting_before(up.next):
                graph.node_copy(up)

        self.assertExpectedInline(
            self.refused(edit),
            """\
up.update#2 takes up.grad a second time
  up.grad: f32[16] = fsdp.wait(up.grad.pending)
  fsdp.update(up.grad)
> fsdp.update(up.grad)
  return [None, None, None]""",
        )
