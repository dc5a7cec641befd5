"""Capture: how AOTAutograd and Inductor are driven.

`compile_fx` brings a Dynamo graph to a joint graph, runs Inductor's passes on it, and hands it to our partitioner
(`partitioner.py`), which returns forward and backward in schedule order; then it compiles each. Private torch API, as
of torch 2.11 to 2.15: `compile_fx` and its `inner_compile` hook, functorch's configuration, `boxed_nop`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
import torch._functorch.config
import torch.fx
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

from ..dependence import Paths
from ..passes import analysis, ops
from ..progress import phase
from ..runtime.autograd_cache import finding, keeps_calls, make_known
from ..runtime.backward import BucketGradient
from ..runtime.below_autograd import below_autograd
from ..runtime.compiled_once import compiled_once
from ..runtime.given import HasGradient, Results
from ..runtime.inductor import fast_matmuls, few_casts, whole_copies
from ..runtime.joined_kernels import joined_kernels
from ..runtime.kernels import capturing
from ..runtime.outlined_blocks import outlined, own_memory
from ..runtime.pickled_graphs import runs_elsewhere
from ..runtime.updates import updating
from .garbage import set_aside
from .inductor_options import AS_EAGER, KEEP_SCHEDULE
from .kept_calls import Keep
from .partitioner import Partitioner, Rewriting
from .writes import refuse_writes, sharded_inputs


class Running(Protocol):
    """A compiled backward that runs."""

    def update(self, gradient: torch.Tensor, output: int) -> None:
        """What `fsdp::update` does."""

    def finish(self, returned: list[Any]) -> None:
        """What is left to do when it has run, with what that returns, which may be replaced."""


class Backward(Protocol):
    """What is to be known of the runs of a compiled graph that has a backward."""

    def await_gradients(self) -> None:
        """A forward has run."""

    def begin(
        self, gradients: Sequence[BucketGradient], arguments: dict[str, Any], has_gradient: HasGradient | None
    ) -> Running:
        """Its backward begins, with what it does, its arguments by name, which may be replaced, and which gradients
        eager would have (None: all)."""


@dataclasses.dataclass(frozen=True)
class Capture(Rewriting):
    """How one Dynamo graph is rewritten and compiled.

    Attributes:
        backward: is told whenever the compiled graph runs; None if it never does.
        running: a context for a forward, or not, while its compiled graph runs.
        generates_code: whether Inductor compiles the graphs, or they run as they are.
        options: Inductor's, by name.
        records_cuda_graphs: whether they include that what runs on a GPU is recorded.
        keep: how compiled calls are kept for the next start; None: they are not.
    """

    backward: Backward | None = None
    running: Callable[[bool], AbstractContextManager[None]] = lambda is_forward: nullcontext()
    generates_code: bool = True
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    records_cuda_graphs: bool = False
    keep: Keep | None = None

    def compile(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """The compiled form of a graph from Dynamo.

        Raises:
            ConfigError: the graph writes to a parameter.
        """
        refuse_writes(gm.graph, sharded_inputs(gm.graph, example_inputs))
        results = Results()
        paths = Paths.note(gm, example_inputs)
        keep = self.keep if _reads_shards(gm) and keeps_calls(example_inputs) else None
        partitioner = Partitioner(self, results, paths, keep)
        compiled = self._compiled(gm, example_inputs, partitioner)

        def run(*arguments: Any) -> Any:
            before = results.nodes_of(arguments)
            with self.running(True):
                outputs = compiled(*arguments)
            if partitioner.gradients and self.backward is not None:
                self.backward.await_gradients()
            results.watch(arguments, outputs, before)
            return outputs

        return run

    def _compiled(
        self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], partitioner: Partitioner
    ) -> Callable[..., Any]:
        keep, paths = partitioner.keep, partitioner.paths
        patches = {"custom_partitioner_fn": partitioner, **self.options}
        if _reads_shards(gm):
            patches |= KEEP_SCHEDULE
        decompositions: dict[Any, Any] | None = None  # Inductor's
        if not self.generates_code:
            patches, decompositions = {**AS_EAGER, **patches}, {}
        if keep is not None:
            leaves = None if paths is None else paths.leaves
            conditions = f"{partitioner.uuid()} {keep.conditions} {leaves} {self.generates_code}"
            wrap = partial(self._wrapped, partitioner)
            graph = None if self.generates_code else partial(_found_as_it_is, partitioner)
            kept = finding(conditions, partitioner.takes, wrap, partitioner.await_others, graph)
        else:  # a hit in AOTAutograd's cache would bypass the partitioner, and with it `on_graphs`
            kept = torch._functorch.config.patch(enable_autograd_cache=False)
        with partitioner.turn, kept, set_aside(), capturing(), phase("tracing") as tracing, joined_kernels():
            compiled: Any = compile_fx(
                gm,
                example_inputs,
                inner_compile=partial(self._inner_compile, partitioner),
                config_patches=patches,
                decompositions=decompositions,
            )
            if partitioner.found is not None and not partitioner.is_shared:
                tracing.remark = " (compiled before)"
        if keep is not None and partitioner.found is not None:
            keep.on_found(partitioner.found)
        return compiled  # type: ignore[no-any-return]

    def _inner_compile(
        self, partitioner: Partitioner, graph: torch.fx.GraphModule, inputs: Sequence[Any], **kwargs: Any
    ) -> Any:
        if kwargs.get("is_inference"):
            partitioner.rewrite_inference(graph)
        if (static := kwargs.get("static_input_idxs")) is not None:
            kwargs["static_input_idxs"] = partitioner.static(graph, static)
        with set_aside(), fast_matmuls(), whole_copies(), few_casts(), own_memory():
            compiled = _generated(graph, inputs, kwargs) if self.generates_code else _as_it_is(graph)
        if kwargs.get("is_backward"):
            partitioner.note_arguments(graph)
        run = self._wrapped(partitioner, compiled, bool(kwargs.get("is_backward")))
        if partitioner.file is not None and not self._made_known(run, compiled, graph, partitioner.file):
            partitioner.forget()
        return run

    def _made_known(self, run: Any, compiled: Any, graph: torch.fx.GraphModule, file: str) -> bool:
        if self.generates_code:
            return make_known(run, compiled, file)
        return runs_elsewhere(graph) and make_known(run, None, file)

    def _wrapped(self, partitioner: Partitioner, compiled: Any, is_backward: bool) -> Callable[..., Any]:
        run = below_autograd(compiled)
        if not is_backward or self.backward is None:
            return run
        return self._noting(run, partitioner, self.backward)

    def _noting(self, compiled: Callable[..., Any], partitioner: Partitioner, backward: Backward) -> Callable[..., Any]:
        names = partitioner.arguments

        def run(arguments: list[Any]) -> Any:
            value_of_name = dict(zip(names, arguments, strict=True))
            has_gradient = partitioner.results.in_running_backward()
            with self.running(False):
                running = backward.begin(partitioner.gradients, value_of_name, has_gradient)
                arguments[:] = value_of_name.values()
                value_of_name.clear()  # the compiled code frees its arguments as early as it can
                with updating(running.update):
                    returned = list(compiled(arguments))
                running.finish(returned)
            return list(map(_copied, returned)) if self.records_cuda_graphs else returned

        run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd passes a list that we may empty
        return run


def _copied(returned: Any) -> Any:
    """A gradient that is still there when a CUDA graph takes its memory for the next call."""
    return returned.clone() if isinstance(returned, torch.Tensor) else returned


def _reads_shards(gm: torch.fx.GraphModule) -> bool:
    """Whether a Dynamo graph, or one inside it (activation checkpointing makes those), reads a sharded parameter."""
    return any(ops.is_call(node, ops.UNSHARD) for graph in analysis.graphs_of(gm) for node in graph.nodes)


def _generated(graph: torch.fx.GraphModule, inputs: Sequence[Any], arguments: dict[str, Any]) -> Any:
    """The graph as Inductor compiles it."""
    hits, misses = (counters["inductor"][f"fxgraph_cache_{what}"] for what in ("hit", "miss"))
    with phase(f"compiling the {'backward' if arguments.get('is_backward') else 'forward'}") as compiling:
        graph = outlined(graph)
        with compiled_once(graph) as by_another, joined_kernels():
            compiled = compile_fx_inner(graph, inputs, **arguments)
        if counters["inductor"]["fxgraph_cache_hit"] > hits:
            compiling.remark = " (compiled by another process)" if by_another else " (from the cache)"
        elif counters["inductor"]["fxgraph_cache_miss"] > misses:
            compiling.remark = " (cached for next time)"
    return compiled


def _found_as_it_is(partitioner: Partitioner, is_backward: bool) -> Callable[..., Any]:
    lowered = partitioner.found.lowered  # type: ignore[union-attr]  # it was taken
    return _as_it_is(lowered.backward if is_backward else lowered.forward)  # type: ignore[arg-type]


def _as_it_is(graph: torch.fx.GraphModule) -> Callable[..., Any]:
    """The graph without code generation; like compiled code, it lets go of every input after its last use.

    An input whose node has another name is assigned to that name first, and what it was called before lives on.
    """
    copied = copy.deepcopy(graph.graph)
    for node in analysis.inputs(copied):
        node.target = node.name
    return boxed_nop(torch.fx.GraphModule(graph, copied), [])
