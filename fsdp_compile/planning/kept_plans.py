"""Plans that are kept: the same graphs are planned once, by whichever start comes first.

A plan is kept under a digest of all that it follows from: the graphs without a plan, with the shapes that they were
traced with; the hardware, the budget, what the options leave open; the versions of torch and of our own sources.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
import torch.fx

from ..cache import keep_text, kept_text
from ..costs.nodes import extents
from ..graphs import RewrittenGraphs
from ..passes.plan import StepPlan
from ..runtime.inductor import generator_digest

_NONE = "no plan"  # is as fast as any


def name_of(unplanned: RewrittenGraphs, *conditions: object) -> str:
    """The name that the plan of these graphs is kept under.

    Args:
        conditions: what it follows from besides, whose text says all of it.
    """
    digest = hashlib.sha256(generator_digest())
    for text in (torch.__version__, *map(str, conditions), *_lines(unplanned)):
        digest.update(text.encode())
        digest.update(b"\n")
    return f"plan-{digest.hexdigest()[:32]}.json"


def kept_plan(name: str) -> tuple[bool, StepPlan | None]:
    """Whether a plan was kept, and which; None is what is kept where none is as fast as any."""
    text = (kept_text(name) or "").strip()
    if text == _NONE:
        return True, None
    try:
        return True, StepPlan.from_json(text)
    except (ValueError, KeyError, TypeError):  # nothing was kept, or not by us
        return False, None


def keep_plan(name: str, plan: StepPlan | None) -> None:
    keep_text(name, f"{plan.to_json() if plan else _NONE}\n")


def _lines(graphs: RewrittenGraphs) -> Iterator[str]:
    """Every node: what it computes of what, and the sizes of the result."""
    for side in graphs.sides:
        yield side.title
        for node in side.graph.nodes:
            sizes = [(extent.shape, extent.dtype) for extent in extents(node.meta.get("val"))]
            yield f"{node.name} = {node.target} {node.args} {node.kwargs} {sizes}"
