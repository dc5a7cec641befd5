"""Compilations: how often Dynamo broke the graph of a model or compiled it again, and why.

Both make steps slow in silence. One reason is ours: hooks that are registered on a module after it was compiled, which
torch.compile does not call. The model is still the user's object, and runs them.

The counters that are read, and what Dynamo calls when it begins to compile and when it ends, are private, as of torch
2.11 to 2.15.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import counters, get_compilation_metrics

from .. import progress
from ..environment import is_first_rank
from ..errors import CompilationWarning

# A graph each for training, for evaluation and for gradients that are kept (`no_sync`) is as it should be.
_EXPECTED = ("grad_mode", ".training", ".gradient ", ".accumulated", "_fsdp_running")
_CALLER = 8  # frames up from a warning stands the call of the model
_MANUAL = "model.explain() lists them, docs/debugging.md says what to do"
_NUMBER = re.compile(r"^\d+/\d+: ")  # of a compiled graph
_RESUMED = "torch_dynamo_resume_in"  # begins the name of what comes after a graph break


@dataclasses.dataclass
class Compilations:
    """What was seen of a model.

    Attributes:
        num_breaks: how often its graph breaks.
        breaks: why.
        again: why something was compiled again, and how often.
    """

    num_breaks: int = 0
    breaks: list[str] = dataclasses.field(default_factory=list)
    again: Counter[str] = dataclasses.field(default_factory=Counter)

    @contextmanager
    def noting(self, model: str) -> Iterator[None]:
        """While a model is called: count what is compiled, and warn of every reason once."""
        breaks, before = dict(counters["graph_break"]), get_compilation_metrics()
        last = before[-1] if before else None
        try:
            with _saying(model):
                yield
        finally:
            metrics = get_compilation_metrics()
            if metrics and metrics[-1] is not last:
                new = metrics[next((i for i, each in enumerate(metrics, 1) if each is last), 0) :]
                self.num_breaks += sum(_RESUMED in (each.co_name or "") and not each.recompile_reason for each in new)
                self._note_breaks(model, [why for why, n in counters["graph_break"].items() if n > breaks.get(why, 0)])
                self._note_again(model, [each.recompile_reason for each in new if each.recompile_reason])

    def _note_breaks(self, model: str, reasons: list[str]) -> None:
        for why in reasons:
            if why not in self.breaks:
                self.breaks.append(why)
                self._warn(f"the graph of {model} breaks: {_brief(why)}")

    def _note_again(self, model: str, reasons: list[str]) -> None:
        for why in reasons:
            known = {_brief(each) for each in self.again}
            if _brief(why) not in known and not any(part in why for part in _EXPECTED):
                self._warn(f"{model} was compiled again: {_brief(why)}")
            self.again[why] += 1

    def _warn(self, text: str) -> None:
        """In one line; what one rank compiles, the others do as well."""
        if is_first_rank():
            warnings.warn(f"{text} ({_MANUAL})", CompilationWarning, stacklevel=_CALLER + 1)

    def __str__(self) -> str:
        """One line for each reason; none where nothing was seen."""
        lines = [f"{count} x compiled again: {_line(why)}" for why, count in self.again.items()]
        if self.breaks:
            lines.insert(0, f"{self.num_breaks} x graph break: {'; '.join(map(_line, self.breaks))}")
        return "\n".join(lines)


def _line(why: str) -> str:
    return " ".join(why.split())


def _brief(why: str) -> str:
    """What a reason begins with, and how Dynamo explains it; without the number of the graph."""
    first, *others = why.strip().splitlines() or [""]
    explained = [line.strip() for line in others if line.strip().startswith("Explanation:")]
    return _line(" ".join([_NUMBER.sub("", first), *explained[:1]]))


class _Called(threading.local):
    """Which model this thread calls, and what holds while Dynamo compiles for it."""

    model: str | None = None
    handled: BaseException | None = None
    tracing: ExitStack | None = None


_called = _Called()


@contextmanager
def _saying(model: str) -> Iterator[None]:
    """Inside, progress is said of what Dynamo traces."""
    if _begin not in callback_handler.start_callbacks:  # nor after torch._dynamo.reset()
        callback_handler.register_start_callback(_begin)
        callback_handler.register_end_callback(_end)
    before, _called.model = _called.model, model
    try:
        yield
    finally:
        _called.model = before


def _begin(*_: object) -> None:
    if _called.model is not None and _called.tracing is None:
        _called.tracing, _called.handled = ExitStack(), sys.exc_info()[1]
        _called.tracing.enter_context(torch._dynamo.config.patch(skip_nnmodule_hook_guards=False))
        progress.begin("tracing", of=_called.model)


def _end(*_: object) -> None:
    if (tracing := _called.tracing) is not None:
        _called.tracing = None
        tracing.close()
        error = sys.exc_info()[1]
        progress.end(None if error is _called.handled else error)
