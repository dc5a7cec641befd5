"""Writes: what a Dynamo graph may not do to sharded parameters."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch.fx

from ..errors import ConfigError
from ..passes import analysis, ops
from ..runtime.assembly import ASSEMBLE
from ..runtime.gradients import shard_of

_VIEWS = {"__getitem__", "detach", "expand", "flatten", "narrow", "permute", "reshape", "select", "squeeze", "t"}
_VIEWS |= {"transpose", "unsqueeze", "view", "view_as", "_get_data_attr"}
_WRITES = {operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv}
_WRITES |= {operator.imod, operator.ipow, operator.imatmul, operator.ilshift, operator.irshift}
_WRITES |= {operator.iand, operator.ior, operator.ixor}


def sharded_inputs(graph: torch.fx.Graph, example_inputs: Sequence[Any]) -> dict[torch.fx.Node, str]:
    """The inputs of a Dynamo graph that are sharded parameters, and their names; of shards that the graph reads."""
    name_of_parameter = {}
    for shard in filter(None, map(shard_of, example_inputs)):
        for slot, parameter in zip(shard.layout.slots, shard.parameters, strict=True):
            name_of_parameter[id(parameter)] = slot.parameter
    inputs = zip(analysis.inputs(graph), example_inputs, strict=True)
    return {node: name_of_parameter[id(value)] for node, value in inputs if id(value) in name_of_parameter}


def refuse_writes(graph: torch.fx.Graph, sharded: Mapping[torch.fx.Node, str]) -> None:
    """Raise ConfigError if a Dynamo graph writes to a parameter that it reads.

    It would write to a gathered copy, or to the shard after that was gathered. `sharded` are inputs that are parameters
    themselves, and their names.
    """
    parameter_of_value: dict[Any, str] = dict(sharded)
    for node in graph.nodes:
        first = node.args[0] if node.args else None
        if ops.is_call(node, ops.UNSHARD):
            parameter_of_value[node] = ops.argument(node, "parameter")
        elif isinstance(first, torch.fx.Node) and first in parameter_of_value:
            name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
            if node.target in _WRITES or _is_in_place(node.target, name):
                raise ConfigError(
                    f"forward writes to the parameter {parameter_of_value[first]} ({name}), which is sharded: "
                    "write to parameters outside of forward, or in a function that is not compiled "
                    "(torch.compiler.disable), without gradients, to what model.parameters() lists"
                )
            if name in _VIEWS or node.target in (operator.getitem, ASSEMBLE):
                parameter_of_value[node] = parameter_of_value[first]


def _is_in_place(target: Any, name: str) -> bool:
    """Whether this is a method or function of torch that writes, by its name; `operator.and_` is only no keyword."""
    is_python = getattr(target, "__module__", "") == operator.and_.__module__
    return name.endswith("_") and not name.endswith("__") and not is_python
