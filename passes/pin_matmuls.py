"""Pin matmuls: keep Inductor from moving a matmul down to an addition, past communication or other matmuls.

    Before   m = mm(a, b); wait(...); n = mm(c, d); s = add(m, x)
    After    m = mm(a, b); wait(...); n = mm(c, d); s = squeeze(add(unsqueeze(m), unsqueeze(x)))
    Needs    a lowered graph
    Keeps    values, order
    Cost     O(nodes); three views for each pinned addition

Inductor replaces `add(mm(a, b), x)` by an `addmm` where the addition stands. That is welcome if the matmul stands just
before it; elsewhere the matmul would no longer hide the communication that the schedule puts beside it, and would keep
its operands alive: with frees that poison, it would read what is NaN by then. Its pattern does not see through the
views. A graph without collectives has no schedule to keep.
"""

from __future__ import annotations

import dataclasses
import operator

import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from . import analysis, ops
from .errors import refuse_calls

_aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class PinMatmuls:
    def __call__(self, gm: torch.fx.GraphModule) -> None:
        refuse_calls(gm.graph, *ops.OPERATORS.keys() - ops.LOWERED, until="LowerCollectives")
        for addition in moving_additions(gm.graph):
            with gm.graph.inserting_before(addition):
                terms = [ops.call(gm.graph, _aten.unsqueeze.default, term, 0, like=addition) for term in addition.args]
                total = ops.call(gm.graph, _aten.add.Tensor, *terms, like=addition)
                addition.replace_all_uses_with(ops.call(gm.graph, _aten.squeeze.dim, total, 0, like=addition))
            gm.graph.erase_node(addition)


def moving_additions(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The additions to a matmul that stands before some other matmul, communication, or a free that poisons."""
    position = analysis.positions(graph)
    if not any(_is_scheduled(node) for node in graph.nodes):
        return []
    moving = []
    anchor = -1  # the last of these so far
    for node in graph.nodes:
        if _is_addition(node):
            matmuls = [term for term in node.all_input_nodes if ops.is_call(term, _aten.mm.default)]
            moving += [node] if any(position[matmul] < anchor for matmul in matmuls) else []
        if _is_scheduled(node) or analysis.is_heavy(node):
            anchor = position[node]
    return moving


def _is_addition(node: torch.fx.Node) -> bool:
    """Whether this adds two tensors that are known to have one shape.

    To ask whether sizes that vary are equal would have the model compiled again for others.
    """
    if not ops.is_call(node, _aten.add.Tensor) or node.kwargs or len(node.all_input_nodes) != 2:
        return False
    one, other = (term.meta["val"] for term in node.all_input_nodes)
    return one.dim() == other.dim() and all(map(statically_known_true, map(operator.eq, one.shape, other.shape)))


def _is_scheduled(node: torch.fx.Node) -> bool:
    return ops.is_call(node, ops.POISON) or ops.is_copy(node) or ops.is_functional(node)
