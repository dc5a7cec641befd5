"""What `fsdp-compile plan` does."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy

from ..checks import is_auto
from ..costs.hardware import Hardware, find_hardware
from ..costs.predict import Prediction, predict
from ..errors import CaptureError, ConfigError, one_line
from ..options import Options
from ..planning.step_plans import Goal
from ..planning.strategies import WorldSize, best_strategy, candidates
from ..report import Schedule, page
from ..rewriting import Economy, Rewriter
from .meshes import (
    MeshSizes,
    dims_of_groups,
    mesh_of_fakes,
    mesh_text,
    meshes_of_modules,
    named_meshes,
    notes_on_meshes,
)
from .models import Functions, load, made_on_meta

_GIB = 2**30
_WIDTH, _WIDTH_OF_MESHES = 110, 130  # columns that the table needs


def plan(options: argparse.Namespace) -> None:
    hardware = find_hardware(options.hardware)
    steps = list(_steps(options, hardware))
    is_split = any(step.mesh.splits_model for step in steps)
    functions = load(options.model, options.inputs, options.parallelize if is_split else None)
    rows, schedules, notes = [], [], []
    rewriters: dict[int, Rewriter] = {}
    for step in steps:
        print(f"planning {step.text(options.seq)}", file=sys.stderr)
        with step.ranks(hardware) as (root, ranks), _leaving_out(step):
            dims: Mapping[str, str] = {}
            world_size: WorldSize = ranks
            if root is not None or step.batch not in rewriters:
                model, rewriters[step.batch] = _rewriter(functions, step, options, root)
                if root is not None and isinstance(ranks, DeviceMesh):
                    dims, world_size = dims_of_groups(root, ranks), meshes_of_modules(model, root, ranks)
            prediction, chosen, reason = _predicted(step, rewriters[step.batch], world_size, hardware, options)
            rows.append(_row(prediction, chosen, options.seq, dims))
            notes += [reason] if reason else []
            if options.html:
                title = f"{chosen.text(options.seq)}, on {hardware.name}"
                schedules.append(dataclasses.replace(Schedule.of(prediction), title=title))
    if not rows:
        raise ConfigError(f"--mesh {' '.join(options.mesh)}: every mesh was left out, each for the reason above")
    if options.mesh:
        rows.sort(key=lambda row: (row["gpus"], not row["fits"], -row["tokens_per_second_per_gpu"]))
        notes += notes_on_meshes(rows)
    if options.html:
        Path(options.html).write_text(page(schedules))
    if options.json:
        print(json.dumps({"hardware": hardware.name, "digest": hardware.digest, "plans": rows}, indent=2))
    else:
        console = Console()
        console.width = max(console.width, _WIDTH_OF_MESHES if options.mesh else _WIDTH)
        console.print(_table(rows, hardware))
        for note in notes:
            console.print(note)


@contextmanager
def _leaving_out(step: _Step) -> Iterator[None]:
    """Inside, a mesh that nobody named, and that the model cannot be split over, is left out with a line."""
    try:
        yield
    except (ConfigError, CaptureError) as e:
        if not step.is_auto:
            raise
        print(f"left out: {step.mesh}: {one_line(e)}", file=sys.stderr)


@dataclasses.dataclass(frozen=True)
class _Step:
    """What a row of the table is about.

    Attributes:
        batch: rows of a rank of the data dimension.
        is_on_mesh: whether it is one of several meshes.
        is_auto: whether that is of "auto", so that nobody named it.
    """

    mesh: MeshSizes
    batch: int
    strategy: str
    is_on_mesh: bool = False
    is_auto: bool = False

    def text(self, seq: int) -> str:
        where = f" ({self.mesh})" if self.is_on_mesh else ""
        return f"{self.mesh.num_ranks} GPUs{where}, {self.batch} x {seq} tokens each, {self.strategy}"

    def ranks(self, hardware: Hardware) -> AbstractContextManager[tuple[DeviceMesh | None, WorldSize]]:
        """The mesh of all ranks, where the user gave one, and the ranks to shard over, as `rewrite` takes them."""
        gpus, shards = self.mesh.num_ranks, None
        if self.strategy == "HYBRID_SHARD":
            if gpus % hardware.ranks_per_node:
                ranks = f"{hardware.ranks_per_node} ranks"
                raise ConfigError(f"HYBRID_SHARD needs whole nodes: {gpus} is no multiple of {ranks}")
            shards = max(1, hardware.ranks_per_node * self.mesh.data // gpus)
        if self.is_on_mesh:
            return mesh_of_fakes(self.mesh, shards)
        return nullcontext((None, gpus if shards is None else (gpus // shards, shards)))


def _steps(options: argparse.Namespace, hardware: Hardware) -> Iterator[_Step]:
    meshes = [MeshSizes(gpus) for gpus in options.gpus]
    if options.mesh:
        meshes = named_meshes(options.mesh, options.gpus, hardware.ranks_per_node)
    for mesh in meshes:
        batches = options.batch
        if options.global_batch is not None:
            batches = mesh.batches(options.global_batch)
        if not batches:
            print(f"left out: {options.global_batch} rows are no multiple of the ranks of {mesh}", file=sys.stderr)
        for batch, strategy in itertools.product(batches, options.strategy):
            yield _Step(mesh, batch, strategy, bool(options.mesh), "auto" in options.mesh)


def _rewriter(
    functions: Functions, step: _Step, options: argparse.Namespace, root: DeviceMesh | None
) -> tuple[nn.Module, Rewriter]:
    model, inputs, layers = made_on_meta(functions, step.batch, options, root if step.mesh.splits_model else None)
    if options.activation_checkpointing:
        if layers is None:
            raise ConfigError(
                f"--activation-checkpointing: {options.model}() has no list of equal layers to compute again"
            )
        layers.compute_again()
    economy = Economy(layers=None if options.trace_all else layers, lowers=False)
    given = Options(collective_lowering=options.lowering)
    return model, Rewriter(model, tuple(inputs), {}, given, economy=economy)


def _predicted(
    step: _Step, rewriter: Rewriter, world_size: WorldSize, hardware: Hardware, options: argparse.Namespace
) -> tuple[Prediction, _Step, str]:
    """Of a step, which may leave the strategy open, with that decided, and why it was decided so."""
    if is_auto(step.strategy):
        goal = Goal(hardware, None, "inductor")
        open_strategies = candidates(rewriter, world_size, goal, hardware.ranks_per_node)
        choice = best_strategy(open_strategies, goal, optimizer=options.optimizer)
        return choice.prediction, dataclasses.replace(step, strategy=choice.strategy.name), choice.reason
    graphs = rewriter(world_size=world_size, sharding_strategy=ShardingStrategy[step.strategy])
    return predict(graphs, hardware, optimizer=options.optimizer), step, ""


def _row(prediction: Prediction, step: _Step, seq: int, dims: Mapping[str, str]) -> dict[str, Any]:
    peak, mesh = prediction.memory.peak, step.mesh
    return {
        "gpus": mesh.num_ranks,
        "mesh": mesh.by_name if step.is_on_mesh else None,
        "batch": step.batch,
        "seq": seq,
        "strategy": step.strategy,
        "seconds": prediction.seconds,
        "tokens_per_second_per_gpu": step.batch * seq * mesh.data / mesh.num_ranks / prediction.seconds,
        "model_flops_utilisation": prediction.utilisation,
        "exposed_seconds": prediction.exposed,
        "model_collectives_seconds": prediction.model_collectives,
        "lower_bound_seconds": prediction.lower_bound,
        "binds": dims.get(prediction.binds, prediction.binds),
        "peak_bytes": peak.total,
        "peak_bytes_by_category": dict(peak.held),
        "fits": peak.total <= prediction.hardware.memory,
    }


def _table(rows: list[dict[str, Any]], hardware: Hardware) -> Table:
    table = Table(
        title=f"A step on {hardware.name}; ms, tokens/s of a GPU; '!' is more than its {hardware.memory / _GIB:.0f} GiB"
    )
    has_meshes = any(row["mesh"] for row in rows)
    on_mesh = ["mesh"] if has_meshes else []
    headings = ["GPUs", *on_mesh, "batch", "strategy", "ms", "tokens/s", "MFU", "exposed", "bound", "by", "GiB"]
    if has_meshes:
        headings.insert(headings.index("bound"), "of model")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("mesh", "strategy", "by") else "right", no_wrap=True)
    for row in rows:
        gib = row["peak_bytes"] / _GIB
        peak = f"{gib:.1f}" if gib >= 1 else f"{gib:.2g}"
        cells = {
            "GPUs": str(row["gpus"]),
            "mesh": mesh_text(row["mesh"]) if row["mesh"] else "",
            "batch": str(row["batch"]),
            "strategy": row["strategy"],
            "ms": f"{row['seconds'] * 1e3:.1f}",
            "tokens/s": f"{row['tokens_per_second_per_gpu']:.0f}",
            "MFU": f"{row['model_flops_utilisation']:.1%}",
            "exposed": f"{row['exposed_seconds'] * 1e3:.1f}",
            "of model": f"{row['model_collectives_seconds'] * 1e3:.1f}",
            "bound": f"{row['lower_bound_seconds'] * 1e3:.1f}",
            "by": row["binds"],
            "GiB": peak if row["fits"] else f"[bold red]{peak}![/]",
        }
        table.add_row(*(cells[heading] for heading in headings))
    return table
