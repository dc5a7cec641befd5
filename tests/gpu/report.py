"""The report: what became of every part, in one file of Markdown with all figures as JSON at its end."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

PASSED, FAILED, NOT_RUN = "passed", "FAILED", "not run"
_LONGEST = 6000  # characters of an error, from its end


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one thing that was tried.

    Attributes:
        status: PASSED, FAILED or NOT_RUN.
        found: in a few words, or why it was not run.
        figures: all numbers, by name.
        seconds: that it took here.
        stand_in: what it ran with, in place of a GPU or of NCCL.
        is_emulated: whether the figures are of an emulated GPU.
        error: a traceback, or what processes said at their end.
    """

    part: str
    name: str
    status: str
    found: str = ""
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    stand_in: str = ""
    is_emulated: bool = False
    error: str = ""

    def __str__(self) -> str:
        mark = " (emulated)" if self.is_emulated and self.figures else ""
        return f"{self.status:<8}{self.part}: {self.name}: {self.found}{mark}"


@dataclasses.dataclass(frozen=True)
class Report:
    facts: Mapping[str, str]
    outcomes: Sequence[Outcome]
    seconds: float
    is_emulated: bool

    @property
    def has_failed(self) -> bool:
        return any(outcome.status == FAILED for outcome in self.outcomes)

    @property
    def summary(self) -> str:
        counts = Counter(outcome.status for outcome in self.outcomes)
        texts = [f"{counts[status]} {status}" for status in (PASSED, FAILED, NOT_RUN) if counts[status]]
        return f"{', '.join(texts) or 'nothing was tried'}, in {self.seconds:.0f} s"

    def __str__(self) -> str:
        texts = [f"# fsdp_compile on {'an emulated' if self.is_emulated else 'a'} GPU: {self.summary}"]
        if self.is_emulated:
            texts.append(
                "**There was no GPU.** Programs were compiled for the emulated one. Figures marked as emulated are "
                "predictions, or of the CPU: no time and no memory of a GPU was measured."
            )
        texts.append(_table(("", ""), self.facts.items()))
        for part in dict.fromkeys(outcome.part for outcome in self.outcomes):
            texts += [f"## {part}", _part([outcome for outcome in self.outcomes if outcome.part == part])]
        for outcome in self.outcomes:
            if outcome.error:
                texts += [f"## Error: {outcome.part}, {outcome.name}", _block("text", outcome.error[-_LONGEST:])]
        everything = {"facts": dict(self.facts), "outcomes": [dataclasses.asdict(each) for each in self.outcomes]}
        texts += ["## Figures", _block("json", json.dumps(everything, indent=1, default=str))]
        return "\n\n".join(texts) + "\n"


def _part(outcomes: Sequence[Outcome]) -> str:
    rows = [
        (
            outcome.name,
            outcome.status,
            f"{outcome.found}{' (emulated)' if outcome.is_emulated and outcome.figures else ''}",
            f"{outcome.seconds:.0f} s",
        )
        for outcome in outcomes
    ]
    stand_ins = dict.fromkeys(outcome.stand_in for outcome in outcomes if outcome.stand_in)
    return "\n\n".join([_table(("", "", "found", "took"), rows), *(f"Stand-in: {text}." for text in stand_ins)])


def _table(headings: Sequence[str], rows: Any) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(_cell(text) for text in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _block(language: str, text: str) -> str:
    return f"````{language}\n{text.rstrip()}\n````"
