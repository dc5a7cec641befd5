"""What Inductor calls to partition a joint graph: the pipeline runs there, or what was kept of it is taken.

Private torch API, as of torch 2.11 to 2.15: `custom_partitioner_fn`, and what stands for objects in graphs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
import torch.fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._library.fake_class_registry import FakeScriptObject

from ..dependence import Paths
from ..graphs import RewrittenGraphs
from ..passes import analysis, ops
from ..passes.halves import copy_of
from ..passes.pipeline import Pipeline
from ..passes.plan import StepPlan
from ..progress import phase
from ..runtime.backward import BucketGradient
from ..runtime.given import Results
from ..runtime.inductor import generator_digest
from .kept_calls import Keep, KeptCall
from .splits import Splits, coded_late
from .traces import MakePlan, Trace, program, rewriting


@dataclasses.dataclass(frozen=True)
class Rewriting:
    """How the graphs of a call are rewritten.

    Attributes:
        pipeline: the passes for a plan; for None, without one.
        plan: makes plans; None for a schedule that follows from the options alone.
        on_graphs: called with the rewritten graphs before they are compiled.
        on_trace: ends the compilation, with what was traced, before that is rewritten.
    """

    pipeline: Callable[[StepPlan | None], Pipeline]
    plan: MakePlan | None
    on_graphs: Callable[[RewrittenGraphs], None]
    on_trace: Callable[[Trace], NoReturn] | None = None


class Partitioner(CustomPartitionerFn):
    """Where Inductor asks for a partition of the joint graph, the pipeline runs.

    Attributes:
        keep: how the call is kept, and looked up; None: it is not.
        arguments: the names of what the backward takes.
        found: what was kept of the call, if it is this one.
        file: what this process has kept of it.
        turn: is left with the compilation, or as soon as it is known that nothing is kept of it.
        is_shared: whether another process has just had its turn.
    """

    def __init__(self, how: Rewriting, results: Results, paths: Paths | None, keep: Keep | None) -> None:
        self.how, self.results, self.paths, self.keep = how, results, paths, keep
        self.gradients: list[BucketGradient] = []
        self.arguments: Sequence[str] = ()
        self.found: KeptCall | None = None
        self.file: str | None = None
        self.turn = ExitStack()
        self.is_shared = False

    def takes(self, data: bytes) -> bool:
        """Whether the call that was kept with this file is the one to run: then there is nothing to rewrite."""
        call = KeptCall.of(data)
        if self.keep is None or not self.keep.takes(call):
            return False
        self.found, self.gradients, self.arguments = call, list(call.gradients), call.arguments
        self.results.dependence = call.dependence
        return True

    def note_arguments(self, backward: torch.fx.GraphModule) -> None:
        names = _input_names(backward)
        if names != self.arguments:  # AOTAutograd has changed them since, and what was kept is of no use
            self.arguments = names
            self.forget()

    def await_others(self, call: str) -> bool:
        """See `autograd_cache.finding`."""
        if self.keep is not None:
            with phase("waiting for another process, which compiles it"):
                self.is_shared = self.turn.enter_context(self.keep.compiling(call))
        return self.is_shared

    def forget(self) -> None:
        """Nothing is kept of the call: other processes compile it themselves, and need not wait for this one."""
        self.file = None
        self.turn.close()

    def __call__(
        self, gm: torch.fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        with self._rewriting():
            return self._rewritten(gm, kwargs["num_fwd_outputs"], kwargs.get("static_lifetime_input_indices") or ())

    @contextmanager
    def _rewriting(self) -> Iterator[None]:
        """What is rewritten was not found, or without its code."""
        if self.found is not None:
            self.found, self.gradients, self.results.dependence = None, [], None
        with rewriting():
            yield

    def rewrite_inference(self, gm: torch.fx.GraphModule) -> None:
        """Run the pipeline on the graph of a call that needs no gradients."""
        with self._rewriting():
            traced = Trace(program("inference", gm.graph), gm)
            if self.how.on_trace is not None:
                self.how.on_trace(traced)
            plan = None if self.how.plan is None else traced.plan(self.how.plan)
            graphs = RewrittenGraphs.of(self.how.pipeline(plan).rewrite_inference(gm), plan=plan)
            self.how.on_graphs(graphs)
            self._write(graphs, traced.program)

    def _rewritten(
        self, gm: torch.fx.GraphModule, num_fwd_outputs: int, static_inputs: Sequence[int]
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        return_what_is_given(gm.graph, num_fwd_outputs)
        pipeline = self.how.pipeline(None)
        if self.paths is not None:
            self.results.dependence = self.paths.dependence()
        splits = Splits(gm, pipeline, num_fwd_outputs, static_inputs)
        traced = Trace(program("training", gm.graph), splits, self.results.dependence)
        if self.how.on_trace is not None:
            splits.of(None)  # by the settings of this compilation
            self.how.on_trace(traced)
        if self.how.plan is None:
            plan, halves = None, coded_late(pipeline.split(gm, num_fwd_outputs, static_inputs))
        else:
            plan = traced.plan(self.how.plan)
            halves = splits.of(plan.activations if plan else None)
        forward, backward = self.how.pipeline(plan).rewrite_halves(halves)
        self.gradients += bucket_gradients(backward.scheduled.graph)
        self.arguments = _input_names(backward.lowered)
        graphs = RewrittenGraphs.of(forward, backward, plan, self.results.dependence)
        self.how.on_graphs(graphs)
        self._write(graphs, traced.program)
        if self.file is not None:  # AOTAutograd empties the notes of a backward's nodes when it makes an entry
            return forward.lowered, copy_of(backward.lowered)
        return forward.lowered, backward.lowered

    def _write(self, graphs: RewrittenGraphs, program: str) -> None:
        self.file = None
        if self.keep is not None:  # of a call with several joint graphs, none is kept
            self.file, self.keep = self.keep.write(graphs, program, self.gradients, self.arguments), None
        if self.file is None:
            self.forget()

    def static(self, half: torch.fx.GraphModule, indices: Sequence[int]) -> list[int]:
        """Which inputs of a half are at the same address whenever it runs, of those that Inductor takes for such.

        It takes all parameters; those that hold gradients that were kept are new in each step.
        """
        names = _input_names(half)
        kept = {gradient.accumulated for gradient in self.gradients}
        return [index for index in indices if names[index] not in kept]

    def uuid(self) -> str:
        """For Inductor's cache of generated code, whose key contains the graphs that we return."""
        return f"fsdp_compile {generator_digest().hex()} {self.how.pipeline(None)}"

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.uuid(),)  # the key of that cache also pickles us, as a part of Inductor's configuration


def return_what_is_given(joint: torch.fx.Graph, num_fwd_outputs: int) -> None:
    """Have the forward return its own input where AOTAutograd has it return an equal object, which the backward gets.

    Those are the meshes of DTensors. Torch (2.13) tells them apart by identity, and caches of DTensor's operators hold
    the mesh of an earlier model, which is equal to that of the inputs.
    """
    output = joint.output_node()
    results = analysis.outputs(joint)
    values = {node: node.meta.get("val") for node in analysis.inputs(joint)}
    objects = {node: value.real_obj for node, value in values.items() if isinstance(value, FakeScriptObject)}
    given = {node: value for node, value in objects.items() if not _is_tangent(node)}
    for index, result in enumerate(results[:num_fwd_outputs]):
        if result in objects and _is_tangent(result):
            results[index] = next((node for node, value in given.items() if value == objects[result]), result)
    output.args = (results,)


def _is_tangent(node: torch.fx.Node) -> bool:
    return "tangents" in str(node.target)


def _input_names(gm: torch.fx.GraphModule) -> list[str]:
    return [node.name for node in analysis.inputs(gm.graph)]


def bucket_gradients(backward: torch.fx.Graph) -> list[BucketGradient]:
    """What a backward does with the gradients of each bucket."""
    found = []
    for node in backward.nodes:
        if ops.is_call(node, ops.PACK, ops.REDUCE_SCATTER_GROUPED):
            accumulated = ops.argument(node, "accumulated")
            found.append(
                BucketGradient(
                    ops.argument(node, "bucket"),
                    ops.argument(node, "offsets"),
                    is_kept=any(user.op == "output" for user in node.users),
                    accumulated=None if accumulated is None else accumulated.name,
                )
            )
    return found
