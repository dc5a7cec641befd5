"""How Inductor compiles equal blocks of a graph as one function (`passes/outline_blocks.py`).

Private torch API, as of torch 2.11 to 2.15: Inductor's lowering of `invoke_subgraph`, and what it asks of the values
that a graph is given and returns.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.graph
import torch.fx
from torch._inductor import ir
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import V

from ..passes.outline_blocks import OutlineBlocks

_invoke = torch.ops.higher_order.invoke_subgraph


def outlined(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy of a lowered graph in which equal blocks are one function."""
    if torch._inductor.config.cpp_wrapper:  # it has no such functions
        return gm
    copied = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))
    OutlineBlocks()(copied)
    _keep_strides(copied)
    copied.recompile()
    return copied


def _keep_strides(gm: torch.fx.GraphModule) -> None:
    """Have functions of a graph return values with the strides that the graph says, as a graph for users does."""
    for call in gm.graph.find_nodes(op="call_function", target=_invoke):
        function: Any = gm.get_submodule(call.args[0].target)
        strides = [value.stride() if isinstance(value, torch.Tensor) else None for value in call.meta["val"]]
        notes = function.graph.output_node().meta
        notes["original_output_strides"] = strides
        notes["user_visible_output_idxs"] = [index for index, found in enumerate(strides) if found is not None]


@contextlib.contextmanager
def own_memory() -> Iterator[None]:
    """Inside, what a function of a graph is given stays as it is, and what it returns is in memory of its own.

    Inductor takes what a function returns for new when it uses memory again, but may return what it was given, where a
    graph copies. In a backward it lets functions write to what they are given at the places at which the graph itself
    is given what the forward saved. A function's kernels are made for the alignment of what the first call gives.
    """
    by_itself = lowerings[_invoke]

    @functools.wraps(by_itself)
    def invoke(subgraph: Any, identifier: str, *operands: Any) -> Any:
        given = [ir.ExternKernel.realize_input(operand) for operand in operands]
        if subgraph.graph is None:
            aligned = iter([not _is_unaligned(value) for value in given if _is_tensor(value)])
            with (
                patch.object(torch._inductor.graph, "get_donated_idxs", lambda: None),
                patch.object(torch._inductor.graph, "should_assume_input_aligned", lambda example: next(aligned)),
            ):
                returned = by_itself(subgraph, identifier, *given)
            _own_outputs(subgraph.graph)
        else:
            names, unaligned = subgraph.graph.graph_input_names, subgraph.graph.unaligned_buffers
            given = [
                ir.ExternKernel.copy_input(value) if _is_unaligned(value) and name not in unaligned else value
                for name, value in zip(names, given, strict=True)
            ]
            returned = by_itself(subgraph, identifier, *given)
        for value, output in zip(returned, subgraph.graph.graph_outputs, strict=True):
            if _is_tensor(output) and output.get_name() in subgraph.graph.unaligned_buffers:
                V.graph.unaligned_buffers.add(value.get_name())
        return returned

    with patch.dict(lowerings, {_invoke: invoke}):
        yield


def _is_tensor(value: Any) -> bool:
    """Whether this has memory; functions of users take and return sizes, too."""
    return isinstance(value, (ir.TensorBox, ir.StorageBox, ir.BaseView, ir.Buffer))


def _is_unaligned(value: Any) -> bool:
    """Whether kernels for a GPU may not take for granted that this begins at a multiple of 16 bytes."""
    return _is_tensor(value) and value.get_device().type != "cpu" and ir.is_unaligned(value)


def _own_outputs(function: Any) -> None:
    """Have a function return copies of what it was given, or returns already."""
    with V.set_graph_handler(function):
        taken = set(function.graph_inputs)
        for index, output in enumerate(function.graph_outputs):
            if not _is_tensor(output):
                continue
            if output.get_name() in taken:
                function.graph_outputs[index] = _copied(output)
            taken.add(function.graph_outputs[index].get_name())


def _copied(value: Any) -> Any:
    """A copy of a value with its strides."""
    copied = ir.ExternKernel.require_exact_strides(ir.ExternKernel.copy_input(value), value.get_stride())
    ir.as_storage_and_layout(copied, freeze=True)
    return copied
