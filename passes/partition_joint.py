"""Partition the joint graph into forward and backward so that what is saved between them is shards and activations.

    Before   joint:    w = unshard(shard); y = mm(x, t(w)); ...; dx = mm(dy, w)
    After    forward:  w = unshard(shard); y = mm(x, t(w)); return y, shard
             backward: w = unshard(shard); dx = mm(dy, w)
    Needs    one unshard per parameter (merge_unshards)
    Keeps    what the min-cut partitioner decides for the unsharded program, activation checkpointing included
    Cost     that of the partitioner

The partitioner sees the full parameters as if they were inputs of the graph, exactly as in the unsharded program. With
the gathers in view it would save gathered parameters, since they look expensive to compute again. Afterwards each side
regains its own `unshard`. Values that the partitioner saved although they follow from parameters alone (a transposed
weight looks free to it, a weight cast to bf16 looks cheap) are computed again in the backward, for the same reason.
`halves` has the partitioner, and what is put right of its two graphs whatever is resharded.

A unit that is not resharded after the forward is the exception: its full parameters are saved. Where `reshard` does not
say otherwise, that is the unit which the forward uses last and the backward needs first: freeing it would buy nothing.
A unit may also be sharded again over a smaller group (`metadata.Part`): the part is saved, and gathered over that
group. A unit that was gathered for several calls, before this one, is taken over from the forward, too, and not freed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch.fx

from . import analysis, metadata, ops
from .errors import pass_error
from .halves import Halves, Unshard, first_saved_tensor, save_instead, take
from .printer import printed_name


@dataclasses.dataclass(frozen=True)
class PartitionJoint:
    """`reshard` maps names of units to whether they are resharded after the forward; see the module's text."""

    reshard: Mapping[str, bool | metadata.Part] = dataclasses.field(default_factory=dict)

    def reshard_halves(self, halves: Halves) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        """Forward and backward from what the partitioner left, which is changed."""
        if halves.unshards:
            _reshard(halves, Crossing.of(halves, self.reshard))
        return halves.forward, halves.backward


@dataclasses.dataclass(frozen=True)
class Crossing:
    """What goes from the forward to the backward in place of what follows from full parameters alone.

    Attributes:
        unshard_of_input: for each full parameter among the forward's inputs, the erased unshard that it stands for.
        input_of_saved: for each value that follows from full parameters alone and that the partitioner has the forward
            save, the backward's input that receives it. The backward computes it again.
        way_of_parameter: for each full parameter that this takes, how the backward gets it: it is kept, gathered from
            a part, or (None) from its shard.
    """

    unshard_of_input: Mapping[torch.fx.Node, Unshard]
    input_of_saved: Mapping[torch.fx.Node, torch.fx.Node]
    way_of_parameter: Mapping[torch.fx.Node, metadata.FullParameter | metadata.Part | None]

    def __str__(self) -> str:
        lines = []
        for full, way in self.way_of_parameter.items():
            name = self.unshard_of_input[full].parameter
            if isinstance(way, metadata.FullParameter):
                lines.append(f"keep {name}")
            else:
                lines.append(f"gather {name} again" + (f" over {way.group}" if way else ""))
        computed = [saved for saved in self.input_of_saved if saved not in self.unshard_of_input]
        return "\n".join([*lines, *(f"compute {printed_name(saved)} again" for saved in computed)])

    @classmethod
    def of(cls, halves: Halves, reshard: Mapping[str, bool | metadata.Part]) -> Crossing:
        inputs = analysis.inputs(halves.forward.graph)
        unshards = {node: halves.unshards[node.name] for node in inputs if node.name in halves.unshards}
        input_of_saved = _inputs_of_saved(halves, set(unshards))
        needed = dict.fromkeys(root for saved in input_of_saved for root in _roots(saved, unshards))
        sharded = {root: unshard for root, unshard in unshards.items() if root in needed and unshard.world_size > 1}
        last_unit = _last_unit(halves.forward.graph, {root: unshard.bucket for root, unshard in sharded.items()})

        def way(unshard: Unshard) -> metadata.FullParameter | metadata.Part | None:
            if unshard.gathered is not None:
                return metadata.FullParameter(unshard.parameter, unshard.bucket, outlives=True)
            unit = ops.unit_of_bucket(unshard.bucket)
            wanted = reshard.get(unit, unit != last_unit)
            if unshard.world_size == 1 or wanted is True:
                return None
            return wanted or metadata.FullParameter(unshard.parameter, unshard.bucket)

        return cls(unshards, input_of_saved, {root: way(unshards[root]) for root in needed})


def _inputs_of_saved(halves: Halves, full: set[torch.fx.Node]) -> dict[torch.fx.Node, torch.fx.Node]:
    """What the forward saves and computes from `full` alone, each with the backward's input for it."""
    input_of_name = {node.name: node for node in analysis.inputs(halves.backward.graph)}
    from_parameters = analysis.parameter_only(halves.forward.graph, full)
    found = {}
    for saved in analysis.outputs(halves.forward.graph)[halves.num_fwd_outputs :]:
        if saved not in from_parameters:
            continue
        if saved.name not in input_of_name:
            raise pass_error("the partitioner saved this, which the backward does not take", saved)
        found[saved] = input_of_name[saved.name]
    return found


def _roots(node: torch.fx.Node, full: Mapping[torch.fx.Node, Unshard]) -> list[torch.fx.Node]:
    """The full parameters that `node`, which follows from nothing else, follows from."""
    if node in full:
        return [node]
    return list(dict.fromkeys(root for source in node.all_input_nodes for root in _roots(source, full)))


def _last_unit(graph: torch.fx.Graph, bucket_of_parameter: Mapping[torch.fx.Node, str]) -> str | None:
    """The unit whose parameters are computed with last."""
    if not bucket_of_parameter:
        return None
    position = analysis.positions(graph)

    def last_compute(parameter: torch.fx.Node) -> int:
        users = {user for alias in analysis.aliases(parameter) for user in alias.users if user.op != "output"}
        return max((position[user] for user in users), default=-1)

    return ops.unit_of_bucket(bucket_of_parameter[max(bucket_of_parameter, key=last_compute)])


def _reshard(halves: Halves, crossing: Crossing) -> None:
    """Give each side its own unshards, and save shards (or parts) and kept parameters in place of what follows."""
    forward, backward = halves.forward.graph, halves.backward.graph
    input_of_name = {node.name: node for node in analysis.inputs(forward)}
    part_of_bucket = _insert_parts(forward, crossing, input_of_name)
    anchor = first_saved_tensor(backward)
    first_compute = next(node for node in backward.nodes if node.op != "placeholder")
    newly_saved: dict[torch.fx.Node, torch.fx.Node] = {}  # by the forward's node: the backward's input
    regained: dict[torch.fx.Node, torch.fx.Node] = {}  # by the forward's node: the backward's
    for root, way in crossing.way_of_parameter.items():
        unshard = crossing.unshard_of_input[root]
        is_kept = isinstance(way, metadata.FullParameter)
        source = root if is_kept else part_of_bucket.get(unshard.bucket, input_of_name[unshard.shard])
        if source not in newly_saved:
            newly_saved[source] = take(backward, anchor, source)
        metadata.note_shard(newly_saved[source], way)
        with backward.inserting_before(first_compute):
            taken = newly_saved[source]
            regained[root] = taken if is_kept else unshard.call(backward, taken, root.meta["val"])
    with backward.inserting_before(first_compute):
        for saved, taken in crossing.input_of_saved.items():
            taken.replace_all_uses_with(_recompute(backward, saved, regained))
    for taken in crossing.input_of_saved.values():
        backward.erase_node(taken)
    save_instead(forward, halves.num_fwd_outputs, list(crossing.input_of_saved), list(newly_saved))
    _regain_unshards(forward, crossing.unshard_of_input, input_of_name)


def _insert_parts(
    forward: torch.fx.Graph, crossing: Crossing, shard_of_name: Mapping[str, torch.fx.Node]
) -> dict[str, torch.fx.Node]:
    """The part of each bucket that the forward keeps one of."""
    part_of_bucket: dict[str, torch.fx.Node] = {}
    for root, way in crossing.way_of_parameter.items():
        unshard = crossing.unshard_of_input[root]
        if isinstance(way, metadata.Part) and unshard.bucket not in part_of_bucket:
            arguments = unshard.bucket, unshard.world_size, way.size, way.index, unshard.dtype
            with forward.inserting_before(forward.output_node()):
                shard = shard_of_name[unshard.shard]
                part_of_bucket[unshard.bucket] = ops.call(forward, ops.PART, shard, *arguments)
    return part_of_bucket


def _recompute(
    graph: torch.fx.Graph, node: torch.fx.Node, regained: dict[torch.fx.Node, torch.fx.Node]
) -> torch.fx.Node:
    """A copy of `node` and of all that it follows from, on top of `regained`."""
    if node not in regained:
        for source in node.all_input_nodes:
            _recompute(graph, source, regained)
        regained[node] = graph.node_copy(node, regained.__getitem__)
    return regained[node]


def _regain_unshards(
    graph: torch.fx.Graph,
    unshard_of_input: Mapping[torch.fx.Node, Unshard],
    input_of_name: Mapping[str, torch.fx.Node],
) -> None:
    first_compute = next(node for node in graph.nodes if node.op != "placeholder")
    for full, unshard in unshard_of_input.items():
        with graph.inserting_before(first_compute):
            gathered = None if unshard.gathered is None else input_of_name[unshard.gathered]
            regained = unshard.call(graph, input_of_name[unshard.shard], full.meta["val"], gathered)
            full.replace_all_uses_with(regained)
        graph.erase_node(full)
    analysis.erase_dead(graph)
