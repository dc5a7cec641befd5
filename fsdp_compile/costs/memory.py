"""Memory: what a rank holds while it runs the scheduled graphs, node by node, by what it holds it for.

A tensor lives from the node that computes it to the last node that reads it or a view of it. What a collective reads
lives until that is waited for. Of values that a compiler computes inside a kernel only those are in memory that are
read outside of it. What the forward saves lives on until the backward has read it.

Not in the graphs, and therefore not counted: what kernels take and give back inside (workspaces, except for the copies
of oneDNN) or keep beside their result (eager's mse_loss, whose number keeps the memory of all elements), what an
allocator rounds up or cannot use, what is made of the model's outputs outside of the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate

import torch
import torch.fx

from ..passes import analysis, metadata, ops
from ..passes.analysis import full_buffers
from ..passes.padding import shard_numel
from ..runtime.inductor import is_onednn_called, onednn_workspace
from .nodes import base, full_bytes, has_extents, is_item, is_kernel, is_light, num_bytes, results
from .work import Work, WorkOfGraph

_aten = torch.ops.aten

CATEGORIES = ("shards", "optimizer", "gradients", "gathered", "reductions", "activations", "temporaries", "inputs")
"""Shards, states of the optimizer, gradients of shards; full parameters, gradients that are being reduced; what the
forward saves for the backward, what is neither; the inputs and buffers of the model."""


@dataclasses.dataclass(frozen=True)
class Moment:
    """What is in memory while a node runs: bytes by category."""

    side: str
    node: torch.fx.Node
    held: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.held.values())


@dataclasses.dataclass(frozen=True)
class Memory:
    """What a step holds, moment by moment."""

    moments: Sequence[Moment]

    @property
    def peak(self) -> Moment:
        """The first moment at which most is held."""
        return max(self.moments, key=lambda moment: moment.total)


@dataclasses.dataclass(frozen=True)
class _Life:
    """Bytes that are held from one position in a graph to another, both included."""

    begin: int
    end: int
    num_bytes: int
    category: str


def memory_of(work: Work, *, optimizer_bytes: int = 0, reduction_workspace: float = 0.0) -> Memory:
    """What a rank holds during forward and backward.

    Args:
        optimizer_bytes: of the states of the optimizer; Adam in float32 has 8 for each element of a shard.
        reduction_workspace: bytes that a reduce-scatter takes for itself, for each byte that it reduces.
    """
    forward, is_reused = work.forward.graph, work.compiler == "inductor"
    resident = {"optimizer": optimizer_bytes, "shards": 0, "gathered": 0, "inputs": 0}
    gathered = set(analysis.gathered_inputs(forward))
    for node in analysis.inputs(forward):
        category = "gathered" if node in gathered else "shards" if is_shard(node) else "inputs"
        resident[category] += num_bytes(node.meta["val"])
    received = {} if work.backward is None else received_by_backward(forward, work.backward.graph)
    life_of_tensor = _lives(work.forward, saved=received.keys(), is_reused=is_reused)
    moments = _moments("forward", forward, life_of_tensor.values(), resident)
    if work.backward is not None:
        backward = work.backward.graph
        position = analysis.positions(backward)
        end = {sent: position[analysis.last_use(node, position)] for sent, node in received.items()}
        carried = [
            dataclasses.replace(life, begin=0, end=max(end[alias] for alias in saved))
            for tensor, life in life_of_tensor.items()
            if (saved := received.keys() & set(analysis.aliases(tensor)))
        ]
        lives = [*carried, *_lives(work.backward, saved=(), is_reused=is_reused).values()]
        lives += _workspaces(backward, reduction_workspace)
        lives += _copies_of_matmuls(backward) if is_reused else []
        moments += _moments("backward", backward, lives, resident)
    return Memory(moments)


def received_by_backward(forward: torch.fx.Graph, backward: torch.fx.Graph) -> dict[torch.fx.Node, torch.fx.Node]:
    """The values that the forward saves, and the inputs of the backward that receive them."""
    received = [node for node in analysis.inputs(backward) if not ops.is_tangent(node) and not ops.is_generator(node)]
    sent = analysis.outputs(forward)
    saved = sent[len(sent) - len(received) :]
    saved.sort(key=lambda node: has_extents(node.meta.get("val")))  # the backward takes sizes first
    return dict(zip(saved, received, strict=True))


def is_shard(node: torch.fx.Node) -> bool:
    """Whether an input of the forward is a shard: it is gathered, or its parameters are viewed."""
    return metadata.gathered_bucket(node) is not None or any(
        ops.is_all_gather(user) or ops.is_parameter_out(user) or (_is_form_of_shards(user) and is_shard(user))
        for user in node.users
    )


def _is_form_of_shards(node: torch.fx.Node) -> bool:
    return ops.is_conversion(node) or ops.is_call(node, ops.JOIN)


def _lives(work: WorkOfGraph, *, saved: Collection[torch.fx.Node], is_reused: bool) -> dict[torch.fx.Node, _Life]:
    """The lives of all tensors that the graph brings into memory.

    Args:
        is_reused: whether dead buffers are taken for later ones.
    """
    graph = work.graph
    time = analysis.positions(graph)
    not_written: set[torch.fx.Node] = set()
    for kernel in work.kernels:
        time |= dict.fromkeys(kernel.nodes, time[kernel.nodes[-1]])  # a kernel reads and writes at one time
        not_written |= set(kernel.nodes) - set(kernel.written)
    category_of = _categories(graph, saved)
    lives: dict[torch.fx.Node, _Life] = {}
    for node in graph.nodes:
        if node.op != "call_function" or analysis.is_alias(node) or is_item(node) or node in not_written:
            continue
        if ops.is_functional_wait(node):
            continue  # what it returns has been in memory since its collective began
        if ops.is_call(node, ops.ALL_GATHER_GROUPED):
            lives |= _lives_of_messages(node, time)
            continue
        for tensor in map(_received, results(node)):
            if size := num_bytes(tensor.meta.get("val")):
                ends = [_end(reader, time) for reader in analysis.uses(tensor) if not ops.is_call(reader, ops.FREE)]
                lives[tensor] = _Life(time[node], max(ends), size, category_of(tensor))
    return _with_reuse(_with_expressions(lives, time)) if is_reused else lives


def _received(tensor: torch.fx.Node) -> torch.fx.Node:
    """What stands for a tensor in the graph: of what a collective of the model brings, what its wait returns."""
    return next(filter(ops.is_functional_wait, tensor.users), tensor)


def _lives_of_messages(gather: torch.fx.Node, time: Mapping[torch.fx.Node, int]) -> dict[torch.fx.Node, _Life]:
    """The lives of what a grouped gather brings: every parameter is in memory by itself."""
    (wait,) = gather.users
    lives: dict[torch.fx.Node, _Life] = {}
    copied = [out for out in wait.users if ops.is_call(out, ops.COPY_OUT)]
    if copied:
        ranks, itemsize = ops.argument(gather, "world_size"), gather.meta["val"].element_size()
        size = ranks * itemsize * sum(map(ops.taken_by, copied))
        lives[gather] = _Life(time[gather], max(time[out] for out in copied), size, "gathered")
    for out in (out for out in wait.users if ops.is_call(out, ops.VIEW_OUT)):
        shape, world_size = ops.argument(out, "shape"), ops.argument(out, "world_size")
        size = shard_numel(shape, world_size) * world_size * out.meta["val"].element_size()
        ends = [_end(reader, time) for reader in analysis.uses(out) if not ops.is_call(reader, ops.FREE)]
        lives[out] = _Life(time[gather], max(ends), size, "gathered")
    return lives


def _with_expressions(
    lives: Mapping[torch.fx.Node, _Life], time: Mapping[torch.fx.Node, int]
) -> dict[torch.fx.Node, _Life]:
    """Lives where Inductor writes a cheap value of one tensor only for heavy operators that read a view of it.

    To light kernels that do not read the same view it stays an expression, which each computes anew, and the tensor
    lives until the last of them has read it; but for those that need nothing which comes later, and are fused with the
    one that writes. (torch 2.13, `StorageBox.realize_hint`, `ExternKernel.realize_input`)
    """
    found = dict(lives)
    for node in lives:
        aliases = analysis.aliases(node)
        written = [alias for alias in aliases if any(map(analysis.is_heavy, alias.users))]
        if not written or node in written:
            continue
        source = _source_of_expression(node, time)
        if source not in found:
            continue
        of_written = set[torch.fx.Node]().union(*map(analysis.uses, written))
        readers = analysis.uses(node).difference(of_written, aliases)
        others = [reader for reader in readers if _needs_later(reader, time[node], time)]
        if others and all(map(is_light, others)):
            found[node] = dataclasses.replace(found[node], end=max(time[reader] for reader in of_written))
            end = max([found[source].end, *(time[reader] for reader in others)])
            found[source] = dataclasses.replace(found[source], end=end)
    return found


def _needs_later(reader: torch.fx.Node, moment: int, time: Mapping[torch.fx.Node, int]) -> bool:
    """Whether `reader`, or what its kernel computes of that, needs what is computed after this moment elsewhere."""
    inside = [reader]
    for node in inside:
        if any(moment < time[base(source)] < time[reader] for source in node.all_input_nodes):
            return True
        inside += [user for user in node.users if time[user] == time[reader] and user not in inside]
    return False


def _source_of_expression(node: torch.fx.Node, time: Mapping[torch.fx.Node, int]) -> torch.fx.Node | None:
    """What a value is computed from inside of its kernel, if that is one tensor and cheap to be done again."""
    while True:
        operator = node.target
        if not isinstance(operator, torch._ops.OpOverload) or torch.Tag.pointwise not in operator.tags:
            return None
        sources = {base(source) for source in node.all_input_nodes}
        if len(sources) != 1 or operator in (_aten.exp.default, _aten.sigmoid.default):
            return None
        (source,) = sources
        if not is_light(source) or time[source] != time[node]:
            return source
        node = source


def _with_reuse(lives: Mapping[torch.fx.Node, _Life]) -> dict[torch.fx.Node, _Life]:
    """Lives where the code that Inductor generates takes a dead buffer for the next one of its dtype and size.

    A light kernel writes into a buffer that it is the last to read. Otherwise a dead buffer is kept for a later one, if
    that does not raise the peak by Inductor's estimate. (torch 2.13, `AllocateLine.should_reuse_buffer`)
    """
    found = dict(lives)
    held = _total(lives.values(), 1 + max((life.end for life in lives.values()), default=0))
    peak = max(held, default=0)
    dead: dict[tuple[torch.dtype, int], list[torch.fx.Node]] = {}
    by_end = sorted(filter(_is_kept, lives), key=lambda tensor: lives[tensor].end)
    ended = 0
    for tensor in sorted(filter(_is_taking, lives), key=lambda tensor: lives[tensor].begin):
        begin = lives[tensor].begin
        while ended < len(by_end) and lives[by_end[ended]].end <= begin:
            dead.setdefault(_kind(by_end[ended]), []).append(by_end[ended])
            ended += 1
        candidates = [
            other
            for other in dead.get(_kind(tensor), ())
            if other is not tensor and (lives[other].end < begin or is_light(tensor))
        ]
        if not candidates:
            continue
        other = candidates[-1]
        between = held[lives[other].end + 1 : begin]
        if max(between, default=0) + lives[tensor].num_bytes <= peak or not between:
            dead[_kind(tensor)].remove(other)
            found[other] = dataclasses.replace(lives[other], end=begin - 1)
    for tensor, life in lives.items():
        if ops.is_call(tensor, ops.ALL_REDUCE):
            packed = tensor.all_input_nodes[0]
            if packed in lives and lives[packed].end == life.begin:
                found[packed] = dataclasses.replace(lives[packed], end=life.begin - 1)
    return found


def _is_kept(tensor: torch.fx.Node) -> bool:
    """Whether generated code may keep this tensor for a later one, once it is dead."""
    return is_kernel(tensor) and (not analysis.is_heavy(tensor) or "mm" in str(tensor.target))


def _is_taking(tensor: torch.fx.Node) -> bool:
    """Whether generated code allocates this tensor, or takes a dead one for it; operators of ATen allocate theirs."""
    if ops.is_call(tensor, _aten.mm.default, _aten.addmm.default):
        return not is_onednn_called(*_operands(tensor))
    return is_light(tensor) or "mm" in str(tensor.target)


def _kind(tensor: torch.fx.Node) -> tuple[torch.dtype, int]:
    return tensor.meta["val"].dtype, num_bytes(tensor.meta["val"])


def _total(lives: Iterable[_Life], num_moments: int) -> list[int]:
    """Bytes held at every moment."""
    change = [0] * (num_moments + 1)
    for life in lives:
        change[life.begin] += life.num_bytes
        change[life.end + 1] -= life.num_bytes
    return list(accumulate(change))[:num_moments]


def _workspaces(graph: torch.fx.Graph, reduction_workspace: float) -> list[_Life]:
    """The lives of what reduce-scatters take for themselves."""
    time = analysis.positions(graph)
    return [
        _Life(time[node], _end(node, time), int(reduction_workspace * full_bytes(node)), "reductions")
        for node in graph.nodes
        if ops.is_call(node, ops.REDUCE_SCATTER, ops.REDUCE_SCATTER_GROUPED)
    ]


def _copies_of_matmuls(graph: torch.fx.Graph) -> list[_Life]:
    """The lives of what matmuls of generated code copy first."""
    time = analysis.positions(graph)
    return [
        _Life(time[node], time[node], onednn_workspace(*_operands(node)), "temporaries")
        for node in graph.nodes
        if ops.is_call(node, _aten.mm.default)
    ]


def _operands(matmul: torch.fx.Node) -> list[torch.Tensor]:
    """The two matrices."""
    return [operand.meta["val"] for operand in matmul.args[-2:] if isinstance(operand, torch.fx.Node)]


def _end(reader: torch.fx.Node, time: Mapping[torch.fx.Node, int]) -> int:
    """When `reader` is done with what it reads: a collective, when it has been waited for.

    An all-reduce works on a copy of what it reads; generated code hands it the buffer itself.
    """
    is_reading = ops.is_collective(reader) and not ops.is_call(reader, ops.ALL_REDUCE)
    return time[ops.wait_of(reader)] if is_reading else time[reader]


def _categories(graph: torch.fx.Graph, saved: Collection[torch.fx.Node]) -> Callable[[torch.fx.Node], str]:
    """What a tensor of the graph is held for."""
    returned = {*analysis.outputs(graph), *(update.args[0] for update in ops.updates(graph))}
    full, saved = set(full_buffers(graph)), set(saved)

    def category(node: torch.fx.Node) -> str:
        aliases = analysis.aliases(node)
        if ops.is_all_gather(node) or ops.is_call(node, ops.RESHARD) or _is_sent(node) or not full.isdisjoint(aliases):
            return "gathered"
        if ops.is_call(node, ops.PACK) or ops.is_reduction(node) or ops.is_conversion(node):
            return "reductions" if returned.isdisjoint(aliases) else "gradients"
        return "temporaries" if saved.isdisjoint(aliases) else "activations"

    return category


def _is_sent(node: torch.fx.Node) -> bool:
    """Whether this is a shard in another form, on its way into a gather."""
    return _is_form_of_shards(node) and any(ops.is_all_gather(user) or _is_sent(user) for user in node.users)


def _moments(side: str, graph: torch.fx.Graph, lives: Iterable[_Life], resident: Mapping[str, int]) -> list[Moment]:
    lives_of_category: dict[str, list[_Life]] = {category: [] for category in CATEGORIES}
    for life in lives:
        lives_of_category[life.category].append(life)
    nodes = list(graph.nodes)
    totals = [_total(lives_of_category[category], len(nodes)) for category in CATEGORIES]
    return [
        Moment(side, node, {name: resident.get(name, 0) + size for name, size in zip(CATEGORIES, sizes, strict=True)})
        for node, *sizes in zip(nodes, *totals, strict=True)
    ]
