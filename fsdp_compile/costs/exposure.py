"""Exposure: why compute stands still at a wait, by the name of the pass that placed what it waits for.

Read from the scheduled graph and its timeline: what is computed beside a collective or a copy, what is computed before
or after it, and what else was being sent.
"""

from __future__ import annotations

import dataclasses

import torch.fx

from ..passes import ops
from .predict import Prediction, time_text
from .timeline import COMPUTE, Event
from .work import WorkOfGraph


@dataclasses.dataclass(frozen=True)
class _Overlap:
    """What a collective or a copy runs beside.

    Attributes:
        before, beside, after: seconds of compute of its graph before its start, up to its wait, and behind that.
        behind: what occupied its process group when compute had come to its start, if something did.
    """

    sent: Event
    before: float
    beside: float
    after: float
    behind: Event | None


def why_exposed(wait: torch.fx.Node, prediction: Prediction) -> str:
    """One sentence that begins with the name of the pass."""
    side = next(side for side in prediction.work.sides if side.graph is wait.graph)
    found = _overlap(wait, side, prediction)
    if ops.is_call(wait, ops.COPY_WAIT):
        return f"OverlapCopies: {_too_short(found)}"
    if ops.is_all_gather(found.sent.node):
        return f"PrefetchAllGather: {_of_gather(found)}"
    return f"DelayReduceScatterWait: {_of_reduction(found)}"


def _of_gather(found: _Overlap) -> str:
    if not found.before + found.beside:
        return "nothing is computed before it is needed"
    if found.behind is not None:
        return _queued(found.behind)
    if not found.beside:
        return "it starts where it is needed, none ahead"
    return _too_short(found)


def _of_reduction(found: _Overlap) -> str:
    if not found.beside + found.after:
        return "nothing is computed after it"
    if found.behind is not None:
        return _queued(found.behind)
    if not found.beside:
        return "it is waited for where it starts, none stays under way"
    return _too_short(found)


def _queued(behind: Event) -> str:
    verb = "gathering" if ops.is_all_gather(behind.node) else "reducing"
    return f"it starts late, for its process group is {verb} {ops.argument(behind.node, 'bucket')} until then"


def _too_short(found: _Overlap) -> str:
    takes = found.sent.end - found.sent.start
    return f"it takes {time_text(takes)}, and what is computed meanwhile {time_text(found.beside)}"


def _overlap(wait: torch.fx.Node, side: WorkOfGraph, prediction: Prediction) -> _Overlap:
    start = wait.all_input_nodes[0]
    position = {node: index for index, node in enumerate(side.graph.nodes)}
    before = beside = after = 0.0
    for event in prediction.timeline.events:
        seconds, place = event.end - event.start, position.get(event.node)
        if event.lane != COMPUTE or place is None:
            continue
        if place < position[start]:
            before += seconds
        elif place < position[wait]:
            beside += seconds
        else:
            after += seconds
    sent = next(event for event in prediction.timeline.events if event.node is start)
    return _Overlap(sent, before, beside, after, _behind(sent, position, prediction))


def _behind(sent: Event, position: dict[torch.fx.Node, int], prediction: Prediction) -> Event | None:
    """The event of the same process group that it follows at once, where that is still under way at its start."""
    for event in prediction.timeline.events:
        is_same = event.lane == sent.lane and event.node in position and event.end == sent.start
        if is_same and not _is_waited_for_before(event.node, sent.node, position):
            return event
    return None


def _is_waited_for_before(earlier: torch.fx.Node, node: torch.fx.Node, position: dict[torch.fx.Node, int]) -> bool:
    waits = [user for user in earlier.users if ops.is_call(user, ops.WAIT, ops.COPY_WAIT)]
    return any(position[wait] < position[node] for wait in waits)
