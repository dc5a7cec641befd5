"""Schedules: what a step does at which moment, as plain values that are saved, drawn and compared."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch.fx

from ..compiler.statements import source_of
from ..costs.memory import CATEGORIES, Moment
from ..costs.nodes import full_bytes, num_bytes
from ..costs.predict import Prediction
from ..costs.timeline import COMPUTE, Event, Timeline, num_messages
from ..costs.work import WorkOfGraph
from ..errors import ConfigError
from ..passes import metadata, ops
from ..passes.printer import display_names, target_name

Kind = Literal["compute", "gather", "reduce", "copy", "wait", "free"]
"""Kernels, all-gathers, reductions, copies between devices, waits for collectives, ends of full parameters. A wait
takes as long as compute stands still; a free takes no time."""

_FORMAT = 1  # of saved schedules
_NAMED = 3  # operators that the name of a kernel lists


@dataclasses.dataclass(frozen=True)
class Block:
    """What a lane does from `start` to `end`.

    Attributes:
        lane: "compute", or a process group.
        side: "forward" or "backward".
        kind: see `Kind`.
        name: of a kernel its operators; otherwise the printed name of what is sent, waited for, copied or freed. That
            of a collective and of its wait is the same.
        unit: whose parameters are sent, or, of compute, were last waited for.
        start, end: seconds since the beginning of the step.
        num_bytes: of the full tensors that are sent, copied or freed; otherwise 0.
        num_messages: that are sent or waited for; otherwise 0.
        source: the line of the model that it comes from, where that is known.
        lines: of the printed graph of its side; the first one is 0.
    """

    lane: str
    side: str
    kind: Kind
    name: str
    unit: str
    start: float
    end: float
    num_bytes: int
    num_messages: int
    source: str
    lines: tuple[int, ...]

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A step of forward and backward, without the optimizer.

    Attributes:
        title: what it is of.
        about: the prediction in words.
        seconds: of all.
        lower_bound: seconds that no order of the same work can go below.
        blocks: side by side, in the order of the graphs.
        memory: (seconds, bytes by category in the order of `CATEGORIES`): what is held from then on.
        texts: the printed graph of each side.
    """

    title: str
    about: str
    seconds: float
    lower_bound: float
    blocks: Sequence[Block]
    memory: Sequence[tuple[float, tuple[int, ...]]]
    texts: Mapping[str, str]

    @classmethod
    def of(cls, prediction: Prediction) -> Schedule:
        timeline = prediction.timeline
        blocks: list[Block] = []
        moments = iter(prediction.memory.moments)
        memory: list[tuple[float, tuple[int, ...]]] = []
        now = 0.0
        for side in prediction.work.sides:
            times = list(_times(side.graph, timeline, now))
            blocks += _blocks(side, timeline, times)
            memory += _curve(times, moments)
            now = times[-1][1]
        return cls(
            f"a step on {prediction.hardware.name}",
            str(prediction),
            timeline.seconds,
            timeline.lower_bound,
            blocks,
            memory,
            {side.title: str(side) for side in prediction.graphs.sides},
        )

    @property
    def lanes(self) -> list[str]:
        """Compute, and the process groups in the order of their first use."""
        return list(dict.fromkeys([COMPUTE, *(block.lane for block in self.blocks)]))

    def to_json(self) -> str:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        blocks = [dataclasses.astuple(block) for block in self.blocks]
        return json.dumps({**fields, "blocks": blocks, "format": _FORMAT, "categories": CATEGORIES})

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """What `to_json` wrote; raises ConfigError for anything else."""
        try:
            fields = json.loads(text)
            known = fields.pop("format"), tuple(fields.pop("categories"))
            fields["blocks"] = [_block(block) for block in fields["blocks"]]
            fields["memory"] = [(seconds, tuple(held)) for seconds, held in fields["memory"]]
            schedule = cls(**fields)
        except (json.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError) as e:
            raise ConfigError(
                f"no saved schedule, as model.explain(schedule=...) writes it ({type(e).__name__}: {e})"
            ) from None
        if known != (_FORMAT, CATEGORIES):
            raise ConfigError("the schedule was saved by another version of fsdp_compile")
        return schedule


def _block(fields: list[Any]) -> Block:
    *others, lines = fields
    return Block(*[*others, tuple(lines)])


def _times(graph: torch.fx.Graph, timeline: Timeline, now: float) -> Iterator[tuple[float, float]]:
    """When compute comes to each node and when it leaves it; it comes to the first one at `now`."""
    end_of = {event.node: event.end for event in timeline.events if event.lane == COMPUTE}
    for node in graph.nodes:
        begin, now = now, end_of.get(node, now + timeline.exposed.get(node, 0.0))
        yield begin, now


def _blocks(side: WorkOfGraph, timeline: Timeline, times: Sequence[tuple[float, float]]) -> Iterator[Block]:
    event_of = {event.node: event for event in timeline.events}
    kernel_at = {kernel.nodes[-1]: kernel.nodes for kernel in side.kernels}
    names, line_of, unit = display_names(side.graph), _lines(side.graph), ""
    for node, (begin, end) in zip(side.graph.nodes, times, strict=True):
        unit = _unit(node, unit)
        kind = _kind(node, event_of)
        if kind is None:
            continue
        lane, name, size, messages = COMPUTE, names[node], 0, 0
        if kind == "compute":
            name = _name_of_kernel(kernel_at[node])
        elif kind == "free":
            name, size = names[node.all_input_nodes[0]], num_bytes(node.all_input_nodes[0].meta["val"])
        elif kind == "copy":
            size = num_bytes(node.meta["val"])
        elif kind == "wait":
            messages = num_messages(node.all_input_nodes[0])
        else:
            (wait,) = node.users
            event, name = event_of[node], names[wait]
            lane, size, messages, begin, end = event.lane, full_bytes(node), num_messages(node), event.start, event.end
        lines = tuple(line_of[each] for each in kernel_at.get(node, (node,)))
        of_unit = _units(node) if ops.is_collective(node) else unit
        yield Block(lane, side.title, kind, name, of_unit, begin, end, size, messages, source_of(node), lines)


def _kind(node: torch.fx.Node, event_of: Mapping[torch.fx.Node, Event]) -> Kind | None:
    if ops.is_collective(node):
        return "gather" if ops.is_all_gather(node) else "reduce"
    if ops.is_call(node, ops.WAIT, ops.COPY_WAIT):
        return "wait"
    if ops.is_call(node, ops.FREE):
        return "free"
    if node not in event_of:
        return None
    return "copy" if ops.is_call(node, ops.COPY_START) else "compute"


def _unit(node: torch.fx.Node, before: str) -> str:
    """The unit of compute from this node on."""
    if ops.is_call(node, ops.WAIT) and ops.is_all_gather(node.all_input_nodes[0]):
        return _units(node.all_input_nodes[0])
    kept = [metadata.kept_parameter(source) for source in node.all_input_nodes]
    return next((ops.unit_of_bucket(found.bucket) for found in kept if found), before)


def _units(collective: torch.fx.Node) -> str:
    """The units whose buckets are sent."""
    return ", ".join(dict.fromkeys(map(ops.unit_of_bucket, ops.buckets_of(collective))))


def _name_of_kernel(nodes: Sequence[torch.fx.Node]) -> str:
    names = list(dict.fromkeys(map(target_name, nodes)))
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")


def _lines(graph: torch.fx.Graph) -> dict[torch.fx.Node, int]:
    """The line of every node that is not an input, where the graph is printed."""
    printed = [node for node in graph.nodes if node.op != "placeholder"]
    return {node: line for line, node in enumerate(printed, 1)}


def _curve(times: Sequence[tuple[float, float]], moments: Iterable[Moment]) -> Iterator[tuple[float, tuple[int, ...]]]:
    """What is held while time passes: of the nodes that take none, the one that holds most counts with the next.

    Args:
        moments: of the nodes of one side, or of more; as many are taken as there are times.
    """
    highest: Moment | None = None
    for (begin, end), moment in zip(times, moments):  # noqa: B905  # the moments go on with the next side
        if highest is None or moment.total > highest.total:
            highest = moment
        if end > begin:
            yield begin, tuple(highest.held[category] for category in CATEGORIES)
            highest = None
    if highest is not None:
        yield times[-1][1], tuple(highest.held[category] for category in CATEGORIES)
