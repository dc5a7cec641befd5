import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_compile.passes import ops
from fsdp_compile.passes.equal_units import EqualUnits
from fsdp_compile.passes.more_units import rename_units, repeat_unit
from tests.passes.test_fewer_units import Residual, joint_of
from tests.passes.tiny import Chain, linear, rows
from tests.passes.tracing import Pictures, plain_graph


def chain(letters):
    return Chain(**{letter: linear(4, 4) for letter in letters})


class Shared(nn.Module):
    """Every layer adds a part of what is computed once: the same, or its own."""

    def __init__(self, own):
        super().__init__()
        self.layers, self.own = nn.ModuleList([linear(4, 4) for _ in range(7)]), own

    def forward(self, x):
        parts = x.repeat(1, 8).tanh().unbind(0) if self.own else [x.tanh()] * 7
        added = [part[:4] for part in (*parts, *parts, *parts)] if self.own else parts
        for layer, each in zip(self.layers, added[:7], strict=True):
            x = torch.tanh(layer(x)) + each
        return x


class Observed(Residual):
    """Returns what a layer in the middle has computed, too."""

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if index == 5:
                seen = x.detach()
        return x, seen


class Checkpointed(nn.Module):
    """Every layer is computed again in the backward."""

    def __init__(self, number):
        super().__init__()
        self.layers = nn.ModuleList([linear(4, 4) for _ in range(number)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, torch.sin(x), use_reentrant=False))
        return x


class Buffers(nn.Module):
    """Every layer has a buffer of its own."""

    def __init__(self, number):
        super().__init__()
        self.layers = nn.ModuleList([linear(4, 4) for _ in range(number)])
        for layer in self.layers:
            layer.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x) * layer.scale)
        return x


def repeated(graph, num_results, *names):
    """Repeat the last but one of the equal units so often, if that can be done."""
    equal = EqualUnits.of(graph.gm.graph)
    return repeat_unit(equal, len(equal.names) - 2, names, num_results)


class TestMoreUnits(Pictures):
    def test_a_copy_stands_between_the_units(self):
        graph = joint_of(chain("abcdef"), rows())
        self.assertEqual(list(EqualUnits.of(graph.gm.graph).names), ["b", "c", "d", "e"])
        copies = repeated(graph, 1, "x")
        self.assertEqual([[copy.name for copy in found] for found in copies.values()], [["primals_5_copy_1"]])
        graph.gm.graph.lint()
        self.assertExpectedInline(
            str(graph),
            """\
joint(a: f32[8], primals_2: f32[3,4], b: f32[8], c: f32[8], d: f32[8], x: f32[8], e: f32[8], f: f32[8], tangents_1: f32[3,4])
  a.weight: f32[4,4] = fsdp.unshard(a, 0)
  permute: f32[4,4] = permute(a.weight, [1, 0])
  mm: f32[3,4] = mm(primals_2, permute)
  b.weight: f32[4,4] = fsdp.unshard(b, 0)
  permute_1: f32[4,4] = permute(b.weight, [1, 0])
  mm_1: f32[3,4] = mm(mm, permute_1)
  c.weight: f32[4,4] = fsdp.unshard(c, 0)
  permute_2: f32[4,4] = permute(c.weight, [1, 0])
  mm_2: f32[3,4] = mm(mm_1, permute_2)
  d.weight: f32[4,4] = fsdp.unshard(d, 0)
  permute_3: f32[4,4] = permute(d.weight, [1, 0])
  mm_3: f32[3,4] = mm(mm_2, permute_3)
  x.weight: f32[4,4] = fsdp.unshard(x, 0)
  permute_default: f32[4,4] = permute(x.weight, [1, 0])
  mm_default: f32[3,4] = mm(mm_3, permute_default)
  e.weight: f32[4,4] = fsdp.unshard(e, 0)
  permute_4: f32[4,4] = permute(e.weight, [1, 0])
  mm_4: f32[3,4] = mm(mm_default, permute_4)
  f.weight: f32[4,4] = fsdp.unshard(f, 0)
  permute_5: f32[4,4] = permute(f.weight, [1, 0])
  mm_5: f32[3,4] = mm(mm_4, permute_5)
  permute_6: f32[4,3] = permute(tangents_1, [1, 0])
  mm_6: f32[4,4] = mm(permute_6, mm_4)
  permute_8: f32[4,4] = permute(permute_5, [1, 0])
  mm_7: f32[3,4] = mm(tangents_1, permute_8)
  f.grad: f32[8] = fsdp.reduce_gradient([mm_6], [0])
  permute_10: f32[4,3] = permute(mm_7, [1, 0])
  mm_8: f32[4,4] = mm(permute_10, mm_default)
  permute_12: f32[4,4] = permute(permute_4, [1, 0])
  mm_default_1: f32[3,4] = mm(mm_7, permute_12)
  e.grad: f32[8] = fsdp.reduce_gradient([mm_8], [0])
  permute_default_2: f32[4,3] = permute(mm_default_1, [1, 0])
  mm_default_2: f32[4,4] = mm(permute_default_2, mm_3)
  permute_default_1: f32[4,4] = permute(permute_default, [1, 0])
  mm_9: f32[3,4] = mm(mm_default_1, permute_default_1)
  x.grad: f32[8] = fsdp.reduce_gradient([mm_default_2], [0])
  permute_14: f32[4,3] = permute(mm_9, [1, 0])
  mm_10: f32[4,4] = mm(permute_14, mm_2)
  permute_16: f32[4,4] = permute(permute_3, [1, 0])
  mm_11: f32[3,4] = mm(mm_9, permute_16)
  d.grad: f32[8] = fsdp.reduce_gradient([mm_10], [0])
  permute_18: f32[4,3] = permute(mm_11, [1, 0])
  mm_12: f32[4,4] = mm(permute_18, mm_1)
  permute_20: f32[4,4] = permute(permute_2, [1, 0])
  mm_13: f32[3,4] = mm(mm_11, permute_20)
  c.grad: f32[8] = fsdp.reduce_gradient([mm_12], [0])
  permute_22: f32[4,3] = permute(mm_13, [1, 0])
  mm_14: f32[4,4] = mm(permute_22, mm)
  permute_24: f32[4,4] = permute(permute_1, [1, 0])
  mm_15: f32[3,4] = mm(mm_13, permute_24)
  b.grad: f32[8] = fsdp.reduce_gradient([mm_14], [0])
  permute_26: f32[4,3] = permute(mm_15, [1, 0])
  mm_16: f32[4,4] = mm(permute_26, primals_2)
  a.grad: f32[8] = fsdp.reduce_gradient([mm_16], [0])
  return [mm_5, a.grad, None, b.grad, c.grad, d.grad, x.grad, e.grad, f.grad]""",  # noqa: E501
        )

    def test_it_is_the_graph_of_a_model_with_more_layers(self):
        for few, more, names, behind in (
            (chain("abcdef"), chain("abcdxyef"), ["x", "y"], {}),
            (Buffers(6), Buffers(8), ["layers.4", "layers.5"], {"layers.4": "layers.6", "layers.5": "layers.7"}),
        ):
            graph, whole = joint_of(few, rows()), joint_of(more, rows())
            rename_units(graph.gm.graph.nodes, behind)
            self.assertIsNotNone(repeated(graph, 1, *names))
            self.assertEqual(plain(graph), plain(whole))

    def test_what_a_unit_reads_is_as_far_away_as_before(self):
        for model, num_results, is_repeated in (
            (Residual(), 1, True),
            (Residual(before=1), 1, True),
            (Shared(own=False), 1, True),
            (Shared(own=True), 1, False),
            (Observed(), 2, False),
        ):
            graph = joint_of(model, rows())
            before = plain(graph)
            found = repeated(graph, num_results, "x", "y")
            self.assertEqual(found is not None, is_repeated, type(model).__name__)
            graph.gm.graph.lint()
            self.assertEqual(plain(graph) == before, not is_repeated)

    def test_regions_that_are_computed_again_are_told_apart(self):
        few, many = (joint_of(Checkpointed(number), rows()) for number in (6, 9))
        self.assertIsNotNone(repeated(few, 1, "x", "y", "z"))
        found, expected = (
            [node.meta.get("ac_graph_id") for node in graph.gm.graph.nodes if node.op == "call_function"]
            for graph in (few, many)
        )
        order = sorted(set(expected) - {None})
        self.assertEqual(len(order), 9)
        of_found = sorted(set(found) - {None})
        self.assertEqual(
            [None if region is None else of_found.index(region) for region in found],
            [None if region is None else order.index(region) for region in expected],
        )

    def test_units_are_renamed_with_their_parameters(self):
        graph = joint_of(chain("abc"), rows()).gm.graph
        rename_units(graph.nodes, {"b": "y/z"})
        unshards = [node for node in graph.nodes if ops.is_call(node, ops.UNSHARD)]
        self.assertEqual([ops.argument(node, "bucket") for node in unshards], ["a", "y%2Fz", "c"])
        self.assertEqual([ops.argument(node, "parameter") for node in unshards], ["a.weight", "y/z.weight", "c.weight"])


def plain(graph):
    return plain_graph(graph.gm.graph)
