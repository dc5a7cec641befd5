"""The time of a step of one rank that sends nothing: what is done around messages, and around kernels.

    python benchmarks/overhead.py               # 150 layers with next to nothing to compute, a rank of 8
    python benchmarks/overhead.py --workload gpt --world-size 1 --subjects single-compiled fsdp_compile

The process group is torch's "fake" one. Each subject is a process of its own, and they take turns.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import harness
from allocation import build
from harness import BACKWARD, FORWARD, OPTIMIZER, Teams, milliseconds, one_rank, seconds_of, spread
from subjects import OPTIMIZERS, SUBJECTS

DEFAULT = ["single", "single-compiled", "fsdp1", "fsdp2", "fsdp2-compiled", "simple", "simple-bucketed", "fsdp_compile"]
PARTS = {"forward": [FORWARD], "backward": [BACKWARD], "optimizer": [OPTIMIZER], "step": [FORWARD, BACKWARD, OPTIMIZER]}


def cells(name: str, found: dict[str, dict[str, Any]]) -> dict[str, str]:
    row = found[name]
    ratios = {
        f"/{other}": f"{row['step']['median'] / found[other]['step']['median']:.3f}"
        for other in ("single", "single-compiled", "fsdp2")
        if other in found
    }
    parts = {f"{part} ms": f"{1e3 * row[part]['median']:.2f}" for part in PARTS if part != "step"}
    return {"subject": name, **parts, **milliseconds(row["step"], "step ms"), **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="stack", choices=["stack", "gpt"])
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--subjects", nargs="+", default=DEFAULT, choices=list(SUBJECTS))
    parser.add_argument("--optimizer", default="adamw", choices=list(OPTIMIZERS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20, help="of each subject in a round")
    options = parser.parse_args()
    teams = Teams()
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        try:
            for name in options.subjects:
                team = one_rank(name, Path(folder), options.world_size)
                request = {"workload": options.workload, "arguments": {}, "optimizer": options.optimizer}
                teams.start(name, team, {"subject": name, **request})
            replies = teams.take_turns(options.rounds, {"count": options.steps})
        finally:
            teams.stop()
    found = {
        name: {part: spread(seconds_of(rounds, *numbers)) for part, numbers in PARTS.items()}
        for name, rounds in replies.items()
    }
    title = f"a step of {options.workload} with {options.optimizer}, rank 0 of {options.world_size}"
    harness.show(title, [cells(name, found) for name in found], teams.failures)


if __name__ == "__main__":
    main()
