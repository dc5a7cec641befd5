"""One rank of 8 and of 64 on a GPU: time and memory of a step of a Llama in bfloat16, without what others send.

    python benchmarks/one_gpu.py
    python benchmarks/one_gpu.py --dry-run             # on the CPU, a tiny Llama: does it run at all

The process group is torch's "fake" one: the rank allocates, copies and computes what it would in the larger job, and
its collectives take no time. The unsharded compiled model is then what a step can be at best. Each subject is a process
of its own, with and without CUDA graphs, and they take turns. MFU is of the dense bfloat16 peak, with torch's FLOPs.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import harness
import torch
from allocation import build
from harness import BACKWARD, FORWARD, OPTIMIZER, Reply, Teams, milliseconds, one_rank, seconds_of, spread
from subjects import SUBJECTS
from torch.utils.flop_counter import FlopCounterMode
from workloads import WORKLOADS

from fsdp_compile.costs.hardware import hardware_of_gpu
from llama import SMALL, LlamaConfig

BASELINE = "single-compiled"
DEFAULT = [BASELINE, "fsdp2", "fsdp2-compiled", "fsdp_compile-packed", "fsdp_compile-grouped"]
EAGER = {"single", "ddp", "fsdp1", "fsdp2", "fsdp2-prefetch"}
LLAMA = LlamaConfig(layers=16, dim=2048, heads=32, kv_heads=8, ffn_dim=8192, vocab=128256)  # 1.5 billion parameters


def count_flops(arguments: Reply) -> int:
    """Of forward and backward."""
    workload = WORKLOADS["llama"](**arguments)
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        workload.build()(*workload.inputs()).backward()
    return counter.get_total_flops()


def measure(world_size: int, options: argparse.Namespace, arguments: Reply, folder: Path) -> list[dict[str, Any]]:
    """The rows of one world size."""
    teams, started = Teams(), {}
    device = "cpu" if options.dry_run else "cuda"
    for name, has_graphs in itertools.product(options.subjects, (False, True)):
        key = f"{name}, CUDA graphs" if has_graphs else name
        if has_graphs and name in EAGER:
            teams.failures[key] = "CUDA graphs are torch.compile's, and this is not compiled"
            continue
        inductor = {"triton.cudagraphs": True} if has_graphs else {}
        request = {"workload": "llama", "arguments": arguments, "inductor": inductor, "optimizer": "adamw-fused"}
        team = one_rank(key, folder, world_size, device)
        if (replies := teams.start(key, team, {"subject": name, **request})) is not None:
            started[key] = replies[0]
    try:
        replies = teams.take_turns(options.rounds, {"count": options.steps})
        kernels = teams.take_turns(1, {"count": 1, "is_profiled": True})
    finally:
        teams.stop()
    rows = [
        {
            "world_size": world_size,
            "subject": name,
            "step": spread(seconds_of(found, FORWARD, BACKWARD, OPTIMIZER)),
            "kernels": kernels[name][0][0]["kernels"],
            **{key: max(ranks[0][key] for ranks in found) for key in ("state", "peak")},
            **{key: started[name][key] for key in ("first", "predicted")},
        }
        for name, found in replies.items()
        if name in kernels
    ]
    return rows + [{"world_size": world_size, "subject": name, "error": e} for name, e in teams.failures.items()]


def cells(row: dict[str, Any], baseline: dict[str, Any] | None, flops: int, peak_flops: float | None) -> dict[str, str]:
    if "error" in row:
        return {"subject": row["subject"], "step ms": row["error"].partition("\n")[0][:30]}
    seconds = row["step"]["median"]
    predicted = row["predicted"]
    return {
        "subject": row["subject"],
        **milliseconds(row["step"], "step ms"),
        f"/{BASELINE}": f"{seconds / baseline['step']['median']:.3f}" if baseline else "-",
        "MFU": f"{flops / seconds / peak_flops:.1%}" if peak_flops else "-",
        "kernels": str(row["kernels"] or "-"),
        "state MB": f"{row['state'] / 1e6:,.1f}",
        "peak MB": f"{row['peak'] / 1e6:,.1f}",
        "predicted": f"{predicted / 1e6:,.1f}" if predicted else "-",
        "first s": f"{row['first']:.1f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=LLAMA.layers)
    parser.add_argument("--subjects", nargs="+", default=DEFAULT, choices=list(SUBJECTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="of each subject in a round")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, at tiny sizes; the figures mean nothing")
    parser.add_argument("--json", metavar="FILE", help="where to write all figures, for tests/gpu")
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        print("skipped: there is no GPU; --dry-run runs all of it on the CPU, at tiny sizes")
        return
    if options.dry_run:
        config, options.batch, options.seq = SMALL, 1, 32
    else:
        config = dataclasses.replace(LLAMA, layers=options.layers)
    arguments = {"batch": options.batch, "seq": options.seq, **dataclasses.asdict(config)}
    del arguments["rope_theta"], arguments["norm_eps"]
    flops = count_flops(arguments)
    hardware = None if options.dry_run else hardware_of_gpu()
    rows: list[dict[str, Any]] = []
    for world_size in options.world_sizes:
        with tempfile.TemporaryDirectory() as folder:
            build(Path(folder))
            found = measure(world_size, options, arguments, Path(folder))
        baseline = next((row for row in found if row["subject"] == BASELINE and "step" in row), None)
        title = f"one rank of {world_size}{', dry run: the figures mean nothing' if options.dry_run else ''}"
        peak_flops = hardware.flops["bfloat16"] if hardware else None
        failures = {row["subject"]: row["error"] for row in found if "error" in row}
        harness.show(title, [cells(row, baseline, flops, peak_flops) for row in found], failures)
        rows += found
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
