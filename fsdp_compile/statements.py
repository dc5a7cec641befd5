"""Statements: what a rank is about to do, line by line, for all ranks to compare (`runtime.agreement`).

They hold what the ranks have to have in common, and nothing that may differ: neither the shapes of inputs nor what is
computed with them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch.fx

from .graphs import RewrittenGraph, RewrittenGraphs
from .passes import ops
from .runtime.agreement import Line

if TYPE_CHECKING:
    from .sharding import Plan

_FRAME = re.compile(r'File "(.*)", line (\d+), in .*\n\s*(.*)')
_PACKAGE = str(Path(__file__).parent) + os.sep


def statement_of_graphs(graphs: RewrittenGraphs) -> list[Line]:
    """Whether a call has a backward, and the collectives of both in order; empty if there are none."""
    collectives = [line for side in graphs.sides for line in _collectives(side)]
    call = "a call with a backward" if graphs.backward else "a call without a backward (no_grad, or nothing to train)"
    return [Line(call), *collectives] if collectives else []


def groups_of(graphs: RewrittenGraphs) -> set[str]:
    """The names of the process groups of their collectives."""
    return {
        ops.argument(node, "group") for side in graphs.sides for node in side.graph.nodes if ops.is_collective(node)
    }


def statement_of_program(program: str) -> list[Line]:
    """What a plan is to be made for: its kind, and the parameters that it reads, in order."""
    kind, *read = program.split()
    return [Line(f"a program that reads {name}, for {kind}") for name in read]


def statement_of_plan(plan: Plan) -> list[Line]:
    """How a model is sharded: the options that decide about collectives, and every parameter of every unit."""
    options = (plan.strategy, plan.schedule, plan.reduction, plan.offload, plan.sync_module_states)
    lines = [Line(f"options: {option}") for option in options] + [Line(f"check_gradients: {plan.checks_gradients}")]
    for unit in plan.units:
        for name, parameter in unit.parameters:
            policy = plan.precision.policy_of_parameter.get(name)
            parts = [
                str(tuple(parameter.shape)),
                str(parameter.dtype),
                "trained" if parameter.requires_grad else "frozen",
            ]
            parts += [] if policy is None else [str(policy)]
            lines.append(Line(f"parameter {name} of the unit {unit.name}: {', '.join(parts)}"))
    return lines


def _collectives(side: RewrittenGraph) -> Iterator[Line]:
    for node in side.graph.nodes:
        if ops.is_collective(node):
            name = str(node.target).removeprefix("fsdp.").removesuffix(".default")
            value = node.meta["val"]
            yield Line(
                f"{name} of {ops.argument(node, 'bucket')} in the {side.title}, {value.numel()} elements of "
                f"{str(value.dtype).removeprefix('torch.')} over {ops.argument(node, 'world_size')} ranks",
                source_of(node),
            )


def source_of(node: torch.fx.Node) -> str:
    """The line of the model that a node comes from; of a collective, that uses what is gathered, or computes what is
    reduced. Empty where it is not known."""
    is_gather = ops.is_all_gather(node)
    seen, found = {node}, [node]
    for each in found:
        frames = _FRAME.findall(each.meta.get("stack_trace") or "")
        if frames := [frame for frame in frames if not frame[0].startswith(_PACKAGE)]:
            path, line, code = frames[-1]
            return f"{path}:{line}: {code.strip()}"
        near = [other for other in (each.users if is_gather else each.all_input_nodes) if other not in seen]
        found += near
        seen.update(near)
    return ""
