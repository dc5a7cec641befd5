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

from . import analysis, ops
from .errors import refuse_calls


@dataclasses.dataclass(frozen=True)
class InsertFree:
    def __call__(self, gm: torch.fx.GraphModule) -> None:
        refuse_calls(gm.graph, ops.UNSHARD, ops.PART, until="InsertAllGather")
        for buffer, end in missing_frees(gm.graph).items():
            with gm.graph.inserting_after(end):
                ops.call(gm.graph, ops.FREE, buffer)


def missing_frees(graph: torch.fx.Graph) -> dict[torch.fx.Node, torch.fx.Node]:
    """Every full buffer that is neither freed nor returned, with its last use."""
    position = analysis.positions(graph)
    last_use = {buffer: analysis.last_use(buffer, position) for buffer in analysis.full_buffers(graph)}
    return {buffer: end for buffer, end in last_use.items() if end.op != "output" and not ops.is_call(end, ops.FREE)}
