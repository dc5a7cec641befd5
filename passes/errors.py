"""Errors of the graph passes. Both carry the printed graph around the node they are about (`printer.excerpt`)."""

from __future__ import annotations

import torch.fx

from .printer import excerpt


class PassError(RuntimeError):
    """A graph does not have what a pass needs (the pass's *Needs* line)."""


class VerifyError(AssertionError):
    """A pass broke an invariant of the dialect: a defect of this project, never of the user."""


def pass_error(message: str, node: torch.fx.Node) -> PassError:
    """A `PassError` about `node`, with the graph around it."""
    return PassError(f"{message}\n{excerpt(node)}")
