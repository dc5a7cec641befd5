"""What `fsdp-compile plan` does."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch.distributed.fsdp import ShardingStrategy

from ..checks import is_auto
from ..costs.hardware import Hardware, find_hardware
from ..costs.predict import Prediction, predict
from ..errors import ConfigError
from ..options import Options
from ..planning.step_plans import Goal
from ..planning.strategies import best_strategy, candidates
from ..report import Schedule, page
from ..rewriting import Rewriter
from .models import load, made_on_meta

_GIB = 2**30
_WIDTH = 110  # columns that the table needs


def plan(options: argparse.Namespace) -> None:
    make_model, make_inputs = load(options.model, options.inputs)
    hardware = find_hardware(options.hardware)
    rows, schedules, reasons = [], [], []
    rewriters: dict[int, Rewriter] = {}
    for gpus, batch, strategy in itertools.product(options.gpus, options.batch, options.strategy):
        print(f"planning {gpus} GPUs, {batch} x {options.seq} tokens each, {strategy}", file=sys.stderr)
        if batch not in rewriters:
            model, inputs = made_on_meta(make_model, make_inputs, batch, options)
            rewriters[batch] = Rewriter(model, tuple(inputs), {}, Options(collective_lowering=options.lowering))
        if is_auto(strategy):
            goal = Goal(hardware, None, "inductor")
            rewrites = candidates(rewriters[batch], gpus, goal, hardware.ranks_per_node)
            choice = best_strategy(rewrites, goal, optimizer=options.optimizer)
            graphs, strategy = choice.graphs, choice.strategy.name
            reasons.append(choice.reason)
        else:
            world_size = _world_size(gpus, strategy, hardware)
            graphs = rewriters[batch](world_size=world_size, sharding_strategy=ShardingStrategy[strategy])
        prediction = predict(graphs, hardware, optimizer=options.optimizer)
        rows.append(_row(prediction, gpus, batch, options.seq, strategy))
        if options.html:
            title = f"{gpus} GPUs, {batch} x {options.seq} tokens each, {strategy}, on {hardware.name}"
            schedules.append(dataclasses.replace(Schedule.of(prediction), title=title))
    if options.html:
        Path(options.html).write_text(page(schedules))
    if options.json:
        print(json.dumps({"hardware": hardware.name, "digest": hardware.digest, "plans": rows}, indent=2))
    else:
        console = Console()
        console.width = max(console.width, _WIDTH)
        console.print(_table(rows, hardware))
        for reason in reasons:
            console.print(reason)


def _world_size(gpus: int, strategy: str, hardware: Hardware) -> int | tuple[int, int]:
    if strategy != "HYBRID_SHARD":
        return gpus
    if gpus % hardware.ranks_per_node:
        raise ConfigError(f"HYBRID_SHARD needs whole nodes: {gpus} is no multiple of {hardware.ranks_per_node} ranks")
    return gpus // hardware.ranks_per_node, hardware.ranks_per_node


def _row(prediction: Prediction, gpus: int, batch: int, seq: int, strategy: str) -> dict[str, Any]:
    peak = prediction.memory.peak
    return {
        "gpus": gpus,
        "batch": batch,
        "seq": seq,
        "strategy": strategy,
        "seconds": prediction.seconds,
        "tokens_per_second_per_gpu": batch * seq / prediction.seconds,
        "model_flops_utilisation": prediction.utilisation,
        "exposed_seconds": prediction.exposed,
        "lower_bound_seconds": prediction.lower_bound,
        "binds": prediction.binds,
        "peak_bytes": peak.total,
        "peak_bytes_by_category": dict(peak.held),
        "fits": peak.total <= prediction.hardware.memory,
    }


def _table(rows: list[dict[str, Any]], hardware: Hardware) -> Table:
    table = Table(
        title=f"A step on {hardware.name}; ms, tokens/s of a GPU; '!' is more than its {hardware.memory / _GIB:.0f} GiB"
    )
    for heading in ("GPUs", "batch", "strategy", "ms", "tokens/s", "MFU", "exposed", "bound", "by", "GiB"):
        table.add_column(heading, justify="left" if heading in ("strategy", "by") else "right", no_wrap=True)
    for row in rows:
        gib = row["peak_bytes"] / _GIB
        peak = f"{gib:.1f}" if gib >= 1 else f"{gib:.2g}"
        table.add_row(
            str(row["gpus"]),
            str(row["batch"]),
            row["strategy"],
            f"{row['seconds'] * 1e3:.1f}",
            f"{row['tokens_per_second_per_gpu']:.0f}",
            f"{row['model_flops_utilisation']:.1%}",
            f"{row['exposed_seconds'] * 1e3:.1f}",
            f"{row['lower_bound_seconds'] * 1e3:.1f}",
            row["binds"],
            peak if row["fits"] else f"[bold red]{peak}![/]",
        )
    return table
