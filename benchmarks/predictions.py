"""Predicted against measured steps of two ranks on two hosts, joined by a link of known rate: their times and peaks.

    sudo python benchmarks/predictions.py                       # needs Linux, root, and the commands ip and tc
    sudo python benchmarks/predictions.py --rates 2 --models gpt
    sudo python benchmarks/predictions.py --rates 2 --models gpt --plans planned --budgets 1 0.9 0.8 0.7 0.5
    sudo python benchmarks/predictions.py --rates 1 --models demo --plans "prefetch 1" --units build/units

The hosts are network namespaces of this machine (hosts.py). Every plan (prefetch distances, what is kept between
forward and backward, what is sharded at all, and what `hardware=` plans) is predicted and run; and plans for memory
budgets, each a part of the predicted peak of the last of the plans before. In every round the machine and the link are
calibrated and each plan takes a few steps: the speed of a machine changes, and many short turns let all plans see
the same of it. Times are of forward and backward: medians of all steps, and of the predictions by all calibrations.
Peaks are those of a rank's tensors meanwhile, Adam's states included. With --units, a last step of each plan is
recorded by torch.profiler, and compared unit by unit with its plan, in a table and a page.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile import ConfigError, fsdp_compile
from fsdp_compile.costs import Hardware, Prediction, predict
from fsdp_compile.costs.calibrate import calibrate

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from allocation import LIBRARY, Allocation, build
from harness import milliseconds
from hosts import environment, on_host, shape, two_hosts
from memory import Mlp

from train_gpt import GPT, GPTConfig

ROOT = Path(__file__).parents[1]
WARM_UP = 3
PLANS: dict[str, dict[str, Any]] = {
    "prefetch 1": {},
    "no prefetch": {"forward_prefetch": 0, "backward_prefetch": 0},
    "prefetch in the forward": {"backward_prefetch": 0},
    "kept for the backward": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "kept, no prefetch": {
        "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
        "forward_prefetch": 0,
        "backward_prefetch": 0,
    },
    "not sharded": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "not sharded, no overlap": {"sharding_strategy": ShardingStrategy.NO_SHARD, "backward_prefetch": 0},
}
PLANNED = "planned"


def gpt(dim: int = 512, layers: int = 6) -> tuple[nn.Module, Callable[[], tuple[Tensor, ...]]]:
    config = GPTConfig(seq=128, dim=dim, layers=layers)
    return GPT(config), lambda: (torch.randint(256, (8, 128)), torch.randint(256, (8, 128)))


def mlp() -> tuple[nn.Module, Callable[[], tuple[Tensor, ...]]]:
    return Mlp(dim=768, layers=6), lambda: (torch.randn(512, 768), torch.randn(512, 768))


MODELS = {"gpt": gpt, "mlp": mlp, "demo": partial(gpt, dim=256, layers=4)}  # demo is what `make demo` trains


# ----------------------------------------------------------------------------------------------------------
# One rank
# ----------------------------------------------------------------------------------------------------------


class Subject:
    """A model under one plan, its optimizer, and the seconds of its steps."""

    def __init__(self, name: str, plan: dict[str, Any], allocation: Allocation) -> None:
        gc.collect()
        torch.manual_seed(0)
        self.allocation = allocation
        before = allocation.live
        model, self.batch = MODELS[name]()
        self.model = fsdp_compile(model, **plan)
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.seconds: list[float] = []
        for _ in range(WARM_UP):
            _, peak = self.step()
        self.peak = peak - before

    def step(self) -> tuple[float, int]:
        """A step; seconds of forward and backward on the slower rank, and the peak of this rank meanwhile, in bytes."""
        inputs = self.batch()
        dist.barrier()
        self.allocation.reset()
        begin = time.perf_counter()
        self.model(*inputs).backward()
        elapsed, peak = torch.tensor(time.perf_counter() - begin), self.allocation.peak
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return elapsed.item(), peak

    def compare(self, hardware: Hardware, page: Path) -> str:
        """What each unit took in a step more, against its plan for this hardware."""
        inputs = self.batch()
        dist.barrier()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            self.model(*inputs).backward()
        self.optimizer.zero_grad()
        return str(self.model.explain(hardware, measured=profiler, html=page).comparison)

    def row(self, calibrations: list[Hardware]) -> dict[str, float]:
        """Medians, of steps and of predictions, the spread of what was measured, and bytes."""
        predicted = [predict(self.model.graphs[0], hardware) for hardware in calibrations]

        def median(value: Callable[[Prediction], float]) -> float:
            return statistics.median(map(value, predicted))

        deciles = statistics.quantiles(self.seconds, n=10)
        return {
            "measured": statistics.median(self.seconds),
            "p10": deciles[0],
            "p90": deciles[-1],
            "predicted": median(lambda found: found.timeline.seconds),
            "compute": median(lambda found: found.timeline.compute),
            "communication": median(lambda found: max(found.timeline.communication.values())),
            "exposed": median(lambda found: found.exposed),
            "measured peak": self.peak,
            "predicted peak": predicted[0].memory.peak.total,
        }


def run_rank(options: argparse.Namespace) -> None:
    """Measure and predict every plan; rank 0 writes what it found."""
    allocation = Allocation(torch.device("cpu"), Path(options.result).with_name(LIBRARY))
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # models of one class: all plans stay compiled
    dist.init_process_group("gloo")
    results = [row for model in options.models for row in rows_of(model, options, allocation)]
    if dist.get_rank() == 0:
        Path(options.result).write_text(json.dumps(results))
    dist.destroy_process_group()


def rows_of(model: str, options: argparse.Namespace, allocation: Allocation) -> list[dict[str, Any]]:
    """What each plan of a model took: the plans in turns, and a calibration before each round."""
    hardware = calibrate(allocation.device, ranks_per_node=1)
    subjects = {plan: Subject(model, schedule_of(plan, hardware), allocation) for plan in options.plans}
    refused = {}
    if options.budgets:
        peak = predict(subjects[options.plans[-1]].model.graphs[0], hardware).memory.peak.total
        for part in options.budgets:
            plan = f"{part:g} of {peak / 2**20:.0f} MiB"
            try:
                schedule = {"hardware": hardware, "memory_budget": int(part * peak)}
                subjects[plan] = Subject(model, schedule, allocation)
            except ConfigError as e:
                refused[plan] = str(e)
    calibrations = []
    for _ in range(options.rounds):
        calibrations.append(calibrate(allocation.device, ranks_per_node=1))
        for subject in subjects.values():
            subject.seconds += [subject.step()[0] for _ in range(options.steps)]
    found = [{"model": model, "plan": plan, **subject.row(calibrations)} for plan, subject in subjects.items()]
    if options.units is not None:
        for row, (plan, subject) in zip(found, subjects.items(), strict=True):
            page = options.units / f"{model}-{plan.replace(' ', '-')}-{dist.get_rank()}.html"
            row["units"] = subject.compare(calibrations[-1], page)
    return found + [{"model": model, "plan": plan, "refused": why} for plan, why in refused.items()]


def schedule_of(plan: str, hardware: Hardware) -> dict[str, Any]:
    """The options of a plan."""
    return {"hardware": hardware} if plan == PLANNED else {"hardware": False, **PLANS[plan]}


# ----------------------------------------------------------------------------------------------------------
# Two hosts
# ----------------------------------------------------------------------------------------------------------


def run_hosts(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """One rank on each host; what rank 0 found."""
    result = folder / "result.json"
    command = [sys.executable, __file__, "--result", str(result), "--steps", str(options.steps)]
    command += ["--rounds", str(options.rounds)]
    command += ["--models", *options.models, "--plans", *options.plans, "--budgets", *map(str, options.budgets)]
    if options.units is not None:
        options.units.mkdir(parents=True, exist_ok=True)
        command += ["--units", str(options.units.resolve())]
    processes = [subprocess.Popen(on_host(rank, command), env=environment(rank), cwd=ROOT) for rank in range(2)]
    if any(process.wait() for process in processes):
        raise SystemExit("a rank failed")
    return json.loads(result.read_text())


def rank_correlation(rows: list[dict[str, Any]]) -> float:
    """Spearman's, of predicted and measured seconds; plans with one prediction are the same graphs, and count once."""
    measured_of: dict[float, list[float]] = {}
    for row in rows:
        measured_of.setdefault(row["predicted"], []).append(row["measured"])

    def ranks(values: Iterable[float]) -> list[int]:
        found = list(values)
        return [sorted(found).index(value) for value in found]

    if len(measured_of) < 2:
        return math.nan
    return statistics.correlation(ranks(measured_of), ranks(map(statistics.mean, measured_of.values())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[1, 2, 4], help="Gbit/s; 0 is no limit")
    parser.add_argument("--models", nargs="+", default=["gpt", "mlp"], choices=list(MODELS))
    parser.add_argument("--plans", nargs="+", default=[*PLANS, PLANNED], choices=[*PLANS, PLANNED])
    parser.add_argument("--budgets", type=float, nargs="*", default=[], help="parts of a peak")
    parser.add_argument("--units", type=Path, help="compare units too, and write pages to this folder")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=2, help="of a plan in a round")
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.result:
        run_rank(options)
        return
    with two_hosts(), tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        for rate in options.rates:
            shape(rate)
            results = run_hosts(options, Path(folder))
            for model in options.models:
                show(f"{model} at {rate:g} Gbit/s", [row for row in results if row["model"] == model])


def cells(row: dict[str, Any]) -> dict[str, str]:
    return {
        "plan": row["plan"],
        **milliseconds({**row, "median": row["measured"]}, "measured ms"),
        "predicted ms": f"{1e3 * row['predicted']:.1f}",
        "ratio": f"{row['predicted'] / row['measured']:.3f}",
        **{name: f"{1e3 * row[name]:.1f}" for name in ("compute", "communication", "exposed")},
        **{f"{name} MiB": f"{row[name] / 2**20:.1f}" for name in ("measured peak", "predicted peak")},
        "ratio of peaks": f"{row['predicted peak'] / row['measured peak']:.3f}",
    }


def show(title: str, rows: list[dict[str, Any]]) -> None:
    found = [row for row in rows if "refused" not in row]
    refused = {row["plan"]: row["refused"] for row in rows if "refused" in row}
    title = f"{title}; rank correlation {rank_correlation(found):.3f}"
    harness.show(title, [cells(row) for row in found], refused)
    for row in found:
        if "units" in row:
            harness.CONSOLE.print(f"{row['plan']}:\n{row['units']}", markup=False, highlight=False)


if __name__ == "__main__":
    main()
