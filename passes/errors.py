"""Errors of the graph passes. Both carry the printed graph around the node they are about."""

from __future__ import annotations

import torch.fx


class PassError(RuntimeError):
    """A graph does not have what a pass needs (the pass's *Needs* line)."""


class VerifyError(AssertionError):
    """A pass broke an invariant of the dialect: a defect of this project, never of the user."""


def excerpt(node: torch.fx.Node, num_context: int = 2) -> str:
    """The printed graph around `node`, `num_context` lines on either side, with `>` at the node."""
    nodes = list(node.graph.nodes)
    index = nodes.index(node)
    lines = []
    for other in nodes[max(0, index - num_context) : index + num_context + 1]:
        marker = ">" if other is node else " "
        lines.append(f"{marker} {other.format_node()}")
    return "\n".join(lines)


def pass_error(message: str, node: torch.fx.Node) -> PassError:
    """A `PassError` about `node`, with the graph around it."""
    return PassError(f"{message}\n{excerpt(node)}")
