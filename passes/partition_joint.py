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

What the forward computes for the backward alone, which the partitioner leaves at its end, is computed as soon as its
inputs are known: there the compiler does it in the kernel that computes those.

An input that the forward writes to (a counter, a running average) has another value when the backward runs. Of such an
input the forward saves a copy, made before it writes (pytorch/pytorch#197039), and the partitioner counts its bytes.

Random values are drawn once. Under an activation memory budget the partitioner would have the backward draw them again,
and get others (pytorch/pytorch#190758); the forward saves them instead. Within a checkpointed region the partitioner
itself saves the state of the generator.

A unit that is not resharded after the forward is the exception: its full parameters are saved. Where `reshard` does not
say otherwise, that is the unit which the forward uses last and the backward needs first: freeing it would buy nothing.
A unit may also be sharded again over a smaller group (`metadata.Part`): the part is saved, and gathered over that
group.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch.fx
from functorch.compile import min_cut_rematerialization_partition

from . import analysis, metadata, ops
from .errors import pass_error
from .merge_unshards import refuse_repeated_unshards

_PREFIX = "primals_unsharded_"  # the partitioner takes inputs by name: `primals` are the forward's


@dataclasses.dataclass(frozen=True)
class PartitionJoint:
    """`reshard` maps names of units to whether they are resharded after the forward; see the module's text."""

    reshard: Mapping[str, bool | metadata.Part] = dataclasses.field(default_factory=dict)

    def reshard_halves(self, halves: Halves) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        """Forward and backward from what the partitioner left, which is changed."""
        if halves.unshards:
            crossing = Crossing.of(halves.forward, halves.backward, halves.num_fwd_outputs, halves.unshards)
            _reshard(crossing, kept_buckets(crossing, self.reshard), self.reshard)
        return halves.forward, halves.backward


@dataclasses.dataclass(frozen=True)
class Halves:
    """The two halves of a joint graph as the partitioner left them, full parameters inputs of the forward.

    Attributes:
        unshards: the erased unshards by the name of the input that stands for each.
    """

    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule
    num_fwd_outputs: int
    unshards: Mapping[str, Unshard]

    @classmethod
    def of(cls, joint: torch.fx.GraphModule, num_fwd_outputs: int, static_inputs: Sequence[int]) -> Halves:
        """What the partitioner makes of `joint`, whose first `num_fwd_outputs` outputs are the forward's.

        `static_inputs` are the positions of the inputs that live as long as the model: the partitioner saves them free.
        """
        refuse_repeated_unshards(joint.graph)
        unshards = _present_as_inputs(joint.graph)
        written = {node.name for node in analysis.written_inputs(joint.graph)}
        static = {*static_inputs, *_positions_of_primals(joint.graph, unshards)}
        static -= set(_positions_of_primals(joint.graph, written))
        forward, backward = min_cut_rematerialization_partition(
            joint, [], num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=sorted(static)
        )
        _save_before_writes(forward.graph, backward.graph, num_fwd_outputs)
        _draw_once(forward.graph, backward.graph, num_fwd_outputs)
        _save_early(forward.graph, num_fwd_outputs)
        return cls(forward, backward, num_fwd_outputs, unshards)

    def copy(self) -> Halves:
        """The same with graphs of its own."""
        forward, backward = (torch.fx.GraphModule(gm, copy.deepcopy(gm.graph)) for gm in (self.forward, self.backward))
        return dataclasses.replace(self, forward=forward, backward=backward)


@dataclasses.dataclass(frozen=True)
class Unshard:
    """An erased unshard: the name of the graph input that it read, and its other arguments."""

    shard: str
    arguments: tuple[Any, ...]
    bucket: str
    parameter: str
    world_size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, node: torch.fx.Node) -> Unshard:
        bucket, parameter, world_size = (ops.argument(node, name) for name in ("bucket", "parameter", "world_size"))
        arguments = (None, *node.args[2:])  # what is accumulated meets the gradient, in the backward
        return cls(ops.argument(node, "shard").name, arguments, bucket, parameter, world_size, node.meta["val"].dtype)


def _present_as_inputs(graph: torch.fx.Graph) -> dict[str, Unshard]:
    """Replace every unshard by a new input; returns the unshards by the name of that input."""
    unshard_of_input: dict[str, Unshard] = {}
    anchor = [node for node in analysis.inputs(graph) if "primals" in str(node.target)][-1:]
    for node in [node for node in graph.nodes if ops.is_call(node, ops.UNSHARD)]:
        with graph.inserting_after(anchor[0]):
            full = graph.placeholder(f"{_PREFIX}{len(unshard_of_input)}")
        full.meta = {**ops.argument(node, "shard").meta, "val": node.meta["val"]}
        full.meta.pop("tensor_meta", None)
        node.replace_all_uses_with(full)
        unshard_of_input[full.name] = Unshard.of(node)
        anchor = [full]
        graph.erase_node(node)
    return unshard_of_input


def _positions_of_primals(graph: torch.fx.Graph, names: Collection[str]) -> list[int]:
    primals = [node for node in analysis.inputs(graph) if "primals" in str(node.target)]
    return [index for index, node in enumerate(primals) if node.name in names]


def _save_before_writes(forward: torch.fx.Graph, backward: torch.fx.Graph, num_fwd_outputs: int) -> None:
    """Save copies of inputs that are written to, and of views of them, as they are before that.

    An input that the backward writes to as well is saved, too: it writes to the input, and reads the copy.
    """
    first_write = {
        alias: write for node, write in analysis.written_inputs(forward).items() for alias in analysis.aliases(node)
    }
    replaced = [value for value in analysis.outputs(forward)[num_fwd_outputs:] if value in first_write]
    if not replaced:
        return
    input_of_name, write_in_backward = {n.name: n for n in analysis.inputs(backward)}, analysis.written_inputs(backward)
    anchor = _first_saved_tensor(backward)
    copies = []
    for value in replaced:
        given = input_of_name[value.name]
        write = write_in_backward.get(given)
        with forward.inserting_before(first_write[value]):
            copied = ops.call(forward, torch.ops.aten.clone.default, value)
        with backward.inserting_before(anchor):
            taken = backward.placeholder(copied.name)
        taken.meta = dict(copied.meta)
        given.replace_all_uses_with(taken, delete_user_cb=partial(operator.is_not, write))
        copies.append(copied)
    unread = [value for value in replaced if not input_of_name[value.name].users]
    for value in unread:
        backward.erase_node(input_of_name[value.name])
    _save_instead(forward, num_fwd_outputs, unread, copies)


def _draw_once(forward: torch.fx.Graph, backward: torch.fx.Graph, num_fwd_outputs: int) -> None:
    """Save what the forward draws wherever the backward would draw again; a node has the same name on both sides."""
    node_of_name = {node.name: node for node in forward.nodes}
    again = [node for node in backward.nodes if analysis.is_random(node) and node.name in node_of_name]
    anchor = _first_saved_tensor(backward)
    saved = []
    for node in again:
        for result in _results(node):
            if result.name not in node_of_name:  # one of several, which the forward has no use for
                with forward.inserting_after(node_of_name[node.name]):
                    node_of_name[result.name] = forward.node_copy(result, lambda source: node_of_name[source.name])
            saved.append(node_of_name[result.name])
            with backward.inserting_before(anchor):
                taken = backward.placeholder(result.name)
            taken.meta = dict(result.meta)
            result.replace_all_uses_with(taken)
        for dead in (*node.users, node):
            backward.erase_node(dead)
    backward.eliminate_dead_code()
    _save_instead(forward, num_fwd_outputs, [], saved)


def _results(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The tensors that a node computes, those of them that are read."""
    if isinstance(node.meta["val"], torch.Tensor):
        return [node] if node.users else []
    return [item for item in node.users if item.users]


def _save_early(forward: torch.fx.Graph, num_fwd_outputs: int) -> None:
    """Move what is computed for the backward alone to where it can be computed first; from inputs, it can wait."""
    needed: set[Any] = set(analysis.outputs(forward)[:num_fwd_outputs])
    key: dict[torch.fx.Node, tuple[int, ...]] = {}
    for node in reversed(forward.nodes):
        is_pure_call = node.op == "call_function" and not node.is_impure() and not analysis.is_random(node)
        if node.op != "output" and (node in needed or not is_pure_call):
            needed.update((node, *node.all_input_nodes))
    for index, node in enumerate(forward.nodes):
        source = max(node.all_input_nodes, key=key.__getitem__, default=node)
        is_result = node.target is operator.getitem and source in needed
        is_first = source is node or source.op == "placeholder"
        stays = node.op == "output" or node in needed or is_result or is_first
        key[node] = (index,) if stays else (*key[source], index)
    analysis.reorder(forward, key)


@dataclasses.dataclass(frozen=True)
class Crossing:
    """What goes from the forward to the backward, with the full parameters still inputs of the forward.

    Attributes:
        unshard_of_input: for each full parameter among the forward's inputs, the erased unshard that it stands for.
        input_of_saved: for each value that follows from full parameters alone and that the forward saves, the
            backward's input that receives it.
    """

    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule
    num_fwd_outputs: int
    unshard_of_input: Mapping[torch.fx.Node, Unshard]
    input_of_saved: Mapping[torch.fx.Node, torch.fx.Node]

    @classmethod
    def of(
        cls,
        forward: torch.fx.GraphModule,
        backward: torch.fx.GraphModule,
        num_fwd_outputs: int,
        unshards: Mapping[str, Unshard],
    ) -> Crossing:
        inputs_of_forward = analysis.inputs(forward.graph)
        unshard_of_input = {node: unshards[node.name] for node in inputs_of_forward if node.name in unshards}
        input_of_name = {node.name: node for node in analysis.inputs(backward.graph)}
        from_parameters = analysis.parameter_only(forward.graph, set(unshard_of_input))
        input_of_saved = {}
        for saved in analysis.outputs(forward.graph)[num_fwd_outputs:]:
            if saved not in from_parameters:
                continue
            if saved.name not in input_of_name:
                raise pass_error("the partitioner saved this, which the backward does not take", saved)
            input_of_saved[saved] = input_of_name[saved.name]
        return cls(forward, backward, num_fwd_outputs, unshard_of_input, input_of_saved)

    def roots(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        """The full parameters that `node`, which follows from nothing else, follows from."""
        if node in self.unshard_of_input:
            return [node]
        found = dict.fromkeys(root for source in node.all_input_nodes for root in self.roots(source))
        return list(found)


def kept_buckets(crossing: Crossing, reshard: Mapping[str, bool | metadata.Part]) -> set[str]:
    """The buckets whose full parameters the forward saves for the backward."""
    needed = {root for saved in crossing.input_of_saved for root in crossing.roots(saved)}
    gathered = {
        root: unshard.bucket
        for root, unshard in crossing.unshard_of_input.items()
        if root in needed and unshard.world_size > 1
    }
    last_unit = _last_unit(crossing.forward.graph, gathered)
    kept = set()
    for bucket in gathered.values():
        unit = ops.unit_of_bucket(bucket)
        if not reshard.get(unit, unit != last_unit):
            kept.add(bucket)
    return kept


def _last_unit(graph: torch.fx.Graph, bucket_of_parameter: Mapping[torch.fx.Node, str]) -> str | None:
    """The unit whose parameters are computed with last."""
    if not bucket_of_parameter:
        return None
    position = analysis.positions(graph)

    def last_compute(parameter: torch.fx.Node) -> int:
        users = {user for alias in analysis.aliases(parameter) for user in alias.users if user.op != "output"}
        return max((position[user] for user in users), default=-1)

    return ops.unit_of_bucket(bucket_of_parameter[max(bucket_of_parameter, key=last_compute)])


def _reshard(crossing: Crossing, kept: set[str], reshard: Mapping[str, bool | metadata.Part]) -> None:
    """Give each side its own unshards, and save shards (or parts) and kept parameters in place of what follows."""
    forward, backward = crossing.forward.graph, crossing.backward.graph
    removed = list(crossing.input_of_saved)
    roots = dict.fromkeys(root for saved in removed for root in crossing.roots(saved))
    anchor = _first_saved_tensor(backward)
    newly_saved: dict[torch.fx.Node, torch.fx.Node] = {}  # by the forward's node: the backward's input
    regained: dict[torch.fx.Node, torch.fx.Node] = {}  # by the forward's node: the backward's
    part_of_bucket: dict[str, torch.fx.Node] = {}
    shard_of_name = {node.name: node for node in analysis.inputs(forward)}

    def save(node: torch.fx.Node) -> torch.fx.Node:
        if node not in newly_saved:
            with backward.inserting_before(anchor):
                newly_saved[node] = backward.placeholder(node.name)
            newly_saved[node].meta = dict(node.meta)
        return newly_saved[node]

    first_compute = next(node for node in backward.nodes if node.op != "placeholder")

    def parted(unshard: Unshard, part: metadata.Part) -> torch.fx.Node:
        if unshard.bucket not in part_of_bucket:
            shard = shard_of_name[unshard.shard]
            arguments = unshard.bucket, unshard.world_size, part.size, part.index, unshard.dtype
            with forward.inserting_before(forward.output_node()):
                part_of_bucket[unshard.bucket] = ops.call(forward, ops.PART, shard, *arguments)
        return part_of_bucket[unshard.bucket]

    for root in roots:
        unshard = crossing.unshard_of_input[root]
        if unshard.bucket in kept:
            regained[root] = save(root)
            metadata.keep_parameter(regained[root], metadata.FullParameter(unshard.parameter, unshard.bucket))
        else:
            part = reshard.get(ops.unit_of_bucket(unshard.bucket))
            if isinstance(part, metadata.Part) and unshard.world_size > 1:
                shard = save(parted(unshard, part))
                metadata.keep_part(shard, part)
            else:
                shard = save(shard_of_name[unshard.shard])
            with backward.inserting_before(first_compute):
                regained[root] = ops.call(backward, ops.UNSHARD, shard, *unshard.arguments)
    with backward.inserting_before(first_compute):
        for saved in removed:
            crossing.input_of_saved[saved].replace_all_uses_with(_recompute(backward, saved, regained))
    for saved in removed:
        backward.erase_node(crossing.input_of_saved[saved])
    _save_instead(forward, crossing.num_fwd_outputs, removed, list(newly_saved))
    _regain_unshards(forward, crossing.unshard_of_input, shard_of_name)


def _first_saved_tensor(backward: torch.fx.Graph) -> torch.fx.Node:
    """Saved sizes (SymInts) come first among the backward's inputs; saved tensors begin here."""
    return next(node for node in analysis.inputs(backward) if isinstance(node.meta["val"], torch.Tensor))


def _recompute(
    graph: torch.fx.Graph, node: torch.fx.Node, regained: dict[torch.fx.Node, torch.fx.Node]
) -> torch.fx.Node:
    """A copy of `node` and of all that it follows from, on top of `regained`."""
    if node not in regained:
        for source in node.all_input_nodes:
            _recompute(graph, source, regained)
        regained[node] = graph.node_copy(node, regained.__getitem__)
    return regained[node]


def _save_instead(
    forward: torch.fx.Graph, num_fwd_outputs: int, removed: list[torch.fx.Node], added: list[torch.fx.Node]
) -> None:
    output = forward.output_node()
    values = analysis.outputs(forward)
    num = num_fwd_outputs
    output.args = ((*values[:num], *added, *(value for value in values[num:] if value not in removed)),)
    if "desc" in output.meta:  # AOTAutograd's description of each output
        described = list(output.meta["desc"])
        saved = described[num:]
        num_saved = len(output.args[0]) - num
        output.meta["desc"] = described[:num] + [saved[min(i, len(saved) - 1)] for i in range(num_saved)]


def _regain_unshards(
    graph: torch.fx.Graph,
    unshard_of_input: Mapping[torch.fx.Node, Unshard],
    shard_of_name: Mapping[str, torch.fx.Node],
) -> None:
    first_compute = next(node for node in graph.nodes if node.op != "placeholder")
    for full, unshard in unshard_of_input.items():
        with graph.inserting_before(first_compute):
            shard = shard_of_name[unshard.shard]
            full.replace_all_uses_with(ops.call(graph, ops.UNSHARD, shard, *unshard.arguments))
        graph.erase_node(full)
    graph.eliminate_dead_code()
