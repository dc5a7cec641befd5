"""The two halves of a joint graph: torch's min-cut partitioner, and what it leaves to be put right.

What the forward computes for the backward alone, which the partitioner leaves at its end, is computed as soon as its
inputs are known: there the compiler does it in the kernel that computes those.

An input that the forward writes to (a counter, a running average) has another value when the backward runs. Of such an
input the forward saves a copy, made before it writes (pytorch/pytorch#197039), and the partitioner counts its bytes.

Random values are drawn once. Under an activation memory budget the partitioner would have the backward draw them again,
and get others (pytorch/pytorch#190758); the forward saves them instead. Within a checkpointed region the partitioner
itself saves the state of the generator.
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

from . import analysis, ops
from .merge_unshards import refuse_repeated_unshards

_PREFIX = "primals_unsharded_"  # the partitioner takes inputs by name: `primals` are the forward's


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

    def copies(self) -> Halves:
        """The same with graphs of its own."""
        return dataclasses.replace(self, forward=copy_of(self.forward), backward=copy_of(self.backward))


def copy_of(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The same module around a copy of its graph; its code is generated when that of the module is, at once or late."""
    of_module: Any = type(gm).__base__  # every graph module has a class of its own
    copied: torch.fx.GraphModule = of_module(gm, copy.deepcopy(gm.graph))
    return copied


@dataclasses.dataclass(frozen=True)
class Unshard:
    """An erased unshard: the name of the graph input that it read, and its other arguments.

    Attributes:
        gathered: the name of the input that brings what was gathered before, if anything was.
    """

    shard: str
    arguments: tuple[Any, ...]
    bucket: str
    parameter: str
    world_size: int
    dtype: torch.dtype
    gathered: str | None = None

    def call(
        self, graph: torch.fx.Graph, shard: torch.fx.Node, value: Any, gathered: torch.fx.Node | None = None
    ) -> torch.fx.Node:
        """Insert it again; `gathered` is the node of that name."""
        return ops.call(graph, ops.UNSHARD, shard, *self.arguments, *filter(None, [gathered]), value=value)

    @classmethod
    def of(cls, node: torch.fx.Node) -> Unshard:
        bucket, parameter, world_size = (ops.argument(node, name) for name in ("bucket", "parameter", "world_size"))
        shard, gathered = (ops.argument(node, name) for name in ("shard", "gathered"))
        constants = node.args[3:] if gathered is None else node.args[3:-1]
        arguments = (None, None, *constants)  # what earlier steps have left meets the gradient, in the backward
        dtype, name = node.meta["val"].dtype, None if gathered is None else gathered.name
        return cls(shard.name, arguments, bucket, parameter, world_size, dtype, name)


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
    anchor = first_saved_tensor(backward)
    copies = []
    for value in replaced:
        given = input_of_name[value.name]
        write = write_in_backward.get(given)
        with forward.inserting_before(first_write[value]):
            copied = ops.call(forward, torch.ops.aten.clone.default, value)
        taken = take(backward, anchor, copied)
        given.replace_all_uses_with(taken, delete_user_cb=partial(operator.is_not, write))
        copies.append(copied)
    unread = [value for value in replaced if not input_of_name[value.name].users]
    for value in unread:
        backward.erase_node(input_of_name[value.name])
    save_instead(forward, num_fwd_outputs, unread, copies)


def _draw_once(forward: torch.fx.Graph, backward: torch.fx.Graph, num_fwd_outputs: int) -> None:
    """Save what the forward draws wherever the backward would draw again; a node has the same name on both sides."""
    node_of_name = {node.name: node for node in forward.nodes}
    again = [node for node in backward.nodes if analysis.is_random(node) and node.name in node_of_name]
    anchor = first_saved_tensor(backward)
    saved = []
    for node in again:
        for result in _results(node):
            if result.name not in node_of_name:  # one of several, which the forward has no use for
                with forward.inserting_after(node_of_name[node.name]):
                    node_of_name[result.name] = forward.node_copy(result, lambda source: node_of_name[source.name])
            saved.append(node_of_name[result.name])
            result.replace_all_uses_with(take(backward, anchor, result))
        for dead in (*node.users, node):
            backward.erase_node(dead)
    backward.eliminate_dead_code()
    save_instead(forward, num_fwd_outputs, [], saved)


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


def take(backward: torch.fx.Graph, anchor: torch.fx.Node, saved: torch.fx.Node) -> torch.fx.Node:
    """A new input of the backward, before `anchor`, for a value that the forward saves."""
    with backward.inserting_before(anchor):
        taken = backward.placeholder(saved.name)
    taken.meta = dict(saved.meta)
    return taken


def first_saved_tensor(backward: torch.fx.Graph) -> torch.fx.Node:
    """Saved sizes (SymInts) come first among the backward's inputs; saved tensors begin here."""
    return next(node for node in analysis.inputs(backward) if isinstance(node.meta["val"], torch.Tensor))


def save_instead(
    forward: torch.fx.Graph, num_fwd_outputs: int, removed: list[torch.fx.Node], added: list[torch.fx.Node]
) -> None:
    """Save `added` in place of `removed`, before what else is saved."""
    output = forward.output_node()
    values = analysis.outputs(forward)
    num = num_fwd_outputs
    output.args = ((*values[:num], *added, *(value for value in values[num:] if value not in removed)),)
    if "desc" in output.meta:  # AOTAutograd wants as many descriptions as outputs; which of the saved ones, it ignores
        described = list(output.meta["desc"])
        saved = described[num:]
        num_saved = len(output.args[0]) - num
        output.meta["desc"] = described[:num] + [saved[min(i, len(saved) - 1)] for i in range(num_saved)]
