"""Capture: the only file that knows how AOTAutograd and Inductor are driven.

`compile_fx` brings a Dynamo graph to a joint graph, runs Inductor's passes on it, and hands it to our partitioner,
which runs the pipeline and returns forward and backward in schedule order; then it compiles each. Private torch API, as
of torch 2.11 to 2.15: `compile_fx` and its `inner_compile` hook, `custom_partitioner_fn`, Inductor's configuration,
`boxed_nop`, graph modules whose code is generated late, and how a module calls its compiled form.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
import torch._functorch.config
import torch.fx
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module

from ..dependence import Paths
from ..errors import CaptureError, ConfigError, PassError, RankError, VerifyError
from ..graphs import RewrittenGraphs
from ..passes import analysis, ops
from ..passes.fewer_units import EqualUnits
from ..passes.halves import Halves, copy_of
from ..passes.new_layout import NewLayout
from ..passes.pipeline import Pipeline
from ..passes.plan import StepPlan
from ..progress import phase
from ..runtime.autograd_cache import finding, keeps_calls, make_known
from ..runtime.backward import BucketGradient
from ..runtime.below_autograd import below_autograd
from ..runtime.compilations import Compilations
from ..runtime.compiled_once import compiled_once
from ..runtime.given import HasGradient, Results
from ..runtime.inductor import Fences, InOrder, fast_matmuls, few_casts, generator_digest, whole_copies
from ..runtime.joined_kernels import joined_kernels
from ..runtime.kernels import capturing
from ..runtime.modules import not_captured
from ..runtime.outlined_blocks import outlined, own_memory
from ..runtime.updates import updating
from .kept_calls import Keep, KeptCall
from .traces import MakePlan, Trace, program, rewriting
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


_REORDERING = {  # what Inductor would otherwise do to the order of the nodes, or to collectives, in some version
    "reorder_for_locality": False,
    "reorder_for_peak_memory": False,
    "reorder_for_compute_comm_overlap": False,
    "aten_distributed_optimizations.allow_comms_decompositions": False,
    "aten_distributed_optimizations.enable_low_contention_collectives": False,
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
    "aten_distributed_optimizations.enable_simple_overlap": False,  # on by default, from torch 2.14 on
    "bucket_all_gathers_fx": "none",
    "bucket_all_reduces_fx": "none",
    "bucket_reduce_scatters_fx": "none",
    "combo_kernels": False,
    "graph_partition": False,  # of two CUDA graphs, one would start a collective and the other wait for it
    "triton.reorder_for_reducing_graph_partitions": False,
    "_fuse_ddp_communication": False,
    "_micro_pipeline_tp": False,
    "_post_fusion_custom_pass": InOrder(),
    "_pre_fusion_custom_pass": Fences(),
}
_KEEP_SCHEDULE = {name: value for name, value in _REORDERING.items() if name in torch._inductor.list_options()}

_AS_EAGER = {"fallback_random": True, "pattern_matcher": False, "joint_graph_constant_folding": False}
"""Without code generation, a graph has eager's operators and random numbers, and so its results to the last bit."""


@dataclasses.dataclass(frozen=True)
class Capture:
    """How one Dynamo graph is rewritten and compiled.

    Attributes:
        pipeline: the passes for a plan; for None, without one.
        plan: makes plans; None for a schedule that follows from the options alone.
        on_graphs: called with the rewritten graphs before they are compiled.
        backward: is told whenever the compiled graph runs; None if it never does.
        running: a context for a forward, or not, while its compiled graph runs.
        generates_code: whether Inductor compiles the graphs, or they run as they are.
        options: Inductor's, by name.
        on_trace: ends the compilation, with what was traced, before that is rewritten.
        keep: how compiled calls are kept for the next start; None: they are not.
    """

    pipeline: Callable[[StepPlan | None], Pipeline]
    plan: MakePlan | None
    on_graphs: Callable[[RewrittenGraphs], None]
    backward: Backward | None
    running: Callable[[bool], AbstractContextManager[None]] = lambda is_forward: nullcontext()
    generates_code: bool = True
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    on_trace: Callable[[Trace], NoReturn] | None = None
    keep: Keep | None = None

    def compile(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """The compiled form of a graph from Dynamo.

        Raises:
            ConfigError: the graph writes to a parameter.
        """
        refuse_writes(gm.graph, sharded_inputs(gm.graph, example_inputs))
        results = Results()
        paths = Paths.note(gm, example_inputs)
        keep = self.keep if self.generates_code and _reads_shards(gm) and keeps_calls() else None
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
            patches |= _KEEP_SCHEDULE
        decompositions: dict[Any, Any] | None = None  # Inductor's
        if not self.generates_code:
            patches, decompositions = {**_AS_EAGER, **patches}, {}
        if keep is not None:
            conditions = f"{partitioner.uuid()} {keep.conditions} {None if paths is None else paths.leaves}"
            kept = finding(conditions, partitioner.takes, partial(self._wrapped, partitioner))
        else:  # a hit in AOTAutograd's cache would bypass the partitioner, and with it `on_graphs`
            kept = torch._functorch.config.patch(enable_autograd_cache=False)
        with kept, uncollected(), capturing(), phase("tracing") as tracing:
            compiled: Any = compile_fx(
                gm,
                example_inputs,
                inner_compile=partial(self._inner_compile, partitioner),
                config_patches=patches,
                decompositions=decompositions,
            )
            if partitioner.found is not None:
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
        with uncollected(), fast_matmuls(), whole_copies(), few_casts(), own_memory(), joined_kernels():
            compiled = _generated(graph, inputs, kwargs) if self.generates_code else _as_it_is(graph, inputs)
        if kwargs.get("is_backward"):
            partitioner.note_arguments(graph)
        run = self._wrapped(partitioner, compiled, bool(kwargs.get("is_backward")))
        if partitioner.file is not None:
            make_known(run, compiled, partitioner.file)
        return run

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
            return returned

        run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd passes a list that we may empty
        return run


_is_frozen = False
"""Whether objects are frozen: by `uncollected`, or by the user, once that was seen. To count them takes long."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, Python's garbage collector does not look again and again through what is there before."""
    global _is_frozen
    if _is_frozen or gc.get_freeze_count():
        _is_frozen = True
        yield
        return
    gc.freeze()
    _is_frozen = True
    try:
        yield
    finally:
        gc.unfreeze()
        _is_frozen = False


def _reads_shards(gm: torch.fx.GraphModule) -> bool:
    """Whether a Dynamo graph, or one inside it (activation checkpointing makes those), reads a sharded parameter."""
    graphs = [module.graph for module in gm.modules() if isinstance(module, torch.fx.GraphModule)]
    return any(ops.is_call(node, ops.UNSHARD) for graph in graphs for node in graph.nodes)


@dataclasses.dataclass
class _Splits:
    """A joint graph in halves, for every activation memory budget that is asked for; it is left as it is.

    Attributes:
        layout: what the graph is laid out by, if not by what `traced` was.
    """

    joint: torch.fx.GraphModule
    pipeline: Pipeline
    num_fwd_outputs: int
    static_inputs: Sequence[int]
    layout: NewLayout | None = None
    traced: _Splits | None = None
    found: dict[float | None, Halves] = dataclasses.field(default_factory=dict)

    def laid_out(self, layout: NewLayout) -> _Splits:
        return dataclasses.replace(self, layout=layout, traced=self, found={})

    def of(self, activations: float | None) -> Halves:
        if activations not in self.found:
            self.found[activations] = self._split(activations)
        return self.found[activations]

    def _split(self, activations: float | None) -> Halves:
        if self.traced is not None and self.layout is not None and activations is None and activations_are_free():
            return self.layout.change_halves(self.traced.of(None).copies())
        # What the partitioner chooses within a budget depends on the sizes of shards, too.
        setting = {} if activations is None else {"activation_memory_budget": activations}
        copied = self._merged()
        with torch._functorch.config.patch(setting), _use_lazy_graph_module(True):
            return _coded_late(Halves.of(copied, self.num_fwd_outputs, self.static_inputs))

    def _merged(self) -> torch.fx.GraphModule:
        """A copy of the joint graph in this layout, its unshards and gradients merged."""
        self.joint.graph.set_codegen(torch.fx.graph.CodeGen())  # that of trees as arguments warns when it is copied
        copied = copy_of(self.joint)
        self.pipeline.merge(copied)
        if self.layout is not None:
            self.layout.change_graph(copied.graph)
        return copied

    def shortened(self, num_units: int) -> tuple[_Splits, float] | None:
        """The same with so many of the equal units, and the part of all units that these are with the others.

        None where there are less than twice as many, or where units cannot be left out.
        """
        copied = self._merged()
        equal = EqualUnits.of(copied.graph)
        if equal is None or len(equal.names) < 2 * num_units:
            return None
        num_before = num_units // 2
        num_skipped = len(equal.names) - num_units
        if not equal.skip(num_before, num_before + num_skipped):
            return None
        part = 1 - num_skipped / equal.num_units
        return dataclasses.replace(self, joint=copied, layout=None, traced=None, found={}), part


def _coded_late(halves: Halves) -> Halves:
    """The same halves; their code, and that of copies of them, is generated when it is first asked for.

    To generate it takes as long as several passes, and of most copies nobody asks for it.
    """
    forward, backward = map(_LazyGraphModule.from_graphmodule, (halves.forward, halves.backward))
    return dataclasses.replace(halves, forward=forward, backward=backward)


def activations_are_free() -> bool:
    """Whether torch's activation memory budget is as it is by default."""
    return bool(torch._functorch.config.activation_memory_budget == 1.0)


class Partitioner(CustomPartitionerFn):
    """Where Inductor asks for a partition of the joint graph, the pipeline runs.

    Attributes:
        keep: how the call is kept, and looked up; None: it is not.
        arguments: the names of what the backward takes.
        found: what an earlier start has kept of the call, if it is this one.
        file: what this start has kept of it.
    """

    def __init__(self, capture: Capture, results: Results, paths: Paths | None, keep: Keep | None) -> None:
        self.capture, self.results, self.paths, self.keep = capture, results, paths, keep
        self.gradients: list[BucketGradient] = []
        self.arguments: Sequence[str] = ()
        self.found: KeptCall | None = None
        self.file: str | None = None

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
            self.arguments, self.file = names, None

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
        capture = self.capture
        with self._rewriting():
            traced = Trace(program("inference", gm.graph), gm)
            if capture.on_trace is not None:
                capture.on_trace(traced)
            plan = None if capture.plan is None else traced.plan(capture.plan)
            graphs = RewrittenGraphs.of(capture.pipeline(plan).rewrite_inference(gm), plan=plan)
            capture.on_graphs(graphs)
            self._write(graphs, traced.program)

    def _rewritten(
        self, gm: torch.fx.GraphModule, num_fwd_outputs: int, static_inputs: Sequence[int]
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        pipeline = self.capture.pipeline(None)
        if self.paths is not None:
            self.results.dependence = self.paths.dependence()
        splits = _Splits(gm, pipeline, num_fwd_outputs, static_inputs)
        traced = Trace(program("training", gm.graph), splits, self.results.dependence)
        if self.capture.on_trace is not None:
            splits.of(None)  # by the settings of this compilation
            self.capture.on_trace(traced)
        if self.capture.plan is None:
            plan, halves = None, _coded_late(pipeline.split(gm, num_fwd_outputs, static_inputs))
        else:
            plan = traced.plan(self.capture.plan)
            halves = splits.of(plan.activations if plan else None)
        forward, backward = self.capture.pipeline(plan).rewrite_halves(halves)
        self.gradients += bucket_gradients(backward.scheduled.graph)
        self.arguments = _input_names(backward.lowered)
        graphs = RewrittenGraphs.of(forward, backward, plan, self.results.dependence)
        self.capture.on_graphs(graphs)
        self._write(graphs, traced.program)
        if self.file is not None:  # AOTAutograd empties the notes of a backward's nodes when it makes an entry
            return forward.lowered, copy_of(backward.lowered)
        return forward.lowered, backward.lowered

    def _write(self, graphs: RewrittenGraphs, program: str) -> None:
        self.file = None
        if self.keep is not None:  # of a call with several joint graphs, none is kept
            self.file, self.keep = self.keep.write(graphs, program, self.gradients, self.arguments), None

    def static(self, half: torch.fx.GraphModule, indices: Sequence[int]) -> list[int]:
        """Which inputs of a half are at the same address whenever it runs, of those that Inductor takes for such.

        It takes all parameters; those that hold gradients that were kept are new in each step.
        """
        names = _input_names(half)
        kept = {gradient.accumulated for gradient in self.gradients}
        return [index for index in indices if names[index] not in kept]

    def uuid(self) -> str:
        """For Inductor's cache of generated code, whose key contains the graphs that we return."""
        return f"fsdp_compile {generator_digest().hex()} {self.capture.pipeline(None)}"

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.uuid(),)  # the key of that cache also pickles us, as a part of Inductor's configuration


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


def _generated(graph: torch.fx.GraphModule, inputs: Sequence[Any], arguments: dict[str, Any]) -> Any:
    """The graph as Inductor compiles it."""
    hits, misses = (counters["inductor"][f"fxgraph_cache_{what}"] for what in ("hit", "miss"))
    with phase(f"compiling the {'backward' if arguments.get('is_backward') else 'forward'}") as compiling:
        graph = outlined(graph)
        with compiled_once(graph) as by_another:
            compiled = compile_fx_inner(graph, inputs, **arguments)
        if counters["inductor"]["fxgraph_cache_hit"] > hits:
            compiling.remark = " (compiled by another process)" if by_another else " (from the cache)"
        elif counters["inductor"]["fxgraph_cache_miss"] > misses:
            compiling.remark = " (cached for next time)"
    return compiled


def _as_it_is(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """The graph without code generation; like compiled code, it lets go of every input after its last use.

    An input whose node has another name is assigned to that name first, and what it was called before lives on.
    """
    copied = copy.deepcopy(graph.graph)
    for node in analysis.inputs(copied):
        node.target = node.name
    return boxed_nop(torch.fx.GraphModule(graph, copied), list(inputs))


_OURS = (
    ConfigError,
    PassError,
    RankError,
    VerifyError,
)  # what Dynamo wraps in an error of its own when a backend raises it


class _Captured(Exception):
    """Ends a call as soon as what is asked of it is known: nothing runs."""

    def __init__(self, found: Any) -> None:
        self.found = found


def trace(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    pipeline: Callable[[StepPlan | None], Pipeline],
) -> Trace:
    """What `model(*args, **kwargs)` is traced as; nothing runs.

    Args:
        pipeline: as that of `Capture`.

    Raises:
        CaptureError: the call cannot be traced as one graph.
    """

    def end(found: Trace) -> NoReturn:
        raise _Captured(found)

    found: Trace = _captured(model, args, kwargs, Capture(pipeline, None, _nothing, None, on_trace=end))
    return found


def generate(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    pipeline: Callable[[StepPlan | None], Pipeline],
    plan: MakePlan | None,
    before_compiling: Callable[[RewrittenGraphs], None],
) -> RewrittenGraphs:
    """The rewritten graphs of `model(*args, **kwargs)`, which Inductor compiles; nothing runs.

    Args:
        pipeline, plan: as those of `Capture`.
        before_compiling: is called with the graphs.

    Raises:
        CaptureError: the call cannot be traced as one graph.
    """
    found: list[RewrittenGraphs] = []

    def note(graphs: RewrittenGraphs) -> None:
        before_compiling(graphs)
        found.append(graphs)

    _captured(model, args, kwargs, Capture(pipeline, plan, note, None))
    return found[0]


def _nothing(_: RewrittenGraphs) -> None:
    pass


def _captured(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    capture: Capture,
) -> Any:
    """Compile the call with `capture`; returns what that has ended with, if it does not go to the end."""

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        capture.compile(gm, example_inputs)
        raise _Captured(None)

    try:
        # Sizes stay numbers, whatever those of other calls were; and by its own name, this makes no symbols of those.
        call = _calling(model, "rewrite_")
        with phase("tracing", of=type(model).__name__):
            torch.compile(call, backend=backend, fullgraph=True, dynamic=False)(*args, **kwargs)
    except BackendCompilerFailed as e:
        if isinstance(e.inner_exception, _Captured):
            return e.inner_exception.found
        if isinstance(e.inner_exception, _OURS):
            raise e.inner_exception from None
        raise
    except TorchDynamoException as e:
        raise CaptureError(f"the model cannot be traced as one graph: {e}") from e
    raise CaptureError("the call computes nothing with tensors: there is no graph to rewrite")


def compile_module(model: torch.nn.Module, compilations: Compilations, **options: Any) -> None:
    """`model.compile(**options)`, but with the hooks of `model` itself in the graph, and our errors as they are.

    Graph breaks and recompilations are noted in `compilations`.
    """
    compiled = torch.compile(_calling(model), **options)
    name = type(model).__name__

    @not_captured
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return compiled(*args, **kwargs)
        try:
            with compilations.noting(name):
                return compiled(*args, **kwargs)
        except BackendCompilerFailed as e:
            if isinstance(e.inner_exception, _OURS):
                raise e.inner_exception from None
            raise

    model._compiled_call_impl = call


def _calling(model: torch.nn.Module, prefix: str = "") -> Callable[..., Any]:
    """A function that calls `model`. Dynamo begins with the code of `forward` if it is given the model.

    It counts recompilations by code object: each function has its own.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=prefix + type(model).__name__)
    return call


def inductor_options(options: object) -> dict[str, Any]:
    """The options by the names that Inductor has for them.

    Raises:
        ConfigError: Inductor does not have one, or not with a value of this type, or it would undo the schedule.
    """
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(f"options is a map from names of Inductor's options, not {options!r}")
    known = torch._inductor.list_options()
    found = {}
    for given, value in (options or {}).items():
        name = given.replace("-", "_") if isinstance(given, str) else given
        if name not in known:
            raise ConfigError(f"options: Inductor has no option {given!r}")
        if name in _KEEP_SCHEDULE or name == "custom_partitioner_fn":
            raise ConfigError(f"options: {given} would undo the schedule of the rewritten graphs")
        kind = torch._inductor.config.get_type(name)  # type: ignore[attr-defined]
        if not _is_of(value, kind):
            raise ConfigError(f"options: {given} is of the type {getattr(kind, '__name__', kind)}, not {value!r}")
        found[name] = value
    return found


def _is_of(value: object, kind: Any) -> bool:
    """Whether an option that Inductor declares as of this type may have the value; yes, where only a call can tell."""
    if kind is type(None):  # declared by its default only
        return True
    try:
        return isinstance(value, kind) or (isinstance(value, int) and isinstance(0.0, kind))
    except TypeError:  # of generic types, such as list[str]
        return True
