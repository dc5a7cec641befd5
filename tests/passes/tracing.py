"""Graphs of tiny models between any two passes, as text and to run passes on.

A trace is what `rewrite` does with an observer: no process group, nothing runs.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import expecttest
import torch
import torch.fx
from torch import nn
from torch._subclasses import FakeTensorMode

from fsdp_compile.compiler import calls
from fsdp_compile.graphs import RewrittenGraphs
from fsdp_compile.layout.buckets import NO_AXIS, Axes, Axis, Placement, lay_out
from fsdp_compile.layout.communication import UNCHANGED, CommunicationDtype
from fsdp_compile.layout.options import GradientReduction
from fsdp_compile.layout.precision import find_precision, install_casts
from fsdp_compile.layout.units import find_units
from fsdp_compile.module.reading import reading_copy
from fsdp_compile.passes import ops
from fsdp_compile.passes.pipeline import Pipeline
from fsdp_compile.passes.printer import print_graph, print_schedule
from fsdp_compile.passes.verifier import STAGES
from fsdp_compile.runtime.meta import off_meta

MEAN = GradientReduction()
STAGE_AFTER = {stage.after: stage for stage in STAGES}
REDUCTION = 1, "", "avg", 1.0, None, "", ""
"""What an operator of the dialect takes where gradients are averaged over one axis, in the dtype they have."""


@dataclasses.dataclass(frozen=True)
class Captured:
    """Stands before the first pass, so that the observer also sees the graph as it was captured."""

    def __call__(self, gm: torch.fx.GraphModule) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class Graph:
    """A copy of one graph, as some pass left it."""

    name: str
    gm: torch.fx.GraphModule

    def __str__(self) -> str:
        return print_graph(self.gm, self.name)

    def schedule(self) -> str:
        return print_schedule(self.gm, self.name)

    def then(self, step: Any) -> Graph:
        """The graph that `step` makes of this one, which stays as it is."""
        gm = copy_of(self.gm)
        step(gm)
        gm.recompile()
        return Graph(self.name, gm)


@dataclasses.dataclass(frozen=True)
class Trace:
    """What every pass left of every graph, in the order in which they ran."""

    steps: list[tuple[object, Graph]]
    graphs: RewrittenGraphs

    def after(self, kind: type, name: str = "forward") -> Graph:
        """The graph `name` ("joint", "forward", "backward") as the pass of this class left it."""
        [found] = [graph for step, graph in self.steps if type(step) is kind and graph.name == name]
        return found

    def before(self, kind: type, name: str = "forward") -> Graph:
        """The graph `name` as the pass of this class found it."""
        of_name = [(step, graph) for step, graph in self.steps if graph.name == name]
        [index] = [index for index, (step, _) in enumerate(of_name) if type(step) is kind]
        return of_name[index - 1][1]


def trace(
    model: nn.Module,
    *inputs: Any,
    world_size: int = 2,
    replicas: int = 1,
    policy: Any = "auto",
    reduction: GradientReduction = MEAN,
    mp_policy: Any = None,
    communication: CommunicationDtype = UNCHANGED,
    prepare: Callable[[nn.Module], None] = lambda reading: None,
    **options: Any,
) -> Trace:
    """All graphs of `model(*inputs)` on `replicas` x `world_size` ranks; `options` are those of `Pipeline.of`.

    `prepare` may change the model that is traced.
    """
    torch._dynamo.reset()
    steps: list[tuple[object, Graph]] = []

    def observe(name: str, step: object, gm: torch.fx.GraphModule) -> None:
        steps.append((step, Graph(name, copy_of(gm))))

    pipeline = Pipeline.of(observer=observe, **options)
    if torch.is_grad_enabled():  # without gradients only the first pass of a joint graph runs
        pipeline = dataclasses.replace(pipeline, joint=(Captured(), *pipeline.joint))
    units = find_units(model, policy)
    precision = find_precision(model, mp_policy, [])
    placement = Placement(
        axes_of(world_size, replicas),
        reduction,
        precision.policy_of_parameter,
        communication_of_unit={unit.name: communication for unit in units},
    )
    layouts = lay_out(units, placement)
    reading = reading_copy(model, layouts)
    install_casts(reading, precision)
    prepare(reading)
    captured = calls.trace(reading, off_meta(inputs), {}, lambda plan: pipeline)
    return Trace(steps, captured.rewritten(lambda plan: pipeline))


def axes_of(world_size: int, replicas: int = 1) -> Axes:
    copies = Axis(replicas, "replicate") if replicas > 1 else NO_AXIS
    if world_size == 1:
        return Axes(NO_AXIS, copies, copies)
    return Axes(Axis(world_size, "shard"), copies, Axis(world_size * replicas, "world"))


def copy_of(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    return torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))


class Drawing:
    """A graph written by hand, on tensors that have no memory."""

    def __init__(self) -> None:
        self.graph = torch.fx.Graph()
        self.mode = FakeTensorMode()

    def input(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.fx.Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def call(self, target: Any, *args: Any) -> torch.fx.Node:
        return ops.call(self.graph, target, *args)

    def gather(self, shard: torch.fx.Node, bucket: str, world_size: int = 2) -> torch.fx.Node:
        return self.call(ops.ALL_GATHER, shard, bucket, world_size, "shard")

    def view_out(self, gathered: torch.fx.Node, parameter: str, *shape: int) -> torch.fx.Node:
        return self.call(ops.VIEW_OUT, gathered, parameter, 0, list(shape), 2)

    def returns(self, *values: Any, name: str = "forward") -> Graph:
        self.graph.output(values)
        return Graph(name, torch.fx.GraphModule({}, self.graph))


class Pictures(expecttest.TestCase):
    """Tests whose expectation is the printed graph; EXPECTTEST_ACCEPT=1 draws it anew."""

    def assert_left_alone(self, graph: Graph, step: Any) -> None:
        self.assertEqual(str(graph.then(step)), str(graph))

    def assert_raises(self, error: type[Exception], function: Any, *args: Any, **kwargs: Any) -> str:
        """The message of the error that the call must raise."""
        with self.assertRaises(error) as caught:
            function(*args, **kwargs)
        return str(caught.exception)


def plain_graph(graph: torch.fx.Graph) -> str:
    """Text that is the same for graphs that differ in names of nodes and sizes alone, or in lists for tuples."""
    number = {node: f"n{index}" for index, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        target = node.op if node.op in ("placeholder", "output") else node.target
        arguments = torch.utils._pytree.tree_leaves(torch.fx.map_arg((node.args, node.kwargs), number.__getitem__))
        shape = re.sub(r"s\d+", "s", str(getattr(node.meta.get("val"), "shape", None)))
        lines.append(f"{number[node]} = {target} {arguments} {shape}")
    return "\n".join(lines)
