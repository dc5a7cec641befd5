"""What `fsdp-compile plan` does."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy

from ..checks import is_auto
from ..costs.hardware import Hardware, find_hardware
from ..costs.predict import Prediction, predict
from ..costs.stages import Stage, StagedStep
from ..errors import CaptureError, ConfigError, one_line
from ..module.equal_layers import EqualLayers
from ..options import Options
from ..planning.step_plans import Goal
from ..planning.strategies import STRATEGIES_OF_ALL_RANKS, Candidate, WorldSize, best_strategy, candidates
from ..report import Schedule, page
from ..rewriting import Economy, Rewriter
from .meshes import (
    MeshSizes,
    dims_of_groups,
    mesh_of_fakes,
    meshes_of_modules,
    named_meshes,
    notes_on_meshes,
    refuse_unsplit,
)
from .models import Functions, load, made_on_meta
from .stages import CutStage, cut, micro_batches
from .tables import table_of

_WIDEST = 1000  # columns of a table


def plan(options: argparse.Namespace) -> None:
    hardware = find_hardware(options.hardware)
    steps = list(_steps(options, hardware))
    planner = _Planner.of(options, hardware, steps)
    rows: list[dict[str, Any]] = []
    schedules: list[Schedule] = []
    notes: list[str] = []
    for step in steps:
        print(f"planning {step.text(options.seq)}", file=sys.stderr)
        with step.ranks(hardware) as (root, ranks), _leaving_out(step):
            planned = planner.planned(step, root, ranks)
            dims = dims_of_groups(root, ranks) if root is not None and isinstance(ranks, DeviceMesh) else {}
            rows.append(_row(planned.prediction, planned.step, options.seq, dims))
            notes += [planned.reason] if planned.reason else []
            if options.html:
                schedules += planned.schedules(options.seq)
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
        console, table = Console(), table_of(rows, hardware)
        unbounded = console.options.update(max_width=_WIDEST)
        console.width = max(console.width, console.measure(table, options=unbounded).maximum)
        console.print(table)
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
        gpus, shards = self.mesh.ranks_of_stage, None
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
        has_stages = options.stages is not None
        meshes = named_meshes(options.mesh, options.gpus, hardware.ranks_per_node, has_stages=has_stages)
    for mesh in meshes:
        batches = options.batch
        if options.global_batch is not None:
            batches = mesh.batches(options.global_batch)
        if not batches:
            print(f"left out: {options.global_batch} rows are no multiple of the ranks of {mesh}", file=sys.stderr)
        for batch, strategy in itertools.product(batches, options.strategy):
            yield _Step(mesh, batch, strategy, bool(options.mesh), "auto" in options.mesh)


@dataclasses.dataclass(frozen=True)
class _Planned:
    """What is predicted of a step, which may have left the strategy open, and why that was decided so."""

    prediction: Prediction | StagedStep
    step: _Step
    reason: str = ""

    def schedules(self, seq: int) -> Iterator[Schedule]:
        """Of forward and backward, with a title each; of stages that differ."""
        found, title = self.prediction, f"{self.step.text(seq)}, on {self.prediction.hardware.name}"
        if not isinstance(found, StagedStep):
            yield dataclasses.replace(Schedule.of(found), title=title)
            return
        of_stages = [stage.prediction for stage in found.stages]
        for index, prediction in enumerate(of_stages):
            if prediction not in of_stages[:index]:
                yield dataclasses.replace(Schedule.of(prediction), title=f"{title}: a micro-batch of stage {index}")


_OF_DIMS: dict[str, tuple[str, Any]] = {
    "parallelize": ("tp or ep", "parallelize"),
    "stages": ("pp", "stages"),
    "micro_batch": ("pp", 1),
}
"""Options of meshes that have some dimensions: which, and what the option is where it is not given."""


def _completed(options: argparse.Namespace, dims: Collection[str]) -> argparse.Namespace:
    """The options, with defaults; ConfigError for one that is given for dimensions that no mesh has."""
    found = dict(vars(options))
    for name, (dims_of_option, default) in _OF_DIMS.items():
        if found[name] is None:
            found[name] = default
        elif dims_of_option not in dims:
            raise ConfigError(
                f"--{name.replace('_', '-')} is for meshes with {dims_of_option}, and there is none: "
                "name one with --mesh, or leave it out"
            )
    return argparse.Namespace(**found)


@dataclasses.dataclass(frozen=True, eq=False)
class _Stage:
    """A stage of a pipeline, to be sharded over `ranks`; `received` as in `Stage`."""

    rewriter: Rewriter
    ranks: WorldSize
    received: int

    def shard_bytes(self, strategy: ShardingStrategy) -> tuple[int, int]:
        return self.rewriter.shard_bytes(world_size=self.ranks, sharding_strategy=strategy)


@dataclasses.dataclass(frozen=True)
class _Planner:
    """Predicts the steps of a model.

    Attributes:
        rewriters: by rows of a rank, of models that are split over no mesh.
    """

    options: argparse.Namespace
    hardware: Hardware
    functions: Functions
    rewriters: dict[int, Rewriter] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, options: argparse.Namespace, hardware: Hardware, steps: Sequence[_Step]) -> _Planner:
        splits_model = any(step.mesh.splits_model for step in steps)
        has_stages = any(step.mesh.pipeline > 1 for step in steps)
        may_split = splits_model or "auto" in options.mesh
        options = _completed(options, ["tp or ep"] * may_split + ["pp"] * has_stages)
        parallelize, stages = options.parallelize if splits_model else None, options.stages if has_stages else None
        return cls(options, hardware, load(options.model, options.inputs, parallelize, stages))

    def planned(self, step: _Step, root: DeviceMesh | None, ranks: WorldSize) -> _Planned:
        if root is None:
            if step.batch not in self.rewriters:
                self.rewriters[step.batch] = self._rewriter(*self._made(step.batch, None))
            return self._predicted(step, self.rewriters[step.batch], ranks)
        assert isinstance(ranks, DeviceMesh)
        if step.mesh.pipeline > 1:
            return self._staged(step, root, ranks)
        made = self._made(step.batch, root if step.mesh.splits_model else None)
        return self._predicted(step, self._rewriter(*made), meshes_of_modules(made[0], root, ranks))

    def _made(self, batch: int, split_over: DeviceMesh | None) -> tuple[nn.Module, Sequence[Any], EqualLayers | None]:
        made = made_on_meta(self.functions, batch, self.options, split_over)
        if split_over is not None:
            refuse_unsplit(made[0], split_over)
        return made

    def _rewriter(self, model: nn.Module, inputs: Sequence[Any], layers: EqualLayers | None) -> Rewriter:
        if self.options.activation_checkpointing:
            if layers is None:
                raise ConfigError(
                    f"--activation-checkpointing: {self.options.model}() has no list of equal layers to compute again"
                )
            layers.compute_again()
        economy = Economy(layers=None if self.options.trace_all else layers, lowers=False)
        lowering, pieces = self.options.lowering, self.options.collective_pieces
        given = Options(collective_lowering=lowering, collective_pieces=pieces)
        return Rewriter(model, tuple(inputs), {}, given, economy=economy)

    def _predicted(self, step: _Step, rewriter: Rewriter, world_size: WorldSize) -> _Planned:
        if is_auto(step.strategy):
            node, optimizer = self.hardware.ranks_per_node, self.options.optimizer
            return self._best(step, candidates(rewriter, world_size, self._goal, node, optimizer))
        return _Planned(self._prediction(step, rewriter, world_size), step)

    @property
    def _goal(self) -> Goal:
        return Goal(self.hardware, None, "inductor")

    def _best(self, step: _Step, open_strategies: Mapping[ShardingStrategy, Candidate[Any]]) -> _Planned:
        choice = best_strategy(open_strategies, self._goal)
        return _Planned(choice.prediction, dataclasses.replace(step, strategy=choice.strategy.name), choice.reason)

    def _prediction(self, step: _Step, rewriter: Rewriter, world_size: WorldSize) -> Prediction:
        graphs = rewriter(world_size=world_size, sharding_strategy=ShardingStrategy[step.strategy])
        return predict(graphs, self.hardware, optimizer=self.options.optimizer)

    def _staged(self, step: _Step, root: DeviceMesh, ranks: DeviceMesh) -> _Planned:
        """A step of a pipeline, all of whose stages are sharded by one strategy."""
        mesh, rows, name = step.mesh, self.options.micro_batch, self.options.stages
        num_micro_batches = micro_batches(step.batch, rows, mesh.pipeline, mesh.stages_of_rank)
        model, inputs, _ = self._made(rows, root if mesh.splits_model else None)
        assert self.functions.stages is not None
        stages = self._stages(cut(self.functions.stages, name, model, inputs, mesh.num_stages), root, ranks)

        def predicted(of: _Step) -> StagedStep:
            found = {
                stage: Stage(self._prediction(of, stage.rewriter, stage.ranks), stage.received)
                for stage in dict.fromkeys(stages)
            }
            of_all = [found[stage] for stage in stages]
            return StagedStep(of_all, self.hardware, mesh.ranks_of_stage, num_micro_batches, mesh.stages_of_rank)

        if not is_auto(step.strategy):
            return _Planned(predicted(step), step)

        def shard_bytes(strategy: ShardingStrategy) -> tuple[int, int]:
            return max(stage.shard_bytes(strategy) for stage in stages)

        open_steps = {each: dataclasses.replace(step, strategy=each.name) for each in STRATEGIES_OF_ALL_RANKS}
        optimizer = self.options.optimizer
        open_strategies = {
            strategy: Candidate(partial(predicted, of), partial(shard_bytes, strategy), optimizer)
            for strategy, of in open_steps.items()
        }
        return self._best(step, open_strategies)

    def _stages(self, parts: Iterable[CutStage], root: DeviceMesh, ranks: DeviceMesh) -> list[_Stage]:
        """What rewrites each of them: the same for equal ones."""
        known: list[tuple[CutStage, _Stage]] = []
        found = []
        for made in parts:
            stage = next((stage for other, stage in known if made.is_equal_to(other)), None)
            if stage is None:
                rewriter = self._rewriter(made.module, made.values, made.layers)
                stage = _Stage(rewriter, meshes_of_modules(made.module, root, ranks), made.received)
                known.append((made, stage))
            found.append(stage)
        return found


def _row(prediction: Prediction | StagedStep, step: _Step, seq: int, dims: Mapping[str, str]) -> dict[str, Any]:
    mesh = step.mesh
    return {
        "gpus": mesh.num_ranks,
        "mesh": mesh.by_name if step.is_on_mesh else None,
        "stages_of_rank": mesh.stages_of_rank,
        "batch": step.batch,
        "seq": seq,
        "strategy": step.strategy,
        "seconds": prediction.seconds,
        "tokens_per_second_per_gpu": step.batch * seq * mesh.data / mesh.num_ranks / prediction.seconds,
        "model_flops_utilisation": prediction.utilisation,
        "exposed_seconds": prediction.exposed,
        "idle_seconds": prediction.idle if isinstance(prediction, StagedStep) else 0.0,
        "model_collectives_seconds": prediction.model_collectives,
        "lower_bound_seconds": prediction.lower_bound,
        "binds": dims.get(prediction.binds, prediction.binds),
        "peak_bytes": prediction.peak.total,
        "peak_bytes_by_category": dict(prediction.peak.held),
        "fits": prediction.peak.total <= prediction.hardware.memory,
    }
