"""Python's time of a step: 150 layers with next to nothing to compute, one rank of 8 that sends nothing.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --units 4 --layers 4 --subjects single fsdp2 fsdp_compile

The process group is torch's "fake" one, so that what is left of forward, backward and AdamW is what is done around
kernels. Each subject is a process of its own, and they take turns.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import harness
from allocation import build
from harness import BACKWARD, FORWARD, OPTIMIZER, Teams, milliseconds, one_rank, seconds_of, spread
from subjects import SUBJECTS

DEFAULT = ["single", "single-compiled", "fsdp1", "fsdp2", "fsdp2-compiled", "simple", "simple-bucketed", "fsdp_compile"]
PARTS = {"forward": [FORWARD], "backward": [BACKWARD], "AdamW": [OPTIMIZER], "step": [FORWARD, BACKWARD, OPTIMIZER]}


def cells(name: str, found: dict[str, dict[str, Any]]) -> dict[str, str]:
    row = found[name]
    ratios = {
        f"/{other}": f"{row['step']['median'] / found[other]['step']['median']:.3f}"
        for other in ("single", "fsdp2")
        if other in found
    }
    parts = {f"{part} ms": f"{1e3 * row[part]['median']:.2f}" for part in PARTS if part != "step"}
    return {"subject": name, **parts, **milliseconds(row["step"], "step ms"), **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=15)
    parser.add_argument("--layers", type=int, default=10, help="of a unit")
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--subjects", nargs="+", default=DEFAULT, choices=list(SUBJECTS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20, help="of each subject in a round")
    parser.add_argument("--fused", action="store_true", help="AdamW(fused=True), for all")
    parser.add_argument("--json", help="where to write all figures")
    options = parser.parse_args()
    arguments = {"units": options.units, "layers": options.layers, "dim": options.dim}
    request = {"workload": "stack", "arguments": arguments, "fused": options.fused}
    teams = Teams()
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        try:
            for name in options.subjects:
                team = one_rank(name, Path(folder), options.world_size, is_warm=True)
                teams.start(name, team, {"subject": name, **request})
            replies = teams.take_turns(options.rounds, {"count": options.steps})
        finally:
            teams.stop()
    found = {
        name: {part: spread(seconds_of(rounds, *numbers)) for part, numbers in PARTS.items()}
        for name, rounds in replies.items()
    }
    title = f"a step of {options.units * options.layers} small layers in {options.units} units"
    harness.show(title, [cells(name, found) for name in found], teams.failures)
    harness.write_json(options.json, [{"subject": name, **row} for name, row in found.items()])


if __name__ == "__main__":
    main()
