"""Measured schedules: what torch.profiler saw of a step, in the terms of the graphs that ran.

The profiler records every call of torch's functional collectives and every wait for them, in the order of the graphs:
the first collective of a step is the first of its schedule, and so on. Between them compute runs. When a message itself
is under way nobody records on the CPU; a collective is drawn from its call to the end of its wait.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from rich.console import Console
from rich.table import Table

from ..costs.timeline import COMPUTE
from ..errors import ConfigError
from .schedule import Block, Schedule

_OPERATORS = "_c10d_functional::"
_MICRO = 1e-6  # seconds of the profiler's unit
_WIDTH = 110  # columns that the table needs


def measured_schedule(planned: Schedule, profiler: torch.profiler.profile) -> Schedule:
    """The step of median length that a profiler saw, in the terms of its plan, without memory.

    What is computed between two collectives or waits is one block, or one for each unit, if it is of several: their
    parts of the time are as planned. The step begins with its first collective.

    Args:
        planned: the schedule of the graphs that ran.
        profiler: has recorded one step or more of forward and backward, and has ended.

    Raises:
        ConfigError: the profile is not of whole steps of these graphs.
    """
    calls = [block for block in planned.blocks if block.num_messages]
    counts = [block.num_messages if block.kind == "wait" else 1 for block in calls]
    seen = sorted(
        (_MICRO * event.time_range.start, _MICRO * event.time_range.end)
        for event in profiler.events() or ()
        if event.name.startswith(_OPERATORS)
    )
    if not counts:
        raise ConfigError("these graphs have no collectives, which a profile is compared by")
    if not seen or len(seen) % sum(counts):
        raise ConfigError(
            f"the profile has {len(seen)} collectives and waits, and a step of these graphs {sum(counts)}: "
            "profile whole steps of forward and backward, and no other collectives"
        )
    steps = [seen[begin : begin + sum(counts)] for begin in range(0, len(seen), sum(counts))]
    steps.sort(key=lambda step: step[-1][1] - step[0][0])
    median = iter(steps[(len(steps) - 1) // 2])
    spans = [[next(median) for _ in range(count)] for count in counts]
    zero = spans[0][0][0]
    times = [(span[0][0] - zero, span[-1][1] - zero) for span in spans]
    blocks = list(_measured(planned.blocks, calls, times))
    return dataclasses.replace(
        planned, title="a measured step", about="", seconds=times[-1][1], blocks=blocks, memory=()
    )


def _measured(blocks: Sequence[Block], calls: Sequence[Block], times: Sequence[tuple[float, float]]) -> Iterator[Block]:
    """The calls and what is between them, at their measured times."""
    time_of = dict(zip(map(id, calls), times, strict=True))
    end_of_wait = {(call.side, call.name): time_of[id(call)][1] for call in calls if call.kind == "wait"}
    between: list[Block] = []
    now = 0.0
    for block in blocks:
        if id(block) not in time_of:
            between += [block] if block.seconds else []
            continue
        begin, end = time_of[id(block)]
        if between:
            yield from _divided(between, now, begin)
        between, now = [], end
        yield dataclasses.replace(block, start=begin, end=end_of_wait[block.side, block.name])


def _divided(blocks: Sequence[Block], start: float, end: float) -> Iterator[Block]:
    """What is computed from `start` to `end`, a block for each unit in turn; its part of the time is as planned."""
    units = [list(group) for _, group in itertools.groupby(blocks, lambda block: (block.side, block.unit))]
    scale = (end - start) / sum(block.seconds for block in blocks)
    for unit in units:
        until = end if unit is units[-1] else start + scale * sum(block.seconds for block in unit)
        name = "; ".join(dict.fromkeys(block.name for block in unit))
        lines = tuple(line for block in unit for line in block.lines)
        yield dataclasses.replace(unit[0], name=name, start=start, end=until, lines=lines)
        start = until


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Planned against measured seconds of compute, and of waits, by side and unit; `str()` is a table."""

    planned: Schedule
    measured: Schedule

    def rows(self) -> dict[tuple[str, str], tuple[float, float, float, float]]:
        """By side and unit, in the order of the schedule: compute planned, measured, exposed planned, measured."""
        planned, measured = map(_seconds_of_units, (self.planned, self.measured))
        return {
            key: (planned[key][0], measured[key][0], planned[key][1], measured[key][1])
            for key in dict.fromkeys((block.side, block.unit) for block in self.planned.blocks)
        }

    def __str__(self) -> str:
        table = Table(title="ms, planned and measured; '-' is compute of no unit", title_justify="left")
        for heading in ("side", "unit", "compute: planned", "measured", "exposed: planned", "measured"):
            table.add_column(heading, justify="left" if heading in ("side", "unit") else "right")
        rows = self.rows()
        for (side, unit), seconds in {**rows, ("both", "all"): map(sum, zip(*rows.values(), strict=True))}.items():
            table.add_row(side, unit or "-", *(f"{1e3 * value:.2f}" for value in seconds))
        console = Console(width=_WIDTH, color_system=None)
        with console.capture() as captured:
            console.print(table)
        return captured.get()


def _seconds_of_units(schedule: Schedule) -> Mapping[tuple[str, str], list[float]]:
    """By side and unit: of compute, and of waits."""
    found: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for block in schedule.blocks:
        if block.lane == COMPUTE:
            found[block.side, block.unit][block.kind == "wait"] += block.seconds
    return found
