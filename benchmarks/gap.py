"""How far the schedules are from the lower bound: Llama 3 8B on 64 GPUs, simulated, for several numbers of tokens.

    python benchmarks/gap.py                              # a few minutes; no GPU, nothing in memory
    python benchmarks/gap.py --tokens 2048 --hardware b200

Plain is one gather for each unit, one unit ahead; planned is what `hardware=` makes of it. Packed gathers and
reductions are copied, grouped ones are not. The bound is that of the plain graphs without copies: all compute or all
messages of a process group; contended, with what collectives slow down compute while they run.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import harness
import torch

from fsdp_compile import rewrite
from fsdp_compile.costs import Prediction, find_hardware, predict

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from llama import inputs, llama3_8b


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192, 16384], help="of a GPU")
    parser.add_argument("--seq", type=int, default=2048, help="tokens of a row at most")
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--hardware", default="h100")
    options = parser.parse_args()
    rows = []
    for tokens in options.tokens:
        found = {
            (lowering, is_planned): step(tokens, options, lowering, is_planned=is_planned)
            for lowering in ("grouped", "packed")
            for is_planned in (False, True)
        }
        plain = found["grouped", False][0]
        bound, contended = plain.lower_bound, plain.contended_bound
        for (lowering, is_planned), (prediction, seconds) in found.items():
            rows.append(
                {
                    "tokens": str(tokens),
                    "bound": f"{bound * 1e3:.1f}",
                    "contended": f"{contended * 1e3:.1f}",
                    "schedule": f"{'planned' if is_planned else 'plain'}, {lowering}",
                    "step": f"{prediction.seconds * 1e3:.1f}",
                    "above bound": f"{prediction.seconds / bound - 1:.1%}",
                    "above contended": f"{prediction.seconds / contended - 1:.1%}",
                    "exposed": f"{prediction.exposed * 1e3:.1f}",
                    "GiB": f"{prediction.memory.peak.total / 2**30:.1f}",
                    "planned in": f"{seconds:.0f} s" if is_planned else "",
                }
            )
    harness.show(f"Llama 3 8B on {options.gpus} {options.hardware}: ms a step, and above the bounds", rows, {})


def step(tokens: int, options: argparse.Namespace, lowering: str, *, is_planned: bool) -> tuple[Prediction, float]:
    """A step, and the seconds that it took to rewrite the graphs for it."""
    hardware = find_hardware(options.hardware)
    seq = min(tokens, options.seq)
    begin = time.perf_counter()
    torch._dynamo.reset()
    graphs = rewrite(
        llama3_8b(),
        *inputs(tokens // seq, seq),
        world_size=options.gpus,
        collective_lowering=lowering,
        hardware=hardware if is_planned else None,
    )
    seconds = time.perf_counter() - begin
    return predict(graphs, hardware), seconds


if __name__ == "__main__":
    main()
