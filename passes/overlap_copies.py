"""Overlap copies between devices with the computation: a move becomes the start of a copy and the wait for it.

    Before   s = move(shard, cuda); ...; g = all_gather(s)
             r = move(reduced, cpu); ...; q = move(other, cpu); ...; return r, q
    After    c = copy_start(shard, cuda); ...; s = copy_wait(c, shard); g = all_gather(s)
             c = copy_start(reduced, cpu); ...; r = copy_wait(c, reduced); d = copy_start(other, cpu); ...;
             q = copy_wait(d, other); copies_done([r, q]); return r, q
    Needs    gathers and reductions in their final places
    Keeps    data flow, order
    Cost     O(nodes)

A copy starts where the move stands. A shard's is waited for before its first use, a gradient's before the copy of the
next gradient, or at the end of the graph. A wait reads the source, too, whose memory is not used again before: of the
gradients, one at a time is kept on the device. At the end of the graph the host waits for all copies: what is on the
CPU may be read and written from then on.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.fx

from . import analysis, ops
from .errors import refuse_unplaced


@dataclasses.dataclass(frozen=True)
class OverlapCopies:
    """`pin_memory`: whether gradients are copied to memory that a GPU reaches by itself; elsewhere the host waits."""

    pin_memory: bool = True

    def __call__(self, gm: torch.fx.GraphModule) -> None:
        refuse_unplaced(gm.graph)
        on_cpu = []
        for move, end in ends_of_moves(gm.graph).items():
            source, device = move.args
            with gm.graph.inserting_before(move):
                copied = ops.call(gm.graph, ops.COPY_START, source, device, self.pin_memory, like=move)
            with gm.graph.inserting_before(end):
                ready = ops.call(gm.graph, ops.COPY_WAIT, copied, source, like=move)
            move.replace_all_uses_with(ready)
            on_cpu.append(ready if _is_to_cpu(move) else source)
        for move in list(gm.graph.find_nodes(op="call_function", target=ops.MOVE)):
            gm.graph.erase_node(move)
        if on_cpu:
            with gm.graph.inserting_before(gm.graph.output_node()):
                ops.call(gm.graph, ops.COPIES_DONE, on_cpu)


def ends_of_moves(graph: torch.fx.Graph) -> dict[torch.fx.Node, torch.fx.Node]:
    """Every move, in order, with the node that its copy is to be waited for before."""
    position = analysis.positions(graph)
    end_of_move, next_to_cpu = {}, graph.output_node()
    for move in reversed(graph.find_nodes(op="call_function", target=ops.MOVE)):
        end_of_move[move] = analysis.first_use(move, position)
        if _is_to_cpu(move):
            end_of_move[move] = min(end_of_move[move], next_to_cpu, key=position.__getitem__)
            next_to_cpu = move
    return dict(reversed(end_of_move.items()))


def _is_to_cpu(move: torch.fx.Node) -> bool:
    return move.args[1] == torch.device("cpu")
