"""Calls of a model, as torch.compile makes them: traced only, compiled but not run, or compiled and run.

Private torch API, as of torch 2.11 to 2.15: Dynamo's errors, and how a module calls its compiled form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.fx
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException

from ..errors import CaptureError, ConfigError, PassError, RankError, VerifyError
from ..graphs import RewrittenGraphs
from ..passes.pipeline import Pipeline
from ..passes.plan import StepPlan
from ..progress import phase
from ..runtime.compilations import Compilations
from ..runtime.modules import not_captured
from .capture import Capture
from .traces import MakePlan, Trace

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

    found: Trace = _captured(model, args, kwargs, Capture(pipeline, None, _nothing, end))
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

    _captured(model, args, kwargs, Capture(pipeline, plan, note))
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
