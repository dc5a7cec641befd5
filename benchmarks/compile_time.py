"""Time to the first step against plain torch.compile, for GPTs of several depths.

    python benchmarks/compile_time.py
    python benchmarks/compile_time.py --layers 2 4 --subjects single-compiled fsdp_compile

Every start is a process of its own with an empty cache of compiled code, one rank of 8 that sends nothing. The first
step includes sharding, capture, our passes, Inductor, and the C++ compiler. Of it, passes are what fsdp_compile does to
captured graphs (torch's partitioner, which torch.compile runs too, is not in it).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import harness
from allocation import build
from harness import Failed, Reply, one_rank, spread
from subjects import SUBJECTS

BASELINE = "single-compiled"


def first_step(name: str, layers: int, options: argparse.Namespace) -> Reply:
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        team = one_rank(name, Path(folder), options.world_size)
        arguments = {"layers": layers, "dim": options.dim, "batch": 2}
        request = {"subject": name, "workload": "gpt", "arguments": arguments, "warm_up": 0}
        try:
            return team.ask(request)[0]
        except Failed as e:
            raise SystemExit(f"{name}, {layers} layers: {e}") from None
        finally:
            team.stop()


def cells(row: dict[str, Any], baseline: dict[str, Any] | None) -> dict[str, str]:
    first = row["first"]
    ratio = first["median"] / baseline["first"]["median"] if baseline else None
    return {
        "layers": str(row["layers"]),
        "subject": row["subject"],
        "first step s": f"{first['median']:.1f}",
        "least": f"{first['least']:.1f}",
        "most": f"{first['most']:.1f}",
        f"/{BASELINE}": f"{ratio:.3f}" if ratio else "-",
        "passes s": f"{row['passes']:.2f}",
        "passes": f"{row['passes'] / first['median']:.1%}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--subjects", nargs="+", default=[BASELINE, "fsdp_compile"], choices=list(SUBJECTS))
    parser.add_argument("--rounds", type=int, default=3, help="starts of each, in turns")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for layers in options.layers:
        replies: dict[str, list[Reply]] = {name: [] for name in options.subjects}
        for number in range(options.rounds):
            for name in options.subjects[:: -1 if number % 2 else 1]:
                replies[name].append(first_step(name, layers, options))
        for name, found in replies.items():
            seconds = [reply["first"] for reply in found]
            first = {**spread(seconds), "least": min(seconds), "most": max(seconds)}
            passes = spread([reply["passes"] for reply in found])["median"]
            rows.append({"layers": layers, "subject": name, "first": first, "passes": passes})
    baselines = {row["layers"]: row for row in rows if row["subject"] == BASELINE}
    harness.show("time to the first step", [cells(row, baselines.get(row["layers"])) for row in rows], {})


if __name__ == "__main__":
    main()
