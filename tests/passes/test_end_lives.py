import torch
from torch import nn

from fsdp_compile.passes import ops
from fsdp_compile.passes.end_lives import EndLives
from tests.passes.tiny import ScaleAndShift, biased, linear, rows, two_layers
from tests.passes.tracing import Drawing, Pictures, trace


class Residual(nn.Module):
    """An embedding that is read again after a matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(6, 4)
        self.mix = linear(4, 4)

    def forward(self, tokens):
        x = self.tokens(tokens)
        return x + self.mix(x)


class TestEndLives(Pictures):
    def test_what_was_looked_up_in_a_freed_buffer_is_stored(self):
        graphs = trace(Residual(), torch.tensor([1, 2, 3]))
        self.assertExpectedInline(
            str(graphs.before(EndLives)),
            """\
forward(tokens: f32[12], primals_2: i64[3], mix: f32[8])
  tokens.pending: f32[24] = fsdp.all_gather(tokens)
  mix.pending: f32[16] = fsdp.all_gather(mix)
  tokens.gathered: f32[24] = fsdp.wait(tokens.pending)
  tokens.weight: f32[6,4] = fsdp.view_out(tokens.gathered, 0)
  embedding: f32[3,4] = embedding(tokens.weight, primals_2)
  fsdp.free(tokens.gathered)
  mix.gathered: f32[16] = fsdp.wait(mix.pending)
  mix.weight: f32[4,4] = fsdp.view_out(mix.gathered, 0)
  permute: f32[4,4] = permute(mix.weight, [1, 0])
  mm: f32[3,4] = mm(embedding, permute)
  add: f32[3,4] = add(embedding, mm)
  return [add, mix.weight, primals_2, embedding]""",
        )
        self.assertExpectedInline(
            str(graphs.after(EndLives)),
            """\
forward(tokens: f32[12], primals_2: i64[3], mix: f32[8])
  tokens.pending: f32[24] = fsdp.all_gather(tokens)
  mix.pending: f32[16] = fsdp.all_gather(mix)
  tokens.gathered: f32[24] = fsdp.wait(tokens.pending)
  tokens.weight: f32[6,4] = fsdp.view_out(tokens.gathered, 0)
  embedding: f32[3,4] = embedding(tokens.weight, primals_2)
  embedding.stored: f32[3,4] = fsdp.store(embedding)
  fsdp.free(tokens.gathered)
  mix.gathered: f32[16] = fsdp.wait(mix.pending)
  mix.weight: f32[4,4] = fsdp.view_out(mix.gathered, 0)
  permute: f32[4,4] = permute(mix.weight, [1, 0])
  mm: f32[3,4] = mm(embedding.stored, permute)
  add: f32[3,4] = add(embedding.stored, mm)
  return [add, mix.weight, primals_2, embedding.stored]""",
        )

    def test_a_kept_parameter_that_was_copied_out_is_stored(self):
        graphs = trace(biased(), rows())
        self.assertExpectedInline(
            str(graphs.after(EndLives)),
            """\
forward(up: f32[20], primals_2: f32[3,4], down: f32[12])
  up.pending: f32[40] = fsdp.all_gather(up)
  down.pending: f32[24] = fsdp.all_gather(down)
  up.gathered: f32[40] = fsdp.wait(up.pending)
  up.weight: f32[8,4] = fsdp.copy_out(up.gathered, 0)
  permute: f32[4,8] = permute(up.weight, [1, 0])
  up.bias: f32[8] = fsdp.copy_out(up.gathered, 16)
  fsdp.free(up.gathered)
  addmm: f32[3,8] = addmm(up.bias, primals_2, permute)
  fsdp.free(up.bias)
  fsdp.free(up.weight)
  down.gathered: f32[24] = fsdp.wait(down.pending)
  down.weight: f32[2,8] = fsdp.copy_out(down.gathered, 0)
  down.weight.stored: f32[2,8] = fsdp.store(down.weight)
  permute_1: f32[8,2] = permute(down.weight.stored, [1, 0])
  down.bias: f32[2] = fsdp.copy_out(down.gathered, 8)
  fsdp.free(down.gathered)
  addmm_1: f32[3,2] = addmm(down.bias, addmm, permute_1)
  fsdp.free(down.bias)
  return [addmm_1, down.weight.stored, primals_2, addmm]""",
        )

    def test_store_is_left_in_the_lowered_graph(self):
        lowered = trace(Residual(), torch.tensor([1, 2, 3])).graphs.lowered.forward
        self.assertEqual(len([node for node in lowered.graph.nodes if ops.is_call(node, ops.STORE)]), 1)

    def test_what_a_heavy_operator_computes_is_in_memory_anyway(self):
        graphs = trace(two_layers(), rows())
        for name in ("forward", "backward"):
            self.assertEqual(str(graphs.after(EndLives, name)), str(graphs.before(EndLives, name)))

    def test_a_graph_without_frees_is_left_alone(self):
        drawing = Drawing()
        graph = drawing.returns(drawing.call(torch.ops.aten.sin.default, drawing.input("x", 4)))
        self.assert_left_alone(graph, EndLives())

    def test_a_second_run_changes_nothing(self):
        for model, x in ((Residual(), torch.tensor([1, 2, 3])), (biased(), rows()), (ScaleAndShift(), rows())):
            for name in ("forward", "backward"):
                self.assert_left_alone(trace(model, x).after(EndLives, name), EndLives())
