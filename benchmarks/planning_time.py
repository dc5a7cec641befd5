"""How many processor seconds planning takes, and how that grows with the number of parameters or of layers.

    python benchmarks/planning_time.py                        # about a minute; no GPU, nothing in memory
    python benchmarks/planning_time.py --parameters 500
    python benchmarks/planning_time.py --layers 8 32 80 126   # as those of Llama 3 8B: about six minutes
    python benchmarks/planning_time.py --layers 8 32 80 126 --model 405b

With layers, the model is rewritten once without a plan, once with one that is searched for in all layers, and once with
one that is searched for in some of the equal layers: what these take longer is planning, with all that is predicted for
it. The 8B's is planned for 64 H100 and 4,096 tokens, the 405B's for 64 H200 and 1,024. Otherwise it is the search
alone. Chains are those of transformer layers:
nine parameters each, of very different bytes, and compute that takes half as long to twice as long as gathering them.
"forward" has no reductions, "backward" one for each layer. A limit leaves room for a layer more than any plan needs.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from pathlib import Path
from random import Random
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

from fsdp_compile import rewrite
from fsdp_compile.costs import HARDWARE, predict
from fsdp_compile.planning import step_plans
from fsdp_compile.planning.chains import Chain, Channel, Item, Reduction
from fsdp_compile.planning.search import best_plan

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from llama import LLAMA3_8B, LLAMA3_405B, LlamaConfig, inputs, on_meta

MIB = 2**20
LAYER = [0.01, 32, 8, 8, 32, 0.01, 112, 112, 112]  # MiB: those of Llama 3 8B in bf16
LINK = Channel(start=2e-5, per_message=5e-6, bandwidth=5e10, copy_bandwidth=1e12)


def chain_of(num_parameters: int, random: Random, *, is_backward: bool) -> Chain:
    """A step reads one parameter; its compute takes half as long to twice as long as gathering it."""
    num_bytes = [int(LAYER[index % len(LAYER)] * MIB) for index in range(num_parameters)]
    seconds = [size / LINK.bandwidth * random.uniform(0.5, 2) for size in num_bytes]
    held = [random.randint(0, 64 * MIB) for _ in seconds]
    parameters = [Item(size, step, step) for step, size in enumerate(num_bytes)]
    ends = range(len(LAYER) - 1, num_parameters, len(LAYER)) if is_backward else ()
    per_layer = sum(LAYER) * MIB / LINK.bandwidth
    return Chain(seconds, held, parameters, [Reduction(per_layer * random.uniform(0.5, 1), end) for end in ends])


def planning_seconds(num_parameters: int, *, is_backward: bool, is_limited: bool) -> float:
    chain = chain_of(num_parameters, Random(0), is_backward=is_backward)
    limit = chain.lowest_peak + int(sum(LAYER) * MIB) if is_limited else None
    begin = time.process_time()
    best_plan(chain, LINK, limit=limit, ends=[*range(len(LAYER), num_parameters, len(LAYER)), num_parameters])
    return time.process_time() - begin


@dataclasses.dataclass(frozen=True)
class Run:
    """A model that is planned for 64 GPUs, a row of tokens on each."""

    config: LlamaConfig
    hardware: str
    tokens: int


RUNS = {"8b": Run(LLAMA3_8B, "h100", 4096), "405b": Run(LLAMA3_405B, "h200", 1024)}


def rewritten(run: Run, num_layers: int, *, is_planned: bool) -> tuple[float, float]:
    """Processor seconds from a model on the meta device to its rewritten graphs, and predicted seconds of a step."""
    model = on_meta(dataclasses.replace(run.config, layers=num_layers), torch.bfloat16)
    begin = time.process_time()
    graphs = rewrite(model, *inputs(1, run.tokens), world_size=64, hardware=run.hardware if is_planned else None)
    return time.process_time() - begin, predict(graphs, HARDWARE[run.hardware]).seconds


def table_of_layers(run: Run, numbers: list[int]) -> Table:
    table = Table(title="Processor seconds until graphs with so many layers are rewritten; predicted ms of a step")
    names = ("layers", "without a plan", "step", "all layers planned", "step", "equal layers planned once", "step")
    for name in names:
        table.add_column(name, justify="right")
    rewritten(run, 1, is_planned=True)  # imports
    for number in sorted(numbers):
        found = [rewritten(run, number, is_planned=False)]
        with patch.object(step_plans, "EQUAL_UNITS", sys.maxsize):  # as if there were never so many
            found.append(rewritten(run, number, is_planned=True))
        found.append(rewritten(run, number, is_planned=True))
        cells = [cell for seconds, step in found for cell in (f"{seconds:.1f}", f"{step * 1e3:,.1f}")]
        table.add_row(str(number), *cells)
    return table


def table_of_chains(numbers: list[int]) -> Table:
    table = Table(title="Processor seconds of best_plan; exponent: of the growth since the row before")
    kinds = [(is_backward, is_limited) for is_backward in (False, True) for is_limited in (False, True)]
    table.add_column("parameters", justify="right")
    for is_backward, is_limited in kinds:
        name = f"{'backward' if is_backward else 'forward'}{', limit' if is_limited else ''}"
        table.add_column(name, justify="right")
        table.add_column("exponent", justify="right")
    before: tuple[int, list[float]] | None = None
    for number in sorted(numbers):
        found = [planning_seconds(number, is_backward=way, is_limited=limited) for way, limited in kinds]
        cells = []
        for index, seconds in enumerate(found):
            growth = math.log(seconds / before[1][index]) / math.log(number / before[0]) if before else None
            cells += [f"{seconds:.2f}", "" if growth is None else f"{growth:.2f}"]
        table.add_row(f"{number:,}", *cells)
        before = number, found
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, nargs="+", default=[100, 300, 1000, 3000, 10000])
    parser.add_argument("--layers", type=int, nargs="+", help="plan the graphs of models instead of chains")
    parser.add_argument("--model", choices=RUNS, default="8b", help="whose layers")
    options = parser.parse_args()
    table = (
        table_of_layers(RUNS[options.model], options.layers) if options.layers else table_of_chains(options.parameters)
    )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
