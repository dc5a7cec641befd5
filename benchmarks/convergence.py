"""How training goes on where messages are narrower: losses of the demo's GPT with each `communication_dtype`.

    torchrun --nproc-per-node 2 benchmarks/convergence.py
    torchrun --nproc-per-node 2 benchmarks/convergence.py --steps 600 --seeds 0 1 2 --picture build/convergence.svg

The model, the data, AdamW and its warm-up are those of examples/train_gpt.py; a seed is that of the model's values. All
forms of a seed see the same batches in the same order. "difference" is the largest and the mean, over all steps, of how
far a loss is from that of the same seed in float32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import mean

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from subjects import NARROWER

from fsdp_compile import fsdp_compile

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from train_gpt import GPT, GPTConfig, evaluate, find_ranks, read_text, training_batch, training_step, warm_up

FORMS = {"float32": "auto", **NARROWER}
_SMOOTH = 20  # steps whose mean the picture shows


def losses_of(form: str, seed: int, options: argparse.Namespace) -> tuple[list[float], float]:
    """The mean loss of every step, and the held-out loss at the end."""
    torch.manual_seed(seed)
    config = GPTConfig(seq=options.seq, dim=options.dim, layers=options.layers)
    model = fsdp_compile(GPT(config), hardware=False, communication_dtype=FORMS[form])
    ranks = find_ranks(options.batch, torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95))
    training, held_out = read_text()
    losses = []
    for step in range(1, options.steps + 1):
        warm_up(optimizer, options.lr, step)
        batch = ranks.rows(training_batch(training, step, options.batch, options.seq))
        losses.append(training_step(model, optimizer, *batch))
    return ranks.mean(*losses), evaluate(model, held_out, options, ranks)


def table_of(found: Mapping[tuple[str, int], tuple[list[float], float]], options: argparse.Namespace) -> Table:
    table = Table(
        title=f"{options.steps} steps, seeds {', '.join(map(str, options.seeds))}, {dist.get_world_size()} ranks"
    )
    for column in ("form", "last losses, mean", "held out", "largest difference", "mean difference"):
        table.add_column(column, justify="left" if column == "form" else "right")
    for form in options.forms:
        differences = [
            abs(one - other)
            for seed in options.seeds
            for one, other in zip(found[form, seed][0], found["float32", seed][0], strict=True)
        ]
        last = mean(mean(found[form, seed][0][-_SMOOTH:]) for seed in options.seeds)
        held_out = [f"{found[form, seed][1]:.4f}" for seed in options.seeds]
        table.add_row(form, f"{last:.4f}", ", ".join(held_out), f"{max(differences):.4f}", f"{mean(differences):.4f}")
    return table


def draw(found: Mapping[tuple[str, int], tuple[list[float], float]], options: argparse.Namespace) -> None:
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    for form in options.forms:
        by_step = torch.tensor([found[form, seed][0] for seed in options.seeds]).mean(0)
        smooth = by_step.unfold(0, min(_SMOOTH, len(by_step)), 1).mean(1)
        axes.plot(range(len(by_step) - len(smooth) + 1, len(by_step) + 1), smooth, label=form, linewidth=1)
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss, nats a byte: mean of {_SMOOTH} steps and {len(options.seeds)} seeds")
    axes.legend()
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=300)
    add("--seeds", type=int, nargs="+", default=[0, 1])
    add("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    add("--batch", type=int, default=16)
    add("--seq", type=int, default=128)
    add("--dim", type=int, default=256)
    add("--layers", type=int, default=4)
    add("--lr", type=float, default=1e-3)
    add("--picture", type=Path, help="a file for the curves, as .svg or .png")
    options = parser.parse_args()
    options.forms = list(dict.fromkeys(["float32", *options.forms]))
    found, console = {}, Console(quiet=True)
    for seed in options.seeds:
        for form in options.forms:
            found[form, seed] = losses_of(form, seed, options)
            console.quiet = dist.get_rank() != 0
            console.print(f"{form}, seed {seed}: held-out loss {found[form, seed][1]:.4f}", highlight=False)
    console.print(table_of(found, options))
    if options.picture is not None and dist.get_rank() == 0:
        draw(found, options)


if __name__ == "__main__":
    main()
