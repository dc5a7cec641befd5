"""The "fsdp" backend of torch.compile: capture -> pipeline -> compiler."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.fx
import torch.nn as nn

from .compiler.calls import compile_module
from .compiler.capture import Capture
from .compiler.inductor_options import inductor_options
from .compiler.kept_calls import Keep, KeptCall
from .compiler.options import CompileConfig
from .compiler.statements import Said
from .dependence import Dependence
from .errors import ConfigError
from .graphs import RewrittenGraphs
from .module.reading import is_reading
from .module.sharding import Sharding, sharding_of
from .passes.pipeline import Pipeline
from .passes.plan import StepPlan
from .planning.step_plans import Planner
from .runtime import copies, kernels  # noqa: F401  these register the kernels of operators
from .runtime.agreement import Agreement
from .runtime.backward import CompiledBackward
from .runtime.comparison import Statement
from .runtime.compiled_once import one_at_a_time
from .runtime.flat_shard import FlatShard, Shards
from .runtime.modules import not_captured

Compiled = Callable[..., Any]


def fsdp(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Compiled:
    """The backend behind `torch.compile(shard(model), backend="fsdp")`, registered as an entry point of torch.

    Args:
        options: Inductor's.

    Raises:
        ConfigError: when the compiled model is first called, if it was never sharded.
    """
    config = CompileConfig(options=inductor_options(options))
    shardings = _shardings(example_inputs)
    if not shardings and any(isinstance(value, nn.Parameter) for value in example_inputs):
        return _refuse
    return compile_graph(gm, example_inputs, shardings, config)


def backend_for(sharding: Sharding, config: CompileConfig) -> Callable[..., Compiled]:
    """The backend that `fsdp_compile` gives to torch.compile; it knows its model, and does not keep it alive."""
    reference = weakref.ref(sharding)

    def fsdp(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        shardings = dict.fromkeys([reference(), *_shardings(example_inputs)])
        return compile_graph(gm, example_inputs, [found for found in shardings if found is not None], config)

    return fsdp


@dataclasses.dataclass(frozen=True)
class CompileAs:
    """How a sharded model was compiled, to compile another one the same way: its deep copy, or the one loaded."""

    config: CompileConfig

    def __call__(self, model: nn.Module, sharding: Sharding | None = None) -> None:
        """Compile it. The sharding is that of the model that it is a part of, if it has none itself."""
        sharding, config = sharding or sharding_of(model), self.config
        backend = backend_for(sharding, config)
        compile_module(
            model, sharding.compilations, backend=backend, fullgraph=config.fullgraph, dynamic=config.dynamic
        )


def compile_parts(model: nn.Module) -> None:
    """Compile the parts of a model that `fsdp_compile` has compiled as well, each for calls of it alone.

    A method of the model other than `forward` may then call its parts; in the program of the model they stay a part.
    """
    sharding = sharding_of(model)
    for part in _callable_parts(model):
        CompileAs(sharding.compile.config)(part, sharding)  # type: ignore[union-attr]
        if is_reading(part):
            vars(part)["_compiled_call_impl"] = _in_forward(part, sharding, vars(part)["_compiled_call_impl"])


def _in_forward(part: nn.Module, sharding: Sharding, compiled: Compiled) -> Compiled:
    @not_captured
    def call(*args: Any, **kwargs: Any) -> Any:
        return sharding.running.run(part, compiled, args, kwargs)

    return call


def _callable_parts(model: nn.Module) -> Iterator[nn.Module]:
    """Its children that hold parameters; of a list or dict of modules, the modules in it."""
    for child in model.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _callable_parts(child)
        elif any(True for _ in child.parameters()):
            yield child


def compile_graph(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], shardings: list[Sharding], config: CompileConfig
) -> Compiled:
    """Rewrite and compile a graph that reads parameters of `shardings`.

    Raises:
        ConfigError: their models were given trainable parameters since, or are to run as CUDA graphs and cannot.
    """
    _refuse_newcomers(shardings)
    if config.records_cuda_graphs and any(shard.layout.feeds_back for each in shardings for shard in each.shards):
        raise ConfigError(
            "communication_dtype: error_feedback writes from step to step to what a CUDA graph would read: compile "
            "without CUDA graphs, or leave error_feedback out"
        )
    shards: dict[int, weakref.ref[FlatShard]] = {
        index: weakref.ref(shard)
        for index, value in enumerate(example_inputs)
        if (shard := getattr(value, "fsdp_flat_shard", None)) is not None
    }
    others = [index for index, value in enumerate(example_inputs) if not hasattr(value, "fsdp_flat_shard")]
    references = [weakref.ref(sharding) for sharding in shardings]
    agreed = _Agreed([found for found in dict.fromkeys(sharding.agreement for sharding in shardings) if found])

    backward = CompiledBackward([weakref.ref[Shards](found) for found in shardings], shards, others)

    def on_graphs(graphs: RewrittenGraphs) -> None:
        begin(Said.of(graphs), graphs.dependence, lambda: graphs)

    def on_found(call: KeptCall) -> None:
        begin(call.facts.said, call.dependence, lambda: call.graphs)

    def begin(said: Said, dependence: Dependence | None, read: Callable[[], RewrittenGraphs]) -> None:
        backward.dependence = dependence
        agreed.say(said)
        for sharding in filter(None, [reference() for reference in references]):
            sharding.made.append(read)

    for sharding in shardings:
        sharding.records_cuda_graphs |= config.records_cuda_graphs
    pipeline, planner = _common_pipeline(shardings, config)
    generates_code = config.backend == "inductor"
    capture = Capture(
        pipeline,
        planner.plan if planner else None,
        on_graphs,
        backward=backward,
        running=agreed.running,
        generates_code=generates_code,
        options=dict(config.options or {}),
        records_cuda_graphs=config.records_cuda_graphs,
        keep=_keep(shardings, planner, agreed, on_found),
    )
    compiled = capture.compile(gm, example_inputs)
    agreed.compare()  # when it is compiled: others may wait for that before they come here
    return compiled


@dataclasses.dataclass(frozen=True)
class _Facts:
    """What is kept of a call for the next start.

    Attributes:
        undecided: what ranks compare before the first decides on the plan.
    """

    said: Said
    undecided: Statement
    plan: StepPlan | None


def _keep(
    shardings: list[Sharding], planner: Planner | None, agreed: _Agreed, on_found: Callable[[KeptCall], None]
) -> Keep | None:
    """How calls are kept; None where passes of the user's own rewrite them, which may be others the next time."""
    if any(sharding.schedule.passes for sharding in shardings):
        return None

    def facts(graphs: RewrittenGraphs, program: str) -> _Facts:
        return _Facts(agreed.said, planner.undecided[program] if planner else [], graphs.plan)

    def takes(call: KeptCall) -> bool:
        return planner is None or planner.takes(call.program, call.facts.undecided, call.facts.plan)

    @contextmanager
    def compiling(call: str) -> Iterator[bool]:
        agreement = shardings[0].agreement
        if agreement is None:
            with one_at_a_time(call) as by_another:
                yield by_another
            return
        agreement.await_compiled(call)
        with one_at_a_time(f"{call} {agreement.job}") as by_another, agreement.compiling(None if by_another else call):
            yield by_another

    return Keep(str(planner.conditions if planner else None), facts, takes, on_found, compiling)


def _refuse_newcomers(shardings: list[Sharding]) -> None:
    """Whatever a model was given, Dynamo compiles anew for it."""
    for sharding in shardings:
        if (module := sharding.running.module) is not None and sharding.running.with_grad:
            sharding.refuse_newcomers(module)


@dataclasses.dataclass
class _Agreed:
    """A graph, between the ranks of the models whose parameters it reads.

    Attributes:
        said: of what runs.
        uncompared: what was said since the ranks have compared it.
    """

    agreements: list[Agreement]
    said: Said = dataclasses.field(default_factory=Said)
    uncompared: list[Said] = dataclasses.field(default_factory=list)

    def say(self, said: Said) -> None:
        """Of a graph that was rewritten, or found."""
        self.said = said
        self.uncompared.append(said)

    def compare(self) -> None:
        """Before it runs; RankError if another rank's has other collectives."""
        for said in self.uncompared:
            for agreement in self.agreements if said.statement else ():
                agreement.agree_on_graph(said.statement, said.groups)
        self.uncompared.clear()

    @contextmanager
    def running(self, is_forward: bool) -> Iterator[None]:
        """While it runs, or its backward does."""
        place = self.said.places.get("forward" if is_forward else "backward")
        statement = self.said.statement
        with ExitStack() as stack:
            for agreement in self.agreements if statement else ():
                stack.enter_context(agreement.running(statement if is_forward else (), place))
            yield


def _shardings(example_inputs: Sequence[Any]) -> list[Sharding]:
    shards = [getattr(value, "fsdp_flat_shard", None) for value in example_inputs]
    found = [shard.sharding for shard in shards if shard is not None and isinstance(shard.sharding, Sharding)]
    notes = [getattr(value, "fsdp_sharding", None) for value in example_inputs]  # plain parameters, of a single rank
    found += [note.sharding for note in notes if note is not None]
    return list(dict.fromkeys(found))


def _common_pipeline(shardings: list[Sharding], config: CompileConfig) -> tuple[Any, Planner | None]:
    """What `Capture` takes as `pipeline`, and what makes plans."""
    if not shardings:
        return (lambda plan: Pipeline.of()), None
    first, *others = shardings
    pipeline = first.pipeline(config)
    if any(other.pipeline(config)(None) != pipeline(None) or other.schedule != first.schedule for other in others):
        schedules = [sharding.schedule for sharding in shardings]
        raise ConfigError(f"models that are compiled into one graph need the same schedule options, not {schedules}")
    planner = None if others and first.schedule.is_at_hand else first.planner(config)
    if planner is not None and others:
        raise ConfigError(
            "hardware and memory_budget plan for one model, and several are compiled into one graph: shard the module "
            "that holds them"
        )
    return pipeline, planner


def _refuse(*_: Any) -> Any:
    raise ConfigError(
        'backend="fsdp" compiles sharded models, and this one is not: call fsdp_compile.shard(model) first'
    )
