"""Errors of the graph passes. Both carry the printed graph around the node they are about (`printer.excerpt`)."""

from __future__ import annotations

from typing import Any

import torch.fx

from . import ops
from .printer import excerpt, printed_name, target_name


class PassError(RuntimeError):
    """A graph does not have what a pass needs (the pass's *Needs* line)."""


class VerifyError(AssertionError):
    """A pass broke an invariant of the dialect: a defect of this project, never of the user."""


def pass_error(message: str, node: torch.fx.Node) -> PassError:
    """A `PassError` about `node`, with the graph around it."""
    return PassError(f"{message}\n{excerpt(node)}")


def refuse_calls(graph: torch.fx.Graph, *targets: Any, until: str) -> None:
    """Raise a `PassError` if the graph calls one of `targets`, which stand in it until the pass `until` has run."""
    for node in graph.nodes:
        if ops.is_call(node, *targets):
            raise pass_error(f"{printed_name(node)} calls {target_name(node)}: run {until} first", node)


def refuse_unplaced(graph: torch.fx.Graph) -> None:
    """Raise a `PassError` if gathers or reductions are yet to be put into the graph."""
    refuse_calls(graph, ops.UNSHARD, ops.PART, until="InsertAllGather")
    refuse_calls(graph, ops.REDUCE_GRADIENT, until="InsertReduceScatter")


def required_wait(collective: torch.fx.Node) -> torch.fx.Node:
    """The wait for a collective; a `PassError` where there is none, or more than one."""
    waits = [user for user in collective.users if ops.is_call(user, ops.WAIT)]
    if len(waits) != 1:
        remedy = "one fsdp.wait has to read it, and all others read that"
        raise pass_error(f"{printed_name(collective)} needs one wait: {remedy}", collective)
    return waits[0]
