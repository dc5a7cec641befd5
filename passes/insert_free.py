"""Insert frees: the life of every full buffer ends after the last use of it or of any view of it.

    Before   g = wait(all_gather(shard)); w = copy_out(g); y = mm(x, t(w)); z = relu(y)
    After    g = wait(all_gather(shard)); w = copy_out(g); free(g); y = mm(x, t(w)); free(w); z = relu(y)
    Needs    gathers in place (insert_all_gather)
    Keeps    data flow, order
    Cost     O(nodes)

Full buffers are gathered buffers, parameters copied out of them, a bucket that every rank holds whole in the dtype of
the computation, and the full parameters that a backward takes over from its forward. One that the graph returns (a
parameter kept for the backward) leaves it alive and is not freed.
"""

from __future__ import annotations

import dataclasses

import torch.fx

from . import analysis, metadata, ops


@dataclasses.dataclass(frozen=True)
class InsertFree:
    def __call__(self, gm: torch.fx.GraphModule) -> None:
        position = analysis.positions(gm.graph)
        for buffer in full_buffers(gm.graph):
            end = analysis.last_use(buffer, position)
            if end.op != "output" and not ops.is_call(end, ops.FREE):
                with gm.graph.inserting_after(end):
                    ops.call(gm.graph, ops.FREE, buffer)


def full_buffers(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The nodes that bring a full buffer to life and that no other node of this list is a view of."""
    return [
        node
        for node in graph.nodes
        if _is_gathered(node) or _is_copy(node) or _is_converted(node) or metadata.kept_parameter(node)
    ]


def _is_gathered(node: torch.fx.Node) -> bool:
    return ops.is_call(node, ops.WAIT) and ops.is_all_gather(node.args[0])  # type: ignore[arg-type]


def _is_copy(node: torch.fx.Node) -> bool:
    return ops.is_call(node, ops.COPY_OUT)


def _is_converted(node: torch.fx.Node) -> bool:
    is_last = not any(ops.is_conversion(user) for user in node.users)
    return ops.is_call(node, ops.CAST, ops.MOVE) and is_last and any(map(ops.is_parameter_out, node.users))
