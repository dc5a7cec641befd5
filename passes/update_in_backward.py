"""Update in the backward: the optimizer updates a shard as soon as its gradient is there, and the gradient dies.

    Before   d = wait(reduce_scatter(p)); ...; return d
    After    d = wait(reduce_scatter(p)); update(d); ...; return None
    Needs    gathers and reductions in their final places
    Keeps    data flow, the order of the collectives
    Cost     O(nodes); one call of the optimizer for each bucket

An update stands behind its gradient, and behind the last node that reads the memory of the shard: of a bucket that is
not sharded, that is whatever reads a parameter. Gradients that are kept for a later step are returned as before; so are
those that are copied to the CPU, since they are there only when the host has waited for all copies.
"""

from __future__ import annotations

import dataclasses

import torch.fx

from . import analysis, metadata, ops
from .errors import refuse_calls, refuse_unplaced

_PASSED = (ops.WAIT, ops.CAST, ops.DIVIDE, ops.SUM_UP, ops.NARROW)
"""What a gradient passes on its way besides reductions."""


@dataclasses.dataclass(frozen=True)
class UpdateInBackward:
    """`states`: how many tensors of a shard's size the optimizer keeps for it; 2 for Adam."""

    states: int = 2

    def __call__(self, gm: torch.fx.GraphModule) -> None:
        refuse_unplaced(gm.graph)
        refuse_calls(gm.graph, ops.MOVE, until="OverlapCopies")
        graph, position, readers = gm.graph, analysis.positions(gm.graph), readers_of_shards(gm.graph)
        returned = analysis.outputs(graph)
        bucket_of = {value: bucket for value in returned if (bucket := bucket_of_gradient(value)) is not None}
        # Backwards, so that those with the same place stay in order.
        for gradient in sorted(bucket_of, key=position.__getitem__, reverse=True):
            bucket, output = bucket_of[gradient], returned.index(gradient)
            last = max([gradient, *readers.get(bucket, ())], key=position.__getitem__)
            while ops.is_call(last.next, ops.FREE, ops.STORE):
                last = last.next
            with graph.inserting_before(last.next):
                ops.call(graph, ops.UPDATE, gradient, bucket, output, self.states, like=gradient)
            returned[output] = None
        graph.output_node().args = (tuple(returned),)


def bucket_of_gradient(gradient: torch.fx.Node | None) -> str | None:
    """The bucket whose reduced gradient this is, on the device of the reduction; None for anything else."""
    node, is_reduced = gradient, False
    while node is not None and (ops.is_call(node, *_PASSED) or ops.is_reduction(node)):
        is_reduced |= ops.is_reduction(node)
        if ops.is_call(node, ops.REDUCE_SCATTER_GROUPED):
            return str(ops.argument(node, "bucket"))
        node = node.args[0]  # type: ignore[assignment]
    is_packed = is_reduced and node is not None and ops.is_call(node, ops.PACK)
    return str(ops.argument(node, "bucket")) if is_packed else None  # type: ignore[arg-type]


def readers_of_shards(graph: torch.fx.Graph) -> dict[str, list[torch.fx.Node]]:
    """What reads the memory of the shards, by bucket: the waits for gathers, and where nothing is gathered, what reads
    parameters."""
    found: dict[str, list[torch.fx.Node]] = {}
    whole: dict[str, str] = {}  # bucket by parameter, of those that are not sharded
    for node in graph.nodes:
        if ops.is_all_gather(node):
            for bucket in ops.buckets_of(node):
                found.setdefault(bucket, []).append(ops.wait_of(node))
        elif ops.is_call(node, ops.PACK) and ops.argument(node, "world_size") == 1:
            whole |= dict.fromkeys(ops.argument(node, "parameters"), ops.argument(node, "bucket"))
    for node in graph.nodes if whole else ():
        if (parameter := _parameter(node)) in whole:
            uses = sorted(use for use in analysis.uses(node) if use.op != "output")
            found.setdefault(whole[parameter], []).extend(uses)
    return found


def _parameter(node: torch.fx.Node) -> str | None:
    """The full parameter that a node is."""
    if kept := metadata.kept_parameter(node):
        return kept.parameter
    return str(ops.argument(node, "parameter")) if ops.is_parameter_out(node) else None
