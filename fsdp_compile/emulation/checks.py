"""What must hold of a generated program, whatever Inductor made of it: each check returns what it finds, as sentences.

The order of the schedule; buffers that a collective reads or fills are left alone until its wait; gathered buffers are
dead where the schedule frees them; matmuls read gathered parameters in place; and nothing waits for the device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch.fx

from ..passes import ops
from .build import Program
from .wrapper import Step, functions_of, steps_of

MATMULS = {"mm": "mm", "addmm": "mm", "bmm": "bmm", "baddbmm": "bmm", "convolution": "convolution"}
"""Inductor may take a bias out of a matmul."""

_SENDS = {"wait_tensor", "all_reduce", "all_to_all_single", "copy_start", "copy_wait", "copies_done"}
_SYNCHRONISES = re.compile(r"\.item\(|\.cpu\(|\.tolist\(|synchronize\(|\.nonzero\(")


def check(program: Program) -> list[str]:
    """What is wrong with a program; nothing, for one that keeps its schedule."""
    lowered = (program.graphs.lowered.forward, program.graphs.lowered.backward)
    scheduled = (program.graphs.forward, program.graphs.backward)
    found = []
    for name, half, low, side in zip(("forward", "backward"), program.halves, lowered, scheduled, strict=False):
        assert low is not None and side is not None
        steps = steps_of(half.wrapper)
        problems = [
            *order(steps, low.graph),
            *in_flight(steps),
            *late_reads(steps, side.graph),
            *synchronisations(half.wrapper),
        ]
        found += [f"{name}: {problem}" for problem in problems]
    return found


def order(steps: Sequence[Step], lowered: torch.fx.Graph) -> Iterator[str]:
    """Collectives, copies, waits and matmuls run in the order of the lowered graph."""
    in_code = [_name(step.name) for step in steps if step.kind in ("extern", "collective", "copy", "wait", "host")]
    in_code = [name for name in in_code if name]
    in_graph = [name for node in lowered.nodes if (name := _name(_operator(node)))]
    for index, (run, wanted) in enumerate(zip(in_code, in_graph, strict=False)):
        if run != wanted:
            yield f"call {index} is {run}, and the schedule has {wanted}"
            return
    if len(in_code) != len(in_graph):
        yield f"{len(in_code)} collectives, waits and matmuls, and the schedule has {len(in_graph)}"


def in_flight(steps: Sequence[Step]) -> Iterator[str]:
    """From its start to its wait, what a collective or a copy fills is not touched, and what it reads is not freed."""
    for start, step in enumerate(steps):
        if step.kind not in ("collective", "copy"):
            continue
        filled = _names_of(step.result, steps[start:]) if step.result else set(step.reads)  # an all-reduce is in place
        waits = [index for index, other in enumerate(steps) if other.kind == "wait" and filled & set(other.reads)]
        if not waits:
            yield f"line {step.line}: nothing waits for {step.name} into {step.result}"
            continue
        for other in steps[start + 1 : waits[0]]:
            touched = filled & set(other.reads)
            if touched and other.kind not in ("alias", "free"):
                yield f"line {other.line}: {other.name} touches {sorted(touched)[0]}, which line {step.line} is filling"
            if other.kind == "free" and touched - {step.result}:
                yield f"line {other.line}: {sorted(touched)[0]} is freed, which line {step.line} is filling"
            freed = (set(step.reads) - filled) & set(other.reads) if other.kind == "free" else set()
            if freed:
                yield f"line {other.line}: {sorted(freed)[0]} is freed, which line {step.line} is sending"


def late_reads(steps: Sequence[Step], scheduled: torch.fx.Graph) -> Iterator[str]:
    """No gathered buffer is read after the matmul that follows its last free in the schedule."""
    lives = list(_lives_of_gathers(scheduled))
    gathers = [index for index, step in enumerate(steps) if step.kind == "collective" and "all_gather" in step.name]
    if len(lives) != len(gathers):
        yield f"{len(gathers)} gathers, and the schedule has {len(lives)}"
        return
    num_before = list(_matmuls_before(step.name for step in steps))
    for index, life in zip(gathers, lives, strict=True):
        names = _names_of(steps[index].result, steps[index:])
        reads = [at for at, step in enumerate(steps) if step.kind not in ("free", "reuse") and names & set(step.reads)]
        if num_before[reads[-1]] > life:
            line = steps[reads[-1]].line
            yield f"line {line}: what line {steps[index].line} gathers is read after the schedule frees it"


def synchronisations(wrapper: str) -> Iterator[str]:
    """Nothing in the wrapper waits until the device has come so far."""
    lines = wrapper.splitlines()
    for function in functions_of(wrapper).values():
        for line in lines[function.lineno - 1 : function.end_lineno]:
            if _SYNCHRONISES.search(line.partition("#")[0]):
                yield f"waits for the device: {line.strip()}"


def reads_in_place(steps: Sequence[Step]) -> Iterator[str]:
    """Matmuls read what a grouped gather filled, and no kernel copies it on the way."""
    waited = {name for step in steps if step.kind == "wait" for name in step.reads}
    read = {name for step in steps if step.name in MATMULS for name in step.reads}
    copied = [step for step in steps if step.name in ("slice_copy", "clone", "copy_") and waited & set(step.reads)]
    for step in copied:
        yield f"line {step.line}: {step.name} copies what was gathered"
    if not waited & read:
        yield "no matmul reads a gathered buffer"


def _name(operator: str) -> str:
    """The name by which calls are compared; "" for what is not compared."""
    operator = operator.removesuffix("_") if operator != "wait_tensor" else operator
    is_sent = operator in _SENDS or operator.startswith(("all_gather_", "reduce_scatter_"))
    return operator if is_sent else MATMULS.get(operator, "")


def _operator(node: torch.fx.Node) -> str:
    return node.target._schema.name.partition("::")[2] if hasattr(node.target, "_schema") else ""


def _names_of(result: str, steps: Sequence[Step]) -> set[str]:
    """The names for what a call returned, and for the parts of it."""
    names = {result}
    for step in steps:
        if step.is_renaming and step.kind != "reuse" and step.reads[0] in names:
            names.add(step.result)
    return names


def _matmuls_before(names: Iterator[str]) -> Iterator[int]:
    count = 0
    for name in names:
        yield count
        count += name in MATMULS


def _lives_of_gathers(graph: torch.fx.Graph) -> Iterator[int]:
    """For every gather of a schedule, in order, how many matmuls stand before the last free of what it brings."""
    nodes = list(graph.nodes)
    num_before = dict(zip(nodes, _matmuls_before(map(_operator, nodes)), strict=True))
    for node in nodes:
        if ops.is_all_gather(node):
            (wait,) = node.users
            buffers = [wait, *(out for out in wait.users if ops.is_call(out, ops.COPY_OUT))]
            frees = [user for buffer in buffers for user in buffer.users if ops.is_call(user, ops.FREE)]
            yield max((num_before[free] for free in frees), default=len(nodes))  # kept for the backward
