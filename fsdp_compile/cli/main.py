"""The command line: `fsdp-compile plan`, `build`, `emulate`, `report`, `calibrate` and `doctor`."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch.distributed.fsdp import ShardingStrategy

from ..api import rewrite
from ..costs.calibrate import calibrate
from ..costs.hardware import HARDWARE, Hardware, find_hardware
from ..costs.optimizers import OPTIMIZERS
from ..costs.predict import Prediction, predict
from ..environment import initialise_from_environment
from ..errors import CaptureError, ConfigError
from ..planning.step_plans import Goal
from ..planning.strategies import best_strategy, candidates, is_auto
from ..report import Schedule, page, trace
from .build import add_build, add_emulate
from .doctor import examine
from .models import load, made_on_meta

_GIB = 2**30
_WIDTH = 110  # columns that the table needs


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (ConfigError, CaptureError, OSError) as e:
        if options.debug:
            raise
        sys.exit(f"error: {e}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fsdp-compile",
        description="Plan, look at and check training with fsdp_compile. COMMAND --help is the manual of a command.",
    )
    parser.add_argument("--debug", action="store_true", help="errors with their tracebacks")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_plan(commands)
    add_build(commands)
    add_emulate(commands)
    _add_report(commands)
    _add_calibrate(commands)
    doctor = commands.add_parser(
        "doctor",
        help="say what is installed, and train a small model on 2 ranks of this machine",
        description="Prints versions, devices and compilers, then trains a small model on 2 ranks of this machine, "
        "with every backend that can run, and compares it with the unsharded one. Exits with 1 if something is wrong.",
    )
    doctor.set_defaults(run=_doctor)
    return parser


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="predict time and memory of a training step, without the hardware",
        description="Trace a model on the meta device, rewrite its training step for every combination of the options, "
        "and predict what a step takes of a rank. Options with a + take several values.",
        epilog="example: fsdp-compile plan examples/llama.py:llama3_8b --gpus 8 64 --seq 8192 --html plan.html",
    )
    plan.add_argument(
        "model",
        metavar="FILE:FUNCTION",
        help="a function without arguments that returns the model; FILE is run as by import, not as __main__",
    )
    plan.add_argument(
        "--inputs",
        default="inputs",
        metavar="FUNCTION",
        help="of the same file: (batch, seq) to the arguments of the model (default: inputs)",
    )
    plan.add_argument("--gpus", type=int, nargs="+", default=[8], metavar="N", help="+ ranks (default: 8)")
    plan.add_argument("--batch", type=int, nargs="+", default=[1], metavar="N", help="+ rows of a rank (default: 1)")
    plan.add_argument("--seq", type=int, default=2048, metavar="N", help="tokens of a row (default: 2048)")
    plan.add_argument(
        "--strategy",
        nargs="+",
        default=["FULL_SHARD"],
        choices=["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "auto"],
        help="+ hybrid shards over the ranks of a node; auto is planned, and is the fastest that fits "
        "(default: FULL_SHARD)",
    )
    plan.add_argument("--lowering", default="grouped", choices=["grouped", "packed"], help="(default: grouped)")
    plan.add_argument("--optimizer", default="adam", choices=list(OPTIMIZERS), help="(default: adam)")
    plan.add_argument(
        "--hardware",
        default="h100",
        metavar="NAME",
        help=f"{', '.join(HARDWARE)}, or a profile of `calibrate` (default: h100)",
    )
    plan.add_argument("--json", action="store_true", help="print JSON instead of a table")
    plan.add_argument("--html", metavar="FILE", help="write the schedules as a page for a browser, too")
    plan.set_defaults(run=_plan)


def _add_report(commands: Any) -> None:
    report = commands.add_parser(
        "report",
        help="show a schedule that was saved",
        description="Shows a schedule that model.explain(schedule=FILE) saved: in words, as a page for a browser, or "
        "as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.",
    )
    report.add_argument(
        "schedule", nargs="+", metavar="FILE", help="one or more of them, of which a trace lays one over the other"
    )
    report.add_argument("--html", metavar="FILE", help="the page to write")
    report.add_argument("--trace", metavar="FILE", help="the trace to write")
    report.set_defaults(run=_report)


def _add_calibrate(commands: Any) -> None:
    measure = commands.add_parser(
        "calibrate",
        help="measure the machine, or under torchrun the cluster, into a profile for `plan`",
        description="Measures matmuls, memory, and under torchrun messages of several sizes; takes a few seconds.",
        epilog="example: torchrun --nproc-per-node 8 -m fsdp_compile calibrate --out cluster.json",
    )
    measure.add_argument("--out", default="hardware.json", metavar="FILE", help="(default: hardware.json)")
    measure.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    measure.set_defaults(run=_calibrate)


def _report(options: argparse.Namespace) -> None:
    schedules = {path: _saved(path) for path in options.schedule}
    for schedule in schedules.values():
        print(schedule.about)
    if options.html:
        Path(options.html).write_text(page(list(schedules.values())))
    if options.trace:
        Path(options.trace).write_text(trace(schedules))


def _saved(path: str) -> Schedule:
    try:
        return Schedule.from_json(Path(path).read_text())
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from e


def _doctor(options: argparse.Namespace) -> None:
    console, is_well = Console(), True
    for finding in examine():  # which takes a while: what is found is said at once
        verdict = "ok" if finding.is_well else "[bold red]wrong[/]"
        console.print(escape(f"{finding.what}: {finding.found}"), verdict, soft_wrap=True)
        is_well &= finding.is_well
    if not is_well:
        sys.exit(1)


def _calibrate(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no GPU that torch can use")
    if device.type == "cuda" and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    initialise_from_environment(device)
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    hardware = calibrate(device, name=Path(options.out).stem, ranks_per_node=ranks_per_node)
    if not dist.is_initialized() or dist.get_rank() == 0:
        Path(options.out).write_text(hardware.to_json() + "\n")
        print(hardware.to_json())
        print(f"written to {options.out}, digest {hardware.digest}")
    if dist.is_initialized():
        dist.destroy_process_group()


def _plan(options: argparse.Namespace) -> None:
    make_model, make_inputs = load(options.model, options.inputs)
    hardware = find_hardware(options.hardware)
    rows, schedules, reasons = [], [], []
    for gpus, batch, strategy in itertools.product(options.gpus, options.batch, options.strategy):
        print(f"planning {gpus} GPUs, {batch} x {options.seq} tokens each, {strategy}", file=sys.stderr)
        model, inputs = made_on_meta(make_model, make_inputs, batch, options)
        rewriting = partial(rewrite, model, *inputs, collective_lowering=options.lowering)
        if is_auto(strategy):
            goal = Goal(hardware, None, "inductor")
            rewrites = candidates(rewriting, gpus, goal, hardware.ranks_per_node)
            choice = best_strategy(rewrites, goal, optimizer=options.optimizer)
            graphs, strategy = choice.graphs, choice.strategy.name
            reasons.append(choice.reason)
        else:
            world_size = _world_size(gpus, strategy, hardware)
            graphs = rewriting(world_size=world_size, sharding_strategy=ShardingStrategy[strategy])
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
