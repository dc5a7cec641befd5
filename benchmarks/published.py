"""Predicted steps against published ones, of training runs that shard with FSDP, some of them with tensor parallelism.

    python benchmarks/published.py                      # all rows, some fifteen minutes and no GPU
    python benchmarks/published.py --only torchtitan
    python benchmarks/published.py --fit                # and the efficiencies that fit the rows best

Each row's model is traced on the meta device, rewritten for its number of GPUs, and priced on a described machine. What
is not published is assumed, the same for all rows of a source: see `SOURCES`. The one thing that is fitted is
`Hardware.efficiency`, one number for A100 and one for H100.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fsdp_compile import rewrite
from fsdp_compile.cli.meshes import MeshSizes, mesh_of_fakes
from fsdp_compile.costs.hardware import HARDWARE, Hardware, Link
from fsdp_compile.costs.nodes import Compiler
from fsdp_compile.costs.predict import Prediction, predict
from fsdp_compile.costs.timeline import rings_of, simulate
from fsdp_compile.graphs import RewrittenGraphs
from fsdp_compile.passes.overlap_model_collectives import OverlapModelCollectives

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from mpt import MPT, MPT_7B, MPT_13B, MPT_70B, MPTConfig

from llama import LLAMA3_8B, LLAMA3_70B, LLAMA3_405B, Llama, LlamaConfig, parallelize

GIB = 2**30

LLAMA2_7B = LlamaConfig(layers=32, dim=4096, heads=32, kv_heads=32, ffn_dim=11008, vocab=32000)
GPT_175B = MPTConfig(layers=96, dim=12288, heads=96, seq=512)
GPT_1T = MPTConfig(layers=128, dim=25600, heads=200)

BF16_REDUCED_IN_F32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
F16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)

SOURCES = {
    "torchtitan": "benchmarks/llama3_h100_202412_torchtitan.md: H100 with 96 GB at 2.4 TB/s and 500 W, 400 Gb/s per "
    "GPU; its peak lies, says footnote 2, between 835 and 989 TFLOP/s: 912 here. 'selective' saves attention and every "
    "other matmul. GiB are what the allocator reserves.",
    "torchtitan#3429": "GraphTrainer, memory policies default (taken to be torchtitan's 'selective') and full, on GPUs "
    "with 95 GiB (taken to be those above, at their full power); batch 1, sequence 8192, which their tokens/s and MFU "
    "imply.",
    "torchtitan#1299": "benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md, with the figures of the pull request: "
    "bf16 without asynchronous tensor parallelism, on the GPUs of 'torchtitan'. Not fitted.",
    "torchtitan 2024-08": "docs/performance.md of that time: 'None' of its optimizations, taken to be compiled, as in "
    "its configuration, on GPUs with 94 GB, taken to be those of 'torchtitan'. Not fitted.",
    "thunder#940": "benchmark_litgpt.py: parameters and Adam in bf16, zero2 as in its command, sequence 4096.",
    "llm-foundry": "scripts/train/benchmarking/README.md: FSDP1 without a compiler, priced with our copies of "
    "parameters and gradients (its parameters are views, its gradients are copied twice); gradients reduced in f32, "
    "with 'PURE' in bf16, in every micro-batch; 1,600 Gb/s per node of A100.",
    "FSDP launch": "FSDP1 without a compiler, fp16, SGD, a unit for each linear layer, 400 Gb/s per node. Not priced: "
    "the copies of CPU offload, the update on the CPU, allocation. FLOP/s count what is computed twice. Not fitted.",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A published run.

    Attributes:
        published: tokens/s of a GPU; for "FSDP launch" FLOP/s of a GPU.
        batch: sequences of a rank in a micro-batch.
        micro_batches: of a step.
        split: ranks of a node that split the model, by tensor and sequence parallelism.
        weights: the dtype of parameters and of Adam's states.
    """

    source: str
    model: Callable[[], nn.Module]
    title: str
    hardware: Hardware
    gpus: int
    batch: int
    seq: int
    published: float
    published_mfu: float | None = None
    published_gib: float | None = None
    checkpointing: str = "none"
    is_compiled: bool = True
    micro_batches: int = 1
    split: int = 1
    policy: MixedPrecisionPolicy | None = BF16_REDUCED_IN_F32
    weights: torch.dtype = torch.float32
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    units: Any = "auto"
    optimizer: str = "adam"

    @property
    def traced(self) -> Any:
        """The same for rows that have the same graphs."""
        sizes = self.title, self.gpus, self.split, self.batch, self.seq
        return *sizes, self.checkpointing, self.policy, self.weights, self.strategy

    @property
    def compiler(self) -> Compiler:
        return "inductor" if self.is_compiled else "eager"

    @property
    def is_in_flops(self) -> bool:
        return self.source == "FSDP launch"

    @property
    def is_fitted(self) -> bool:
        return self.source != "FSDP launch" and self.split == 1


_HBM2E = dataclasses.replace(HARDWARE["h100"], memory_bandwidth=2.4e12, memory=96 * 10**9)
# "HBM2e-based SXM H100 with lower TDP", says the source, whose peak "is between SXM and NVL": 989 and 835 TFLOP/s.
_LOW_POWER = dataclasses.replace(_HBM2E, flops={"bfloat16": 912e12, "float32": 456e12})

_llama3 = functools.partial(Row, model=lambda: Llama(LLAMA3_8B), title="Llama3-8B", seq=8192)
_torchtitan = functools.partial(_llama3, "torchtitan", hardware=_LOW_POWER, batch=2, checkpointing="selective")
_graph_trainer = functools.partial(_llama3, "torchtitan#3429", hardware=_HBM2E, gpus=8, batch=1)
_async_tp = functools.partial(Row, "torchtitan#1299", seq=8192, hardware=_LOW_POWER, split=8)
_llama_405b = functools.partial(Row, "torchtitan 2024-08", seq=8192, hardware=_LOW_POWER, split=8)
_thunder = functools.partial(
    Row,
    "thunder#940",
    lambda: Llama(LLAMA2_7B),
    "Llama2-7B",
    HARDWARE["h100"],
    gpus=8,
    batch=1,
    seq=4096,
    policy=None,
    weights=torch.bfloat16,
    strategy=ShardingStrategy.SHARD_GRAD_OP,
)
_foundry = functools.partial(Row, "llm-foundry", is_compiled=False, seq=2048)
_foundry_7b = functools.partial(_foundry, model=lambda: MPT(MPT_7B), title="MPT-7B", gpus=8, batch=6)
_foundry_13b = functools.partial(_foundry, model=lambda: MPT(MPT_13B), title="MPT-13B", batch=2)
_foundry_70b = functools.partial(
    _foundry, model=lambda: MPT(MPT_70B), title="MPT-70B", gpus=64, batch=8, micro_batches=4, checkpointing="full"
)
_launch = functools.partial(
    Row,
    "FSDP launch",
    hardware=dataclasses.replace(HARDWARE["a100-40"], between_nodes=Link(6.25e9, 14e-6)),
    gpus=128,
    checkpointing="full",
    is_compiled=False,
    policy=F16,
    units=ModuleWrapPolicy({nn.Linear}),
    optimizer="sgd",
)

ROWS = [
    _torchtitan(gpus=8, published=5762, published_gib=82.4, is_compiled=False),
    _torchtitan(gpus=8, published=6667, published_gib=77.0),
    _torchtitan(gpus=128, published=5605, published_gib=67.0, is_compiled=False),
    _torchtitan(gpus=128, published=6514, published_gib=62.0),
    _graph_trainer(published=7890, published_mfu=0.462, published_gib=52.44, checkpointing="selective"),
    _graph_trainer(published=7006, published_mfu=0.4102, published_gib=32.07, checkpointing="full"),
    _async_tp(lambda: Llama(LLAMA3_70B), "Llama3-70B", gpus=256, batch=16, published=597.3, checkpointing="full"),
    _async_tp(lambda: Llama(LLAMA3_8B), "Llama3-8B", gpus=64, batch=12, published=4378, checkpointing="selective"),
    _llama_405b(
        lambda: Llama(LLAMA3_405B),
        "Llama3-405B",
        gpus=128,
        batch=2,
        published=109,
        published_mfu=0.29,
        checkpointing="full",
    ),
    _thunder(published=9325.13, published_gib=47.45e9 / GIB, is_compiled=False),
    _thunder(published=11855.92, published_gib=40.21e9 / GIB),
    _foundry_7b(hardware=HARDWARE["h100"], published=10643, published_mfu=0.4644),
    _foundry_7b(hardware=HARDWARE["a100-80"], published=4641, published_mfu=0.6423, micro_batches=2),
    _foundry_13b(hardware=HARDWARE["h100"], gpus=8, published=4792, published_mfu=0.3979),
    _foundry_13b(hardware=HARDWARE["a100-80"], gpus=8, published=2262, published_mfu=0.5957, micro_batches=3),
    _foundry_13b(hardware=HARDWARE["h100"], gpus=16, published=4767, published_mfu=0.3958),
    _foundry_13b(hardware=HARDWARE["h100"], gpus=32, published=4811, published_mfu=0.3995),
    _foundry_13b(hardware=HARDWARE["h100"], gpus=64, published=4800, published_mfu=0.3986),
    _foundry_70b(hardware=HARDWARE["h100"], published=1039, published_mfu=0.4257),
    _foundry_70b(hardware=HARDWARE["a100-80"], published=410, published_mfu=0.5333, policy=BF16),
    _launch(lambda: MPT(GPT_175B), "GPT-175B", batch=20, seq=512, published=159e12),
    _launch(lambda: MPT(GPT_1T), "GPT-1T", batch=4, seq=2048, published=84e12),
    _launch(lambda: MPT(GPT_1T), "GPT-1T", batch=2, seq=2048, published=84e12, micro_batches=2),
]


class Checkpointed(nn.Module):
    """A layer that computes again in the backward what it did not save in the forward."""

    def __init__(self, layer: nn.Module, mode: str) -> None:
        super().__init__()
        self.layer = layer
        self.options = {"context_fn": _selective} if mode == "selective" else {}

    def forward(self, *args: Tensor) -> Tensor:
        return checkpoint(self.layer, *args, use_reentrant=False, **self.options)


def _selective() -> Any:
    """torchtitan's selective checkpointing by operator: attention is saved, and every other matmul."""
    num_matmuls = {True: 0, False: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_saved = "attention" in str(op)
        if op is torch.ops.aten.mm.default:
            num_matmuls[context.is_recompute] += 1
            is_saved = num_matmuls[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@contextlib.contextmanager
def ranks_of(row: Row) -> Iterator[tuple[DeviceMesh | None, DeviceMesh | int]]:
    """The mesh that splits the row's model, and what its parameters are sharded over; inside, graphs can be priced."""
    if row.split == 1:
        yield None, row.gpus
    else:
        with mesh_of_fakes(MeshSizes(row.gpus // row.split, row.split), None) as ranks:
            yield ranks


def graphs_of(row: Row, mesh: DeviceMesh | None, world_size: DeviceMesh | int) -> RewrittenGraphs:
    with torch.device("meta"):
        model = row.model().to(row.weights)
        tokens = torch.zeros(row.batch, row.seq, dtype=torch.int64)
    if mesh is not None:
        model = parallelize(model, mesh)
    if row.checkpointing != "none":
        model.layers = nn.ModuleList([Checkpointed(layer, row.checkpointing) for layer in model.layers])
    with mock.patch.object(OverlapModelCollectives, "__call__", lambda *args: None):  # they wait for each at once
        return rewrite(
            model,
            tokens,
            tokens,
            world_size=world_size,
            auto_wrap_policy=row.units,
            sharding_strategy=row.strategy,
            mp_policy=row.policy,
        )


@dataclasses.dataclass(frozen=True)
class Result:
    """A prediction in the terms of its row."""

    row: Row
    prediction: Prediction

    @property
    def seconds(self) -> float:
        return self.row.micro_batches * self.prediction.timeline.seconds + self.prediction.optimizer_seconds

    @property
    def predicted(self) -> float:
        tokens = self.row.batch * self.row.seq / self.row.split
        per_micro_batch = self.prediction.flops if self.row.is_in_flops else tokens
        return self.row.micro_batches * per_micro_batch / self.seconds

    @property
    def ratio(self) -> float:
        return self.predicted / self.row.published

    @property
    def utilisation(self) -> float:
        model_flops = self.row.micro_batches * self.prediction.model_flops
        return model_flops / self.seconds / HARDWARE[self.row.hardware.name].flops["bfloat16"]


def result_of(row: Row, graphs: RewrittenGraphs) -> Result:
    return Result(row, predict(graphs, row.hardware, optimizer=row.optimizer, compiler=row.compiler))


def ratio_by_efficiency(result: Result, efficiencies: Sequence[float]) -> list[float]:
    """Predicted to published, had the hardware these efficiencies."""
    row, work, ratios = result.row, result.prediction.work, []
    for efficiency in efficiencies:
        hardware = dataclasses.replace(row.hardware, efficiency=efficiency)
        timeline = simulate(work, hardware, rings_of(work, hardware))
        prediction = dataclasses.replace(result.prediction, timeline=timeline)
        ratios.append(Result(row, prediction).ratio)
    return ratios


def table(results: Sequence[Result]) -> Table:
    found = Table(title="Predicted / published; tokens/s of a GPU, in the last rows TFLOP/s of a GPU")
    headings = ("source", "model", "hardware", "batch x seq", "configuration", "published", "predicted", "ratio")
    for heading in (*headings, "MFU", "GiB"):
        found.add_column(heading, justify="left" if heading in ("source", "model", "configuration") else "right")
    for result in results:
        row, scale = result.row, 1e12 if result.row.is_in_flops else 1
        peak = result.prediction.memory.peak.total / GIB
        found.add_row(
            row.source,
            row.title,
            f"{row.gpus} {row.hardware.name}",
            f"{row.micro_batches} x {row.batch} x {row.seq}" if row.micro_batches > 1 else f"{row.batch} x {row.seq}",
            _configuration(row),
            f"{row.published / scale:,.0f}",
            f"{result.predicted / scale:,.0f}",
            f"{result.ratio:.3f}",
            _pair(result.utilisation, row.published_mfu, "{:.1%}"),
            _pair(peak, row.published_gib, "{:.1f}"),
        )
    return found


def _configuration(row: Row) -> str:
    parts = ["compiled" if row.is_compiled else "eager"]
    parts += [f"AC {row.checkpointing}"] if row.checkpointing != "none" else []
    parts += [f"tp {row.split}"] if row.split > 1 else []
    parts += ["zero2"] if row.strategy is ShardingStrategy.SHARD_GRAD_OP else []
    parts += ["bf16"] if row.weights is torch.bfloat16 else []
    parts += ["PURE"] if row.policy is BF16 else []
    return ", ".join(parts)


def _pair(predicted: float, published: float | None, form: str) -> str:
    return form.format(predicted) + (" / " + form.format(published) if published is not None else "")


def print_fit(
    ratios_of_row: Sequence[tuple[Row, list[float]]], efficiencies: Sequence[float], console: Console
) -> None:
    """The efficiency with the least squares of logarithms of ratios, for each type of GPU."""
    for gpu in ("a100", "h100"):
        rows = [ratios for row, ratios in ratios_of_row if row.is_fitted and row.hardware.name.startswith(gpu)]
        if rows:
            errors = [sum(math.log(ratio) ** 2 for ratio in at) for at in zip(*rows, strict=True)]
            best = min(range(len(errors)), key=errors.__getitem__)
            deviation = math.sqrt(errors[best] / len(rows))
            console.print(f"{gpu}: efficiency {efficiencies[best]:.2f}, root mean square of log ratios {deviation:.3f}")


def main(arguments: Sequence[str] | None = None, rows: Sequence[Row] = ROWS) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose source or model has this in it")
    parser.add_argument("--fit", action="store_true", help="find the efficiencies that fit best")
    options = parser.parse_args(arguments)
    console = Console(width=150, highlight=False)
    efficiencies = [percent / 100 for percent in range(50, 90)]
    results, ratios_of_row = [], []
    chosen = [row for row in rows if options.only in f"{row.source} {row.title}"]
    for _, alike in itertools.groupby(chosen, key=lambda row: row.traced):
        first, *others = alike
        with ranks_of(first) as (mesh, world_size):
            graphs = graphs_of(first, mesh, world_size)
            for row in (first, *others):
                result = result_of(row, graphs)
                results.append(result)
                print(f"{row.source}, {row.title}, {row.gpus} GPUs: {result.ratio:.3f}", file=sys.stderr, flush=True)
                if options.fit:
                    ratios_of_row.append((row, ratio_by_efficiency(result, efficiencies)))
    console.print(table(results))
    used = {result.row.hardware.name: result.row.hardware.efficiency for result in results}
    console.print("efficiency: " + ", ".join(f"{name} {value}" for name, value in used.items()))
    for source in dict.fromkeys(result.row.source for result in results):
        console.print(f"{source}: {SOURCES[source]}", markup=False)
    print_fit(ratios_of_row, efficiencies, console)


if __name__ == "__main__":
    main()
