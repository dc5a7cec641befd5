import re

import torch
from torch import nn
from torch.nn import functional as F

from fsdp_compile.passes import ops
from fsdp_compile.passes.errors import VerifyError
from fsdp_compile.passes.insert_free import InsertFree
from fsdp_compile.passes.overlap_model_collectives import OverlapModelCollectives
from fsdp_compile.passes.verifier import verify
from tests.passes.tiny import rows
from tests.passes.tracing import STAGE_AFTER, Pictures, copy_of, trace

_c10d = torch.ops._c10d_functional
SHOWN = {"addmm", "all_to_all_single", "wait_tensor"}


class Summed(torch.autograd.Function):
    """The identity; what every rank has of the gradient is summed up, as in front of a column-wise split layer."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return _c10d.wait_tensor(_c10d.all_reduce(gradient, "sum", "tp"))


class Split(nn.Module):
    """Two linear layers, the second of which is split."""

    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.Linear(4, 4), nn.Linear(4, 8)

    def forward(self, x):
        return self.up(Summed.apply(self.norm(x)))


class Mixture(nn.Module):
    """Tokens go to experts and come back, beside what every token gets."""

    def __init__(self, *, dropout=0.0, is_shared_first=False):
        super().__init__()
        self.expert, self.shared = nn.Linear(4, 4), nn.Linear(4, 4)
        self.dropout, self.is_shared_first = dropout, is_shared_first

    def forward(self, x):
        shared = self.own(x) if self.is_shared_first else None
        computed = self.exchanged(self.expert(self.exchanged(x)))
        return computed + (self.own(x) if shared is None else shared)

    def own(self, x):
        return self.shared(F.dropout(x, self.dropout))

    def exchanged(self, tokens):
        return _c10d.wait_tensor(_c10d.all_to_all_single(tokens, [1, 2], [1, 2], "ep"))


class Gathered(nn.Module):
    """Multiplies by what another group of ranks holds of a weight, beside another layer."""

    def __init__(self):
        super().__init__()
        self.weight, self.beside = nn.Parameter(torch.randn(2, 4)), nn.Linear(4, 4)

    def forward(self, x):
        weight = _c10d.wait_tensor(_c10d.all_gather_into_tensor(self.weight, 2, "tp"))
        return x @ weight + self.beside(x)


def names(graph):
    """Matmuls, and what is sent and waited for, in their order."""
    lines = str(graph).splitlines()
    return [
        found[1]
        for line in lines
        if (found := re.search(r"= (?:_c10d_functional\.)?(\w+)[.(]", line)) and found[1] in SHOWN
    ]


def moved(model):
    with torch.no_grad():
        return names(trace(model, rows()).after(OverlapModelCollectives, "forward"))


class TestOverlapModelCollectives(Pictures):
    def test_the_gradient_of_the_weight_is_computed_while_that_of_the_input_is_summed_up(self):
        graphs = trace(Split(), rows())
        self.assertExpectedInline(
            str(graphs.before(OverlapModelCollectives, "backward")),
            """\
backward(up.weight: f32[8,4], primals_2: f32[3,4], addmm: f32[3,4], tangents_1: f32[3,8])
  permute_1: f32[4,8] = permute(up.weight, [1, 0])
  permute_2: f32[8,4] = permute(permute_1, [1, 0])
  mm: f32[3,4] = mm(tangents_1, permute_2)
  permute_3: f32[8,3] = permute(tangents_1, [1, 0])
  mm_1: f32[8,4] = mm(permute_3, addmm)
  sum_1: f32[1,8] = sum.dim_IntList(tangents_1, [0], True)
  view_1: f32[8] = view(sum_1, [8])
  up.grad: f32[20] = fsdp.reduce_gradient([mm_1, view_1], [0, 16])
  all_reduce: f32[3,4] = _c10d_functional.all_reduce(mm, sum, tp)
  wait_tensor: f32[3,4] = _c10d_functional.wait_tensor(all_reduce)
  permute_6: f32[4,3] = permute(wait_tensor, [1, 0])
  mm_2: f32[4,4] = mm(permute_6, primals_2)
  sum_2: f32[1,4] = sum.dim_IntList(wait_tensor, [0], True)
  view_2: f32[4] = view(sum_2, [4])
  norm.grad: f32[12] = fsdp.reduce_gradient([mm_2, view_2], [0, 8])
  return [norm.grad, None, up.grad]""",
        )
        self.assertExpectedInline(
            str(graphs.after(OverlapModelCollectives, "backward")),
            """\
backward(up.weight: f32[8,4], primals_2: f32[3,4], addmm: f32[3,4], tangents_1: f32[3,8])
  permute_1: f32[4,8] = permute(up.weight, [1, 0])
  permute_2: f32[8,4] = permute(permute_1, [1, 0])
  mm: f32[3,4] = mm(tangents_1, permute_2)
  all_reduce: f32[3,4] = _c10d_functional.all_reduce(mm, sum, tp)
  permute_3: f32[8,3] = permute(tangents_1, [1, 0])
  mm_1: f32[8,4] = mm(permute_3, addmm)
  sum_1: f32[1,8] = sum.dim_IntList(tangents_1, [0], True)
  view_1: f32[8] = view(sum_1, [8])
  up.grad: f32[20] = fsdp.reduce_gradient([mm_1, view_1], [0, 16])
  wait_tensor: f32[3,4] = _c10d_functional.wait_tensor(all_reduce)
  permute_6: f32[4,3] = permute(wait_tensor, [1, 0])
  mm_2: f32[4,4] = mm(permute_6, primals_2)
  sum_2: f32[1,4] = sum.dim_IntList(wait_tensor, [0], True)
  view_2: f32[4] = view(sum_2, [4])
  norm.grad: f32[12] = fsdp.reduce_gradient([mm_2, view_2], [0, 8])
  return [norm.grad, None, up.grad]""",
        )

    def test_nothing_moves_where_every_matmul_is_needed(self):
        graphs = trace(Split(), rows())
        before, after = (find(OverlapModelCollectives, "forward") for find in (graphs.before, graphs.after))
        self.assertEqual(str(before), str(after))

    def test_what_every_token_gets_is_computed_while_tokens_travel(self):
        first, last = (moved(Mixture(is_shared_first=is_first)) for is_first in (True, False))
        there, back = ["all_to_all_single", "wait_tensor"], ["all_to_all_single", "wait_tensor"]
        self.assertEqual(first, [there[0], "addmm", there[1], "addmm", *back])
        self.assertEqual(last, [*there, "addmm", back[0], "addmm", back[1]])

    def test_what_a_collective_reads_is_freed_when_it_is_waited_for(self):
        with torch.no_grad():
            graphs = trace(Gathered(), rows())
        self.assertExpectedInline(
            str(graphs.after(InsertFree, "forward")),
            """\
forward(weight: f32[4], arg1_1: f32[3,4], beside: f32[12])
  beside.pending: f32[24] = fsdp.all_gather(beside)
  beside.gathered: f32[24] = fsdp.wait(beside.pending)
  beside.weight: f32[4,4] = fsdp.copy_out(beside.gathered, 0)
  permute: f32[4,4] = permute(beside.weight, [1, 0])
  beside.bias: f32[4] = fsdp.copy_out(beside.gathered, 8)
  fsdp.free(beside.gathered)
  addmm: f32[3,4] = addmm(beside.bias, arg1_1, permute)
  fsdp.free(beside.bias)
  fsdp.free(beside.weight)
  weight.pending: f32[8] = fsdp.all_gather(weight)
  weight.gathered: f32[8] = fsdp.wait(weight.pending)
  weight#2: f32[2,4] = fsdp.view_out(weight.gathered, 0)
  all_gather_into_tensor: f32[4,4] = _c10d_functional.all_gather_into_tensor(weight#2, 2, tp)
  wait_tensor: f32[4,4] = _c10d_functional.wait_tensor(all_gather_into_tensor)
  fsdp.free(weight.gathered)
  mm: f32[3,4] = mm(arg1_1, wait_tensor)
  add: f32[3,4] = add(mm, addmm)
  return [add]""",
        )
        graph = copy_of(graphs.after(InsertFree, "forward").gm)
        (wait,) = [node for node in graph.graph.nodes if ops.is_functional_wait(node)]
        (free,) = [node for node in wait.users if ops.is_call(node, ops.FREE)] or [wait.next]
        wait.prepend(free)
        with self.assertRaisesRegex(VerifyError, "still reads"):
            verify(graph, STAGE_AFTER[InsertFree])

    def test_random_numbers_are_drawn_in_their_order(self):
        """What is computed from them, and what is behind them, stays there."""
        exchange = ["all_to_all_single", "wait_tensor"]
        self.assertEqual(moved(Mixture(dropout=0.5)), [*exchange, "addmm", *exchange, "addmm"])
