"""What became of each test: a file of lines of JSON for each subject, and the table of all."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

REASONS = Path(__file__).with_name("not_applicable.toml")


class Results:
    """A folder with `collected.json`, `torch.jsonl` and `compat.jsonl`; of two results of a test the later holds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def file(self, subject: str) -> Path:
        return self.folder / f"{subject}.jsonl"

    def of(self, subject: str) -> dict[str, dict[str, Any]]:
        file = self.file(subject)
        lines = file.read_text().splitlines() if file.exists() else []
        return {result["id"]: result for result in map(json.loads, lines)}

    def collect(self, listed: Path) -> None:
        """Add the tests of a file of lines, whose files may have been collected before."""
        found = {line["id"]: line.get("function", "") for line in map(json.loads, listed.read_text().splitlines())}
        files = {test.partition("::")[0] for test in found}
        kept = {test: function for test, function in self.collected().items() if test.partition("::")[0] not in files}
        (self.folder / "collected.json").write_text(json.dumps(kept | found, indent=1))

    def collected(self) -> dict[str, str]:
        """The function of each test: one for all its sets of parameters."""
        file = self.folder / "collected.json"
        return json.loads(file.read_text()) if file.exists() else {}  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Reasons:
    """Why tests are not applicable: by patterns of their names."""

    why_of_pattern: dict[str, str]

    def of(self, test: str) -> str | None:
        return next((why for pattern, why in self.why_of_pattern.items() if fnmatchcase(test, pattern)), None)


def read_reasons(file: Path = REASONS) -> Reasons:
    entries = tomllib.loads(file.read_text()).get("reason", [])
    return Reasons({pattern: entry["why"] for entry in entries for pattern in entry["tests"]})


SUITES = {"fsdp/": "FSDP1", "_composable/fsdp/": "FSDP2", "_composable/test_composability/": "composition"}
COLUMNS = ("collected", "passes with torch's classes", "not applicable", "run", "passes", "fails")


def in_table(results: Results, reasons: Reasons) -> str:
    """Markdown: a row for each file and each suite, then what fails, then why tests are not applicable."""
    collected, torch, compat = results.collected(), results.of("torch"), results.of("compat")
    rows: dict[str, Counter[str]] = {}
    why: Counter[str] = Counter()
    for test in collected:
        states = set(_states(test, torch, compat, reasons))
        if "not applicable" in states:
            why[reasons.of(test) or ""] += 1
        for row in (test.partition("::")[0], _suite(test)):
            rows.setdefault(row, Counter()).update(states)
    files = sorted(row for row in rows if row not in SUITES.values())
    lines = [f"| suite | {' | '.join(COLUMNS)} |", "| --- |" + " --- |" * len(COLUMNS)]
    for row in [*files, *(suite for suite in SUITES.values() if suite in rows)]:
        lines.append(f"| {row} | {' | '.join(str(rows[row][column]) for column in COLUMNS)} |")
    failed = [test for test in collected if "fails" in _states(test, torch, compat, reasons)]
    lines += ["", *(f"- fails: {test}: {_last_line(compat[test])}" for test in failed)]
    lines += ["", *(f"- not applicable, {number}: {text}" for text, number in why.most_common())]
    return "\n".join(lines)


def _suite(test: str) -> str:
    return next((suite for folder, suite in SUITES.items() if test.startswith(folder)), "other")


def _states(test: str, torch: dict[str, Any], compat: dict[str, Any], reasons: Reasons) -> Iterator[str]:
    """The columns that count the test. A reason takes it out of the last three, whether it passes or not."""
    yield "collected"
    if torch and torch.get(test, {}).get("outcome") != "passed":
        return
    yield "passes with torch's classes"
    if reasons.of(test) is not None:
        yield "not applicable"
    elif test in compat:
        yield "run"
        yield "passes" if compat[test]["outcome"] == "passed" else "fails"


def _last_line(result: dict[str, Any]) -> str:
    """Of what the first rank raised."""
    lines = [line.removeprefix("E").strip() for line in result["message"].splitlines()]
    ends = [place for place, line in enumerate(lines) if re.match(r"Process [1-9]\d* exited with", line)]
    raised = [line for line in lines[: ends[0] if ends else None] if _RAISED.match(line)]
    return raised[-1] if raised else next(iter(lines[-1:]), "")


_RAISED = re.compile(r"[\w.]+(Error|Exception|Skipped|Failed|Interrupt)\b(?!: Process \d)")
