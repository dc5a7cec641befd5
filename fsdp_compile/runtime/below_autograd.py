"""Compiled graphs run below autograd: they have forward and backward apart, and nothing in them asks for gradients.

Each operator then goes to its kernel directly. torch's functional collectives have an autograd formula in Python, which
would take longer than starting them. An operator that torch does not have may use autograd by itself, inside.

`_AutoDispatchBelowAutograd` is private, as of torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx

_OF_TORCH = {"aten", "prims", "_c10d_functional", "fsdp"}
"""Namespaces of operators that never use autograd inside."""


def below_autograd(compiled: Callable[[list[Any]], Any], graph: torch.fx.Graph) -> Callable[[list[Any]], Any]:
    """What `compiled` does, which was compiled from `graph`: it takes a list of arguments, and may empty it."""
    if not all(_is_of_torch(node) for node in graph.nodes):
        return compiled

    def run(arguments: list[Any]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return compiled(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]  # so that AOTAutograd passes a list
    return run


def _is_of_torch(node: torch.fx.Node) -> bool:
    """Whether a node calls an operator of torch that has no code of users in it, or none."""
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace in _OF_TORCH
    return not isinstance(node.target, torch._ops.HigherOrderOperator)
