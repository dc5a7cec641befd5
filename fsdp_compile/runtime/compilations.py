"""Compilations: how often Dynamo broke the graph of a model or compiled it again, and why.

Both make steps slow in silence. The counters that are read are private, as of torch 2.11 to 2.15.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from torch._dynamo.utils import counters, get_compilation_metrics

from ..errors import CompilationWarning

# A graph each for training, for evaluation and for gradients that are kept (`no_sync`) is as it should be.
_EXPECTED = ("grad_mode", ".training", ".gradient ", ".accumulated", "_fsdp_running")
_CALLER = 8  # frames up from a warning stands the call of the model
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
                warnings.warn(f"the graph of {model} breaks: {why}", CompilationWarning, stacklevel=_CALLER)

    def _note_again(self, model: str, reasons: list[str]) -> None:
        for why in reasons:
            if why not in self.again and not any(part in why for part in _EXPECTED):
                warnings.warn(f"{model} was compiled again: {why}", CompilationWarning, stacklevel=_CALLER)
            self.again[why] += 1

    def __str__(self) -> str:
        """One line for each reason; none where nothing was seen."""
        lines = [f"{count} x compiled again: {_line(why)}" for why, count in self.again.items()]
        if self.breaks:
            lines.insert(0, f"{self.num_breaks} x graph break: {'; '.join(map(_line, self.breaks))}")
        return "\n".join(lines)


def _line(why: str) -> str:
    return " ".join(why.split())
