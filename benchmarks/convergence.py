"""How training goes on where messages are narrower: losses of the demo's GPT with each `communication_dtype`.

    torchrun --nproc-per-node 2 benchmarks/convergence.py
    torchrun --nproc-per-node 2 benchmarks/convergence.py --steps 600 --seeds 0 1 2 --picture build/convergence.svg \
        --losses build/losses.json

The model, the data, AdamW and its warm-up are those of examples/train_gpt.py; a seed is that of the model's values. All
forms of a seed see the same batches in the same order. "difference" is the largest and the mean, over all steps, of how
far a loss is from that of the same seed in float32. What the file of losses has is not trained again, so a long run can
be stopped and continued.
"""

from __future__ import annotations

import argparse
import json
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


Losses = tuple[list[float], float]
"""The mean loss of every step, and the held-out loss at the end."""


def losses_of(form: str, seed: int, options: argparse.Namespace) -> Losses:
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


def run_of(form: str, seed: int) -> str:
    return f"{form}, seed {seed}"


def kept(options: argparse.Namespace) -> dict[str, Losses]:
    """What the file of losses has; an error if a run of another kind made it."""
    if options.losses is None or not options.losses.exists():
        return {}
    file = json.loads(options.losses.read_text())
    if file["kind"] != kind_of(options):
        raise ValueError(f"{options.losses} has losses of {file['kind']}, and this run is one of {kind_of(options)}")
    return file["losses"]


def keep(found: Mapping[str, Losses], options: argparse.Namespace) -> None:
    if options.losses is not None and dist.get_rank() == 0:
        options.losses.parent.mkdir(parents=True, exist_ok=True)
        unfinished = options.losses.with_suffix(".unfinished")
        unfinished.write_text(json.dumps({"kind": kind_of(options), "losses": found}))
        unfinished.replace(options.losses)


def kind_of(options: argparse.Namespace) -> dict[str, float]:
    named = {name: getattr(options, name) for name in ("steps", "batch", "seq", "dim", "layers", "lr")}
    return {"ranks": dist.get_world_size(), **named}


def table_of(found: Mapping[str, Losses], options: argparse.Namespace) -> Table:
    table = Table(
        title=f"{options.steps} steps, seeds {', '.join(map(str, options.seeds))}, {dist.get_world_size()} ranks"
    )
    for column in ("form", "last losses, mean", "held out", "largest difference", "mean difference"):
        table.add_column(column, justify="left" if column == "form" else "right")
    for form in options.forms:
        differences = [
            abs(one - other)
            for seed in options.seeds
            for one, other in zip(found[run_of(form, seed)][0], found[run_of("float32", seed)][0], strict=True)
        ]
        last = mean(mean(found[run_of(form, seed)][0][-_SMOOTH:]) for seed in options.seeds)
        held_out = [f"{found[run_of(form, seed)][1]:.4f}" for seed in options.seeds]
        table.add_row(form, f"{last:.4f}", ", ".join(held_out), f"{max(differences):.4f}", f"{mean(differences):.4f}")
    return table


def draw(found: Mapping[str, Losses], options: argparse.Namespace) -> None:
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    for form in options.forms:
        by_step = torch.tensor([found[run_of(form, seed)][0] for seed in options.seeds]).mean(0)
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
    add("--losses", type=Path, help="a file, on a disk of all ranks, for the losses of every form and seed, as .json")
    options = parser.parse_args()
    options.forms = list(dict.fromkeys(["float32", *options.forms]))
    dist.init_process_group("gloo")
    found, console = kept(options), Console(quiet=dist.get_rank() != 0)
    for seed in options.seeds:
        for form in options.forms:
            run = run_of(form, seed)
            if run not in found:
                found[run] = losses_of(form, seed, options)
                keep(found, options)
            console.print(f"{run}: held-out loss {found[run][1]:.4f}", highlight=False)
    console.print(table_of(found, options))
    if options.picture is not None and dist.get_rank() == 0:
        draw(found, options)


if __name__ == "__main__":
    main()
