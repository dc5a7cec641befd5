"""The verifier. Its lists of invariants are the definition of a well-formed graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Set
from typing import Any

import torch
import torch.fx

from . import analysis, metadata, ops
from .errors import VerifyError
from .insert_all_gather import InsertAllGather
from .insert_free import InsertFree
from .insert_reduce_scatter import InsertReduceScatter
from .lower_collectives import LowerCollectives
from .merge_unshards import MergeUnshards
from .overlap_copies import OverlapCopies
from .partition_joint import PartitionJoint
from .printer import excerpt, printed_name, target_name
from .update_in_backward import UpdateInBackward, readers_of_shards


@dataclasses.dataclass(frozen=True)
class Signature:
    """What a pass must not change: the values that go in and come out, by shape and dtype.

    A gradient that an update takes counts as the output that it would be.
    """

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]

    @classmethod
    def of(cls, gm: torch.fx.GraphModule) -> Signature:
        outputs = analysis.outputs(gm.graph)
        for update in ops.updates(gm.graph):
            outputs[ops.argument(update, "output")] = update.args[0]
        return cls(tuple(_describe(node) for node in analysis.inputs(gm.graph)), tuple(map(_describe, outputs)))


def _describe(value: Any) -> Any:
    found = value.meta.get("val") if isinstance(value, torch.fx.Node) else value
    return (found.dtype, tuple(found.shape)) if isinstance(found, torch.Tensor) else type(found)


@dataclasses.dataclass(frozen=True)
class Stage:
    """How far a graph has come: a row of `STAGES`.

    Attributes:
        after: the pass with which the stage begins; it lasts until a pass with which another one begins.
        operators: those of the dialect that are legal in the graph.
    """

    after: type
    operators: Set[Any]


_CAPTURED = {ops.UNSHARD, ops.REDUCE_GRADIENT, ops.PACK}
_REDUCTIONS = {ops.REDUCE_SCATTER, ops.REDUCE_SCATTER_GROUPED, ops.ALL_REDUCE, ops.ALL_TO_ALL, ops.SUM_UP, ops.PACK}
_REDUCTIONS |= {ops.REMAINDER, ops.KEEP, ops.NARROW, ops.ALL_GATHER_SUMS}
_GATHERS = {ops.ALL_GATHER, ops.ALL_GATHER_GROUPED, ops.NARROW, ops.JOIN, ops.COPY_OUT, ops.VIEW_OUT, ops.RESHARD}
_GATHERS |= {ops.SCALE}
_PREPARED = {ops.WAIT, ops.CAST, ops.DIVIDE}
_BOTH = _PREPARED | {ops.MOVE}

STAGES = (
    Stage(MergeUnshards, _CAPTURED | {ops.SCALE}),
    Stage(PartitionJoint, _CAPTURED | {ops.PART, ops.SCALE}),
    Stage(InsertReduceScatter, _REDUCTIONS | _BOTH | {ops.UNSHARD, ops.PART, ops.SCALE}),
    Stage(InsertAllGather, _REDUCTIONS | _BOTH | _GATHERS),
    Stage(InsertFree, _REDUCTIONS | _BOTH | _GATHERS | {ops.FREE, ops.STORE}),
    Stage(OverlapCopies, _REDUCTIONS | _PREPARED | _GATHERS | ops.COPIES | {ops.FREE, ops.STORE}),
    Stage(UpdateInBackward, _REDUCTIONS | _PREPARED | _GATHERS | ops.COPIES | {ops.FREE, ops.STORE, ops.UPDATE}),
    Stage(LowerCollectives, ops.LOWERED),
)
"""What is legal after which pass, in the order in which they run."""


def stage_after(step: object, before: Stage) -> Stage:
    """The stage of a graph after a pass has run on it, from the stage before."""
    return next((stage for stage in STAGES if stage.after is type(step)), before)


def verify(gm: torch.fx.GraphModule, stage: Stage, *, signature: Signature | None = None, freed: bool = False) -> None:
    """Raise `VerifyError` unless

    1. the graph is well formed (`Graph.lint`): values are defined before they are used;
    2. every operator of the dialect, and every value that it reads, has `meta["val"]`;
    3. inputs and outputs agree with `signature`, where one is given;
    4. every collective and every copy is waited for once, and nothing else reads its result;
    5. collectives of a kind are waited for in the order in which they start;
    6. nothing reads a full buffer, or a view of one, after its free, and it is freed once; what the model's own
        collectives read is not freed before they are waited for;
    7. with `freed`: every full buffer that the graph does not return is freed, right after its last use;
    8. a reduction returns a gradient of its shard's size;
    9. the operators of the dialect are those of the stage (`STAGES`): when all is lowered, `ops.LOWERED`;
    10. a gradient that an update takes is not returned, and no other update takes it; until all is lowered, nothing
        reads the memory of a shard after its update;
    11. a pack that takes a residual is followed by one keep of what its message loses, of the same gradients.
    """
    _lint(gm.graph)
    for check in (_values, _waits, _wait_order, _frees, _gradients, _residuals, _updates_last):
        check(gm.graph)
    for node in filter(ops.is_dialect, gm.graph.nodes):
        name = target_name(node)
        _require(node.target in stage.operators, f"calls {name}, which is not legal after {stage.after.__name__}", node)
    _same_signature(gm, signature)
    if freed:
        _all_freed(gm.graph)


def verify_crossing(forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, num_fwd_outputs: int) -> None:
    """Raise `VerifyError` unless

    1. nothing that follows from full parameters alone is saved for the backward, except for parameters that are kept;
    2. the forward saves as many values as the backward takes, tangents and generators aside;
    3. the gradient of a shard has the shard's size.
    """
    graph = forward.graph
    kept = {marked.parameter for node in analysis.inputs(backward.graph) if (marked := metadata.kept_parameter(node))}
    unshards = {node for node in graph.nodes if ops.is_call(node, ops.UNSHARD)}
    full = analysis.parameter_only(graph, unshards)
    saved = analysis.outputs(graph)[num_fwd_outputs:]
    for node in saved:
        is_kept = ops.is_call(node, ops.UNSHARD) and ops.argument(node, "parameter") in kept
        _require(node not in full or is_kept, "is full and saved for the backward, but not kept", node)
    taken = [node for node in analysis.inputs(backward.graph) if not ops.is_tangent(node)]
    num_taken = len([node for node in taken if not ops.is_generator(node)])
    if len(saved) != num_taken:
        raise VerifyError(f"the forward saves {len(saved)} values, the backward takes {num_taken}")
    shards = {ops.argument(node, "shard") for node in unshards}
    for node, gradient in zip(analysis.inputs(graph), analysis.outputs(backward.graph), strict=False):
        if node in shards and gradient is not None:
            same = _describe(gradient) == _describe(node)
            _require(same, f"has the gradient {_describe(gradient)}, which is not of its shape", node)


def _require(condition: bool, message: str, node: torch.fx.Node, *others: torch.fx.Node) -> None:
    """Raise `VerifyError` unless the condition holds, with the printed names of `others` in place of each `{}`."""
    if not condition:
        said = message.format(*map(printed_name, others))
        raise VerifyError(f"{printed_name(node)} {said}\n{excerpt(node)}")


def _same_signature(gm: torch.fx.GraphModule, signature: Signature | None) -> None:
    if signature is not None and Signature.of(gm) != signature:
        raise VerifyError(f"inputs or outputs changed from {signature} to {Signature.of(gm)}")


def _lint(graph: torch.fx.Graph) -> None:
    try:
        graph.lint()
    except RuntimeError as e:
        raise VerifyError(f"the graph is not well formed: {e}") from e


def _values(graph: torch.fx.Graph) -> None:
    for node in filter(ops.is_dialect, graph.nodes):
        for value in (node, *node.all_input_nodes):
            _require("val" in value.meta, "has no value in its metadata", value)


def _waits(graph: torch.fx.Graph) -> None:
    for node in graph.nodes:
        if ops.is_collective(node) or ops.is_call(node, ops.COPY_START):
            users = list(node.users)
            read_by = ", ".join("{}" for _ in users) or "nothing"
            wait, name = (ops.WAIT, "fsdp.wait") if ops.is_collective(node) else (ops.COPY_WAIT, "fsdp.copy_wait")
            remedy = f"one {name} has to read it, and all others read that"
            _require(len(users) == 1, f"needs one wait, and is read by {read_by}: {remedy}", node, *users)
            _require(ops.is_call(users[0], wait), f"is read by {{}} without a wait: {remedy}", node, users[0])


def _wait_order(graph: torch.fx.Graph) -> None:
    position = analysis.positions(graph)
    kinds: tuple[Callable[[torch.fx.Node], bool], ...] = (ops.is_all_gather, ops.is_reduction)
    for is_kind in kinds:
        last = -1
        for node in filter(is_kind, graph.nodes):
            wait = position[ops.wait_of(node)]
            _require(wait > last, "starts after a collective that is waited for later", node)
            last = wait


def _frees(graph: torch.fx.Graph) -> None:
    position = analysis.positions(graph)
    full = set(analysis.full_buffers(graph))
    freed: set[Any] = set()
    for node in graph.nodes:
        if ops.is_call(node, ops.FREE):
            buffer: Any = node.args[0]
            _require(buffer not in freed, "frees {} a second time", node, buffer)
            _require(buffer in full, "frees {}, which is no full buffer but at most a view of one", node, buffer)
            freed.add(buffer)
            for user in analysis.uses(buffer):
                early = user is node or position[user] < position[node]
                _require(early, "frees {}, which {} still reads", node, buffer, user)


def _all_freed(graph: torch.fx.Graph) -> None:
    position, nodes = analysis.positions(graph), list(graph.nodes)
    for buffer in analysis.full_buffers(graph):
        end = analysis.last_use(buffer, position)
        if end.op == "output":
            continue
        _require(ops.is_call(end, ops.FREE), "is not freed", buffer)
        last = max(position[use] for use in analysis.uses(buffer) if use is not end)
        gap = nodes[last + 1 : position[end]]
        late = [node for node in gap if not ops.is_call(node, ops.FREE, ops.STORE)]
        _require(not late, f"is freed late, after {', '.join('{}' for _ in late)}", buffer, *late)


def _gradients(graph: torch.fx.Graph) -> None:
    for node in graph.nodes:
        if ops.is_call(node, ops.REDUCE_GRADIENT, ops.REDUCE_SCATTER_GROUPED, ops.SUM_UP):
            numel, found = ops.argument(node, "numel"), node.meta["val"].numel()
            _require(numel == found, f"returns {found} elements for a shard of {numel}", node)
        if ops.is_call(node, ops.REDUCE_SCATTER) and ops.is_call(node.args[0], ops.PACK):
            numel, found = ops.argument(node.args[0], "numel"), node.meta["val"].numel()
            _require(numel == found, f"returns {found} elements for a shard of {numel}", node)


def _residuals(graph: torch.fx.Graph) -> None:
    position = analysis.positions(graph)
    for pack in graph.find_nodes(op="call_function", target=ops.PACK):
        residual = ops.argument(pack, "residual")
        if residual is None:
            continue
        keeps = [node for node in residual.users if ops.is_call(node, ops.KEEP)]
        _require(len(keeps) == 1, f"takes {{}}, which {len(keeps)} keeps give a new value: one has to", pack, residual)
        remainder: Any = keeps[0].args[0]
        packed = ops.argument(pack, "gradients")
        is_of_it = ops.is_call(remainder, ops.REMAINDER) and ops.argument(remainder, "gradients") == packed
        _require(is_of_it, "keeps {}, which is not what {} loses", keeps[0], remainder, pack)
        _require(position[pack] < position[remainder], "is there before {}, whose message loses it", remainder, pack)


def _updates_last(graph: torch.fx.Graph) -> None:
    if not (updates := ops.updates(graph)):
        return
    position, readers, returned = analysis.positions(graph), readers_of_shards(graph), analysis.outputs(graph)
    updated: set[int] = set()
    for update in updates:
        gradient: Any = update.args[0]
        output = ops.argument(update, "output")
        _require(returned[output] is None, "takes {}, which is returned as well", update, gradient)
        _require(output not in updated, "takes {} a second time", update, gradient)
        updated.add(output)
        for reader in readers.get(ops.argument(update, "bucket"), ()):
            _require(position[reader] < position[update], "updates a shard that {} reads after that", update, reader)
