"""Time to the first step against plain torch.compile and FSDP2 with compiled blocks, for GPTs of several depths.

    python benchmarks/compile_time.py
    python benchmarks/compile_time.py --layers 8 --ranks 2 4 --subjects single-compiled fsdp2-compiled fsdp_compile

Every first start is a job with an empty cache of compiled code, of profiles and of plans; the second start has what the
first left there. A job is one rank of 8 that sends nothing, or as many ranks on this machine as `--ranks` says. The
first step includes sharding, capture, our passes, Inductor, and the C++ compiler. Of it, passes are what fsdp_compile
does to captured graphs (torch's partitioner, which torch.compile runs too, is not in it). Processor seconds are those
of all processes of the job, from sharding to the end of the first step.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
from pathlib import Path

import harness
from allocation import LIBRARY, build
from harness import RANK, Failed, Team, on_this_machine, one_rank, spread
from subjects import SUBJECTS

BASELINE = "single-compiled"


@dataclasses.dataclass(frozen=True)
class Start:
    """Of a job: seconds to the first step, of the slowest rank; of processors, of all; of passes, of the first rank."""

    first: float
    processors: float
    passes: float


def start(name: str, layers: int, ranks: int, folder: Path, options: argparse.Namespace) -> Start:
    team = real_ranks(name, folder, ranks) if ranks else one_rank(name, folder, options.world_size)
    arguments = {"layers": layers, "dim": options.dim, "batch": 2}
    try:
        replies = team.ask({"subject": name, "workload": "gpt", "arguments": arguments, "warm_up": 0})
    except Failed as e:
        raise SystemExit(f"{name}, {layers} layers: {e}") from None
    finally:
        team.stop()
    processors = sum(reply["processors"] for reply in replies)
    return Start(max(reply["first"] for reply in replies), processors, replies[0]["passes"])


def real_ranks(name: str, folder: Path, ranks: int) -> Team:
    """A job of some ranks that talk through gloo."""
    command = [sys.executable, str(RANK), "--library", str(folder / LIBRARY)]
    return on_this_machine(command, ranks, folder / f"{name}.log", TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"))


def starts(name: str, layers: int, ranks: int, options: argparse.Namespace) -> tuple[Start, Start]:
    """The first start of a job, and the second."""
    with tempfile.TemporaryDirectory() as created:
        folder = Path(created)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        build(folder)
        return start(name, layers, ranks, folder, options), start(name, layers, ranks, folder, options)


def cells(
    key: tuple[int, int, str], found: list[tuple[Start, Start]], baseline: list[tuple[Start, Start]] | None
) -> dict[str, str]:
    ranks, layers, name = key
    seconds = [first.first for first, _ in found]
    first = spread(seconds)["median"]
    passes = spread([first.passes for first, _ in found])["median"]
    ratio = first / spread([each.first for each, _ in baseline])["median"] if baseline else None
    return {
        "ranks": str(ranks or "-"),
        "layers": str(layers),
        "subject": name,
        "first step s": f"{first:.1f}",
        "least": f"{min(seconds):.1f}",
        "most": f"{max(seconds):.1f}",
        f"/{BASELINE}": f"{ratio:.3f}" if ratio else "-",
        "processor s": f"{spread([each.processors for each, _ in found])['median']:.1f}",
        "passes s": f"{passes:.2f}",
        "second start s": f"{spread([each.first for _, each in found])['median']:.1f}",
        "its processor s": f"{spread([each.processors for _, each in found])['median']:.1f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--world-size", type=int, default=8, help="of the job of which there is one rank")
    parser.add_argument("--ranks", type=int, nargs="+", default=[0], help="of jobs on this machine")
    subjects = [BASELINE, "fsdp2-compiled", "fsdp_compile"]
    parser.add_argument("--subjects", nargs="+", default=subjects, choices=list(SUBJECTS))
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each, in turns")
    options = parser.parse_args()
    keys = [(ranks, layers, name) for ranks in options.ranks for layers in options.layers for name in options.subjects]
    found: dict[tuple[int, int, str], list[tuple[Start, Start]]] = {key: [] for key in keys}
    for number in range(options.rounds):
        for ranks, layers, name in keys[:: -1 if number % 2 else 1]:
            found[ranks, layers, name].append(starts(name, layers, ranks, options))
    rows = [cells(key, found[key], found.get((*key[:2], BASELINE))) for key in keys]
    harness.show("time to the first step", rows, {})


if __name__ == "__main__":
    main()
