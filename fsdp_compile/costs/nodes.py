"""Nodes: the seconds that each node of a scheduled graph takes, and which of them run as one kernel.

A kernel takes the longer of its arithmetic and its traffic with memory (the roofline), and the time of an empty kernel:

    seconds = kernel_start + max(flops / flops_of(dtype), bytes / memory_bandwidth)

A collective that the model calls itself is one, too (`model_collectives.py`).

FLOPs are those of torch.utils.flop_counter, where a multiply-add is two; operators that it does not know do one for
each element that they return. Those of attention count `attention_factor` times. A compiler fuses light operators
between heavy ones: together they read what comes from outside and write what is read outside. Without a compiler each
operator of the graph is a kernel; of torch without any graph, each operator before it was decomposed.

In `symbolic` graphs an `Extent` of expressions stands for every tensor, and what is computed here is an expression.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.fx
from torch.utils.flop_counter import flop_registry

from ..passes import analysis, ops
from ..runtime.shapes import is_symbolic, traced_shape
from .arithmetic import largest
from .hardware import Hardware
from .model_collectives import ModelCollective, shown

Compiler = Literal["inductor", "aot_eager", "eager"]
"""What makes kernels of the graph: Inductor fuses light operators; "aot_eager" has a kernel for each node, and "eager",
torch without any graph, one for each operator before it was decomposed."""

_ATEN = torch.ops.aten
# Models on the meta device are traced as for the CPU, whose attention torch (2.11 to 2.15) has no formula for.
_SAME_FLOPS = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _ATEN._scaled_dot_product_flash_attention_backward,
}
_WITHOUT_RESULT = (ops.UPDATE, ops.KEEP)
_ALONE = (ops.PACK, ops.REMAINDER, *_WITHOUT_RESULT)
"""What is no part of a kernel of the model's operators."""


@dataclasses.dataclass(frozen=True)
class Extent:
    """The sizes of a tensor.

    Attributes:
        shape: numbers, or expressions.
        traced_numel: elements that it had when it was traced.
    """

    shape: tuple[Any, ...]
    dtype: torch.dtype
    traced_numel: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Extent:
        shape = traced_shape(tensor)
        return cls(shape, tensor.dtype, math.prod(shape))

    @property
    def numel(self) -> Any:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> Any:
        return self.numel * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What runs at once.

    Attributes:
        nodes: in the order of the graph.
        written: those of them that are read outside of the kernel, and therefore written to memory.
        flops: a multiply-add is two.
        dtype: what it computes in.
        num_bytes: read from memory and written to it; of a collective, its input's or its output's, the more.
        collective: what it is, if it is one of the model's own.
        beside: of such a one, the kernels that are computed before it is waited for.
    """

    nodes: tuple[torch.fx.Node, ...]
    written: tuple[torch.fx.Node, ...]
    flops: float
    dtype: torch.dtype
    num_bytes: float
    collective: ModelCollective | None = None
    beside: tuple[Kernel, ...] = ()

    def seconds(self, hardware: Hardware) -> float:
        """How long this takes; a collective, by how much what is computed beside it takes longer than alone."""
        if self.collective is not None:
            alone = self.collective.seconds(self.num_bytes, hardware)
            computed = sum(kernel.seconds(hardware) for kernel in self.beside)
            return shown(alone, computed, hardware) if self.beside else alone
        factor = hardware.attention_factor if any(map(_is_attention, self.nodes)) else 1
        arithmetic = self.flops * factor / hardware.flops_of(self.dtype)
        seconds: float = largest(arithmetic, self.num_bytes / hardware.memory_bandwidth)
        return hardware.kernel_start + seconds


def kernels_of(graph: torch.fx.Graph, *, compiler: Compiler) -> list[Kernel]:
    """The kernels of a scheduled graph, in order; its collectives, waits, moves and views are none.

    An update by an optimizer is one: it is priced as if it were.

    Args:
        compiler: what compiles the graph.
    """
    groups: list[list[torch.fx.Node]] = []
    can_join = False
    for node in graph.nodes:
        if ops.is_collective(node) or ops.is_copy(node) or ops.is_call(node, ops.WAIT, *_ALONE):
            can_join = False
        if not is_kernel(node):
            continue
        is_joining = is_light(node)
        if is_joining and can_join and _is_fused_with(groups[-1][-1], node, compiler):
            groups[-1].append(node)
        else:
            groups.append([node])
        can_join = is_joining
    return _beside_collectives([_kernel(group, compiler) for group in groups], analysis.positions(graph))


def _beside_collectives(kernels: Sequence[Kernel], position: Mapping[torch.fx.Node, int]) -> list[Kernel]:
    """The kernels; collectives of the model with those that are computed while they run.

    Collectives run one after another: while several are on their way, what is computed is beside the one that is waited
    for first.
    """
    collectives = [kernel.nodes[0] for kernel in kernels if kernel.collective is not None]
    done = {node: min(map(position.__getitem__, waits)) for node in collectives if (waits := analysis.waits_of(node))}
    beside: dict[torch.fx.Node, list[Kernel]] = {node: [] for node in done}
    under_way: list[torch.fx.Node] = []
    for kernel in kernels if done else ():
        here = position[kernel.nodes[-1]]
        under_way = [node for node in under_way if here < done[node]]
        if kernel.nodes[0] in done:
            under_way.append(kernel.nodes[0])
        elif kernel.collective is None and under_way:
            beside[min(under_way, key=done.__getitem__)].append(kernel)
    return [
        dataclasses.replace(kernel, beside=tuple(beside[kernel.nodes[0]])) if kernel.nodes[0] in beside else kernel
        for kernel in kernels
    ]


def _is_fused_with(previous: torch.fx.Node, node: torch.fx.Node, compiler: Compiler) -> bool:
    if compiler != "eager":
        return compiler == "inductor"
    return _origin(node) is not None and _origin(previous) == _origin(node)


def _origin(node: torch.fx.Node) -> tuple[str, int] | None:
    """The operator that a node was decomposed from: its name, for graphs and with them operators are copied."""
    name, call = node.meta.get("original_aten"), node.meta.get("seq_nr")
    return None if name is None or call is None else (str(name), call)


def is_kernel(node: torch.fx.Node) -> bool:
    """Whether a node computes: it is neither an input nor a view, a collective, a wait, a copy between devices."""
    if node.op != "call_function" or is_item(node) or analysis.is_alias(node) or ops.is_functional_wait(node):
        return False
    is_ours = ops.is_dialect(node)
    if is_ours and (ops.is_collective(node) or ops.is_copy(node) or ops.is_call(node, ops.FREE, ops.RESHARD)):
        return False
    return ops.is_call(node, *_WITHOUT_RESULT) or has_extents(_value(node))


def is_light(node: torch.fx.Node) -> bool:
    """Whether compilers fuse this with its neighbours; copies out of and into buffers are ATen's."""
    is_call_of_ours = ops.is_call(node, ops.COPY_OUT, *_ALONE)
    return is_kernel(node) and not analysis.is_heavy(node) and not is_call_of_ours


def flops_of(node: torch.fx.Node) -> float:
    """FLOPs of one operator, a multiply-add being two."""
    target, arguments = _call(node)
    packet = getattr(target, "overloadpacket", target)
    formula = flop_registry.get(_SAME_FLOPS.get(packet, packet))
    if formula is None:
        return 0 if ops.is_dialect(node) else _numel(_value(node))
    args, kwargs = torch.fx.map_arg((arguments, node.kwargs), lambda argument: _sized(argument.meta["val"]))
    if _is_attention(node):
        args = _with_all_heads(args)
    flops: float = formula(*args, **kwargs, out_val=_sized(_value(node)))
    return flops


def _is_attention(node: torch.fx.Node) -> bool:
    return "attention" in str(_call(node)[0])


class _Shape(tuple[Any, ...]):
    """What the formulas of torch take for a tensor: some its shape, others an object that has one."""

    @property
    def shape(self) -> _Shape:
        return self


def _sized(value: Any) -> Any:
    """`value` with shapes for extents."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_sized, value))
    return _Shape(value.shape) if isinstance(value, Extent) else value


def _with_all_heads(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Keys and values with as many heads as the queries: torch 2.11 has no formula for fewer."""

    def is_headed(value: Any) -> bool:
        return isinstance(value, (torch.Tensor, _Shape)) and len(value.shape) == 4

    heads = largest(*(value.shape[1] for value in arguments if is_headed(value)))
    return tuple(
        _Shape((value.shape[0], heads, *value.shape[2:])) if is_headed(value) else value for value in arguments
    )


def _call(node: torch.fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """The operator that a node calls and its arguments.

    Operators that may draw random numbers (attention may) and are computed again in the backward are arguments
    themselves, of one that saves or restores the state of the generator.
    """
    for index, argument in enumerate(node.args):
        if isinstance(argument, torch._ops.OpOverload):
            return argument, node.args[index + 1 :]
    return node.target, node.args


def _value(node: torch.fx.Node) -> Any:
    """What a node returns; where torch does not say (of those that save the state), what is taken out of that."""
    if "val" in node.meta:
        return node.meta["val"]
    return [_value(user) for user in node.users if is_item(user)]


def num_bytes(value: Any) -> int:
    """Bytes of a tensor, or of all tensors that an operator returns."""
    if isinstance(value, torch.Tensor) and not is_symbolic(value):
        return value.numel() * value.dtype.itemsize  # an `Extent` takes several times as long to make
    return sum(extent.num_bytes for extent in extents(value))


def _numel(value: Any) -> Any:
    """Elements of a tensor, or of all tensors that an operator returns."""
    if isinstance(value, torch.Tensor) and not is_symbolic(value):
        return value.numel()
    return sum(extent.numel for extent in extents(value))


def full_bytes(collective: torch.fx.Node) -> int:
    """Bytes of the full tensor that a collective gathers, scatters or reduces."""
    is_scattered = ops.is_call(collective, ops.REDUCE_SCATTER, ops.REDUCE_SCATTER_GROUPED)
    parts: int = ops.argument(collective, "world_size") if is_scattered else 1
    return parts * num_bytes(collective.meta["val"])


def _kernel(nodes: Sequence[torch.fx.Node], compiler: Compiler) -> Kernel:
    inside = set(nodes)
    read: dict[torch.fx.Node, int] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            if base(source) not in inside:
                read[source] = largest(read.get(source, 0), _read_of(node, source))
    computed = [node for node in nodes if compiler != "inductor" or not _is_constant(node)]
    written = tuple(node for node in computed if any(user not in inside for user in _readers(node)))
    num_read, num_written = sum(read.values()), sum(num_bytes(_value(node)) for node in written)
    if (collective := ModelCollective.of(nodes[0])) is not None:
        return Kernel(tuple(nodes), written, 0, _dtype(nodes), largest(num_read, num_written), collective)
    total = num_read + num_written
    return Kernel(tuple(nodes), written, sum(map(flops_of, nodes)), _dtype(nodes), total)


def _is_constant(node: torch.fx.Node) -> bool:
    """Whether this is computed from no tensor and only read in kernels that compilers fuse, each of which can do so."""
    is_of_tensors = any(has_extents(_value(source)) for source in node.all_input_nodes)
    return not is_of_tensors and not analysis.is_random(node) and all(map(is_light, _readers(node)))


def _dtype(nodes: Sequence[torch.fx.Node]) -> torch.dtype:
    """That of the largest tensor that is computed rather than copied, if any is; of an update, its gradient's."""
    computed = [node for node in nodes if not ops.is_dialect(node)] or nodes
    computed = [node.all_input_nodes[0] if ops.is_call(node, *_WITHOUT_RESULT) else node for node in computed]
    if len(computed) == 1 and isinstance(value := _value(computed[0]), torch.Tensor):
        return value.dtype
    found = [extent for node in computed for extent in extents(_value(node))]
    return max(found, key=lambda extent: extent.traced_numel).dtype


def _readers(node: torch.fx.Node) -> Iterable[torch.fx.Node]:
    """Every node that reads the memory of `node`."""
    for alias in _with_views(node):
        for user in alias.users:
            if not analysis.is_alias(user) and not is_item(user) and not ops.is_call(user, ops.FREE):
                yield user


def _with_views(node: torch.fx.Node) -> list[torch.fx.Node]:
    """`node`, its views, and the tensors that it returns with theirs."""
    return [view for value in dict.fromkeys((node, *results(node))) for view in analysis.aliases(value)]


def results(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The tensors that a node returns: itself, or those that are taken out of it, or out of what is taken out of it."""
    items = [user for user in node.users if is_item(user)]
    return [result for item in items for result in results(item)] or [node]


def is_item(node: torch.fx.Node) -> bool:
    """Whether this takes one value out of several that another node returns."""
    return node.target is operator.getitem


def _read_of(node: torch.fx.Node, source: torch.fx.Node) -> int:
    """The bytes of `source` that `node` reads: a copy reads one parameter of a buffer, an embedding its rows.

    An update also reads and writes parameters and states, of the size of the gradient. What a message loses is computed
    with it, from what that reads; where that is kept, it is copied.
    """
    if ops.is_call(node, ops.UPDATE):
        return traffic_of_update(ops.argument(node, "states")) * num_bytes(source.meta["val"])
    if ops.is_call(node, ops.REMAINDER):
        return 0
    if ops.is_call(node, ops.COPY_OUT, torch.ops.aten.embedding.default):
        return num_bytes(node.meta["val"])
    return num_bytes(source.meta.get("val"))


def traffic_of_update(states: int) -> int:
    """Bytes that an optimizer with so many states reads and writes for each byte of a parameter: the parameter, which
    it also writes, its gradient, and the states, which it also writes."""
    return 3 + 2 * states


def base(node: torch.fx.Node) -> torch.fx.Node:
    """The node whose memory this one is a view of."""
    while analysis.is_alias(node) and not ops.is_call(node, ops.WAIT):
        node = node.all_input_nodes[0]
    return node


def has_extents(value: Any) -> bool:
    """Whether `extents` would return any."""
    if isinstance(value, (list, tuple)):
        return any(map(has_extents, value))
    return isinstance(value, (torch.Tensor, Extent))


def extents(value: Any) -> list[Extent]:
    """Of a tensor, or of all tensors that an operator returns; a size of a dynamic dimension has none."""
    if isinstance(value, (list, tuple)):
        return [extent for item in value for extent in extents(item)]
    if isinstance(value, torch.Tensor):
        return [Extent.of(value)]
    return [value] if isinstance(value, Extent) else []
