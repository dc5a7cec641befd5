"""Graphs as bytes, to be kept in files: of each node what our own code reads.

Values of nodes are tensors without memory, as in the graphs that were written. Graphs in which sizes vary are not
written. Private torch API, as of torch 2.11 to 2.15: the tensors without memory, the classes of operators, and kernels
of the user's in graphs.
"""

from __future__ import annotations

import contextvars
import dataclasses
import io
import operator
import pickle
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx
from torch._higher_order_ops.triton_kernel_wrap import TritonKernelWrapperFunctional, TritonKernelWrapperMutation
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ..passes import analysis

_READ = ("val", "stack_trace", "original_aten", "seq_nr", "desc")  # and what is ours
_FASTEST = 1  # level of compression
_KERNELS = (TritonKernelWrapperMutation, TritonKernelWrapperFunctional)


def dumps(value: object) -> bytes:
    """A value that may hold graphs, as bytes.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: something in it cannot be written.
    """
    written = io.BytesIO()
    _Pickler(written).dump(value)
    return zlib.compress(written.getvalue(), _FASTEST)


def loads(data: bytes) -> Any:
    """What `dumps` has written; of its graphs, those run that `runs_elsewhere`."""
    token = _mode.set(FakeTensorMode())
    try:
        return pickle.loads(zlib.decompress(data))
    finally:
        _mode.reset(token)


def runs_elsewhere(gm: torch.fx.GraphModule) -> bool:
    """Whether another process can run a graph: Triton kernels of the user's are numbers, in a table of this one."""
    return not any(isinstance(node.target, _KERNELS) for graph in analysis.graphs_of(gm) for node in graph.nodes)


_mode: contextvars.ContextVar[FakeTensorMode] = contextvars.ContextVar("fsdp_compile_fake_mode")


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.fx.GraphModule):
            return _graph_module, _described(value)
        if isinstance(value, FakeTensor):
            return _fake, (_numbers(value.shape), _numbers(value.stride()), value.dtype, value.device)
        if isinstance(value, torch._ops.OpOverload):
            return _overload, (*value._schema.name.split("::"), value._overloadname)
        if isinstance(value, torch._ops.HigherOrderOperator):
            return getattr, (torch.ops.higher_order, value.name())
        return NotImplemented


@dataclasses.dataclass(frozen=True)
class _Read:
    """In the arguments of a node: the node with this number."""

    number: int


def _described(gm: torch.fx.GraphModule) -> tuple[Any, ...]:
    """The nodes, and the attributes that they read."""
    number = {node: index for index, node in enumerate(gm.graph.nodes)}

    def as_read(value: Any) -> Any:
        return _Read(number[value]) if isinstance(value, torch.fx.Node) else value

    nodes, attributes = [], {}
    for node in gm.graph.nodes:
        arguments = torch.fx.node.map_aggregate((node.args, node.kwargs), as_read)
        meta = {key: value for key, value in node.meta.items() if key in _READ or key.startswith("fsdp_")}
        nodes.append((node.op, node.target, arguments, node.name, node.type, meta))
        if node.op in ("get_attr", "call_module"):
            attributes[node.target] = operator.attrgetter(node.target)(gm)
    return nodes, attributes


def _graph_module(nodes: Sequence[tuple[Any, ...]], attributes: dict[str, Any]) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    made: list[torch.fx.Node] = []
    for op, target, arguments, name, kind, meta in nodes:
        args, kwargs = torch.fx.node.map_aggregate(
            arguments, lambda value: made[value.number] if isinstance(value, _Read) else value
        )
        node = graph.create_node(op, target, args, kwargs, name, kind)
        node.meta = meta
        made.append(node)
    return torch.fx.GraphModule(attributes, graph)


def _numbers(sizes: Sequence[Any]) -> tuple[int, ...]:
    if not all(isinstance(size, int) for size in sizes):
        raise pickle.PicklingError(f"sizes vary: {tuple(sizes)}")
    return tuple(sizes)


def _fake(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with _mode.get():
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _overload(namespace: str, name: str, overload: str) -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)
