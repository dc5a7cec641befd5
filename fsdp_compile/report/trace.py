"""Traces: schedules in the format of Chrome's trace viewer, which Perfetto opens; several lie one over the other."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ..costs.memory import CATEGORIES
from .schedule import Schedule

_MICRO = 1e6  # the unit of the format


def trace(schedules: Mapping[str, Schedule]) -> str:
    """JSON with a process for each schedule, under its name, and in it a thread for each lane."""
    events = [event for number, item in enumerate(schedules.items()) for event in _events(number, *item)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _events(process: int, name: str, schedule: Schedule) -> Iterator[dict[str, Any]]:
    yield _named(process, 0, "process_name", name)
    number_of = {lane: number for number, lane in enumerate(schedule.lanes)}
    for lane, number in number_of.items():
        yield _named(process, number, "thread_name", lane)
    for block in schedule.blocks:
        yield {
            "ph": "X",
            "pid": process,
            "tid": number_of[block.lane],
            "ts": _MICRO * block.start,
            "dur": _MICRO * block.seconds,
            "name": f"{block.kind} {block.name}",
            "cat": f"{block.side},{block.kind}",
            "args": {"unit": block.unit, "bytes": block.num_bytes, "source": block.source},
        }
    for seconds, held in schedule.memory:
        counted = dict(zip(CATEGORIES, held, strict=True))
        yield {"ph": "C", "pid": process, "tid": 0, "ts": _MICRO * seconds, "name": "bytes", "args": counted}


def _named(process: int, thread: int, kind: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}
