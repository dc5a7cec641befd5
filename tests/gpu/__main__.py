"""Runs on whatever GPUs there are, and writes one file to send: parity, predictions, CUDA graphs, one rank of many.

    make test-gpu
    python -m tests.gpu --parts parity

Without a GPU the same suite runs on an emulated one, and says so. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from .machine import Machine
from .parts import PARTS, Setting
from .report import FAILED, Outcome, Report

_MINUTES, _MINUTES_EMULATED = 10, 30


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    options = _parser().parse_args(arguments)
    begin, machine, outcomes = time.monotonic(), Machine.at_hand(), []
    minutes = (_MINUTES_EMULATED if machine.is_emulated else _MINUTES) if options.minutes is None else options.minutes
    setting = Setting(machine, begin + 60 * minutes, options.smallest)
    facts, out = machine.facts(), Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    for name in options.parts:
        for outcome in outcomes_of(name, setting):
            print(outcome, flush=True)
            outcomes.append(outcome)
            report = Report(facts, outcomes, time.monotonic() - begin, machine.is_emulated)
            out.write_text(str(report))  # what there is, should the machine go down
    print(f"{report.summary}; to send: {out}")
    return int(report.has_failed)


def outcomes_of(name: str, setting: Setting) -> Iterator[Outcome]:
    """What a part yields, one or more; an error ends this part, and is an outcome."""
    num_outcomes = 0
    try:
        for outcome in PARTS[name](setting):
            num_outcomes += 1
            yield outcome
    except Exception as e:
        yield Outcome(name, "the part itself", FAILED, repr(e)[:300], error=traceback.format_exc())
    else:
        if not num_outcomes:
            yield Outcome(name, "the part itself", FAILED, "it tried nothing")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="build/gpu-report.md", metavar="FILE", help="(default: build/gpu-report.md)")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS), help="(default: all)")
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="N",
        help="after which what is left is given up, and has failed "
        f"(default: {_MINUTES}; {_MINUTES_EMULATED} where a GPU is emulated)",
    )
    parser.add_argument("--smallest", action="store_true", help="one case of each part")
    return parser


if __name__ == "__main__":
    sys.exit(main())
