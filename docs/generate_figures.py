"""Draw the figures of docs/tutorial.md from rewritten graphs: python docs/generate_figures.py."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch.distributed.fsdp import ShardingStrategy

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "figures"
sys.path.insert(0, str(ROOT / "benchmarks"))

from workloads import conv  # noqa: E402

from fsdp_compile import rewrite  # noqa: E402
from fsdp_compile.costs import Hardware, Link, Prediction, predict  # noqa: E402
from fsdp_compile.costs.memory import CATEGORIES  # noqa: E402
from fsdp_compile.passes import ops  # noqa: E402
from fsdp_compile.report import Schedule  # noqa: E402

RANKS, ROWS = 3, 128
HOSTS = Hardware(
    name="three small hosts",
    flops={"float32": 50e9},
    efficiency=1.0,
    memory_bandwidth=1e10,
    memory=8 << 30,
    ranks_per_node=1,
    within_node=Link(1e15, 0.0),
    between_nodes=Link(125e6, 5e-5),
    host_bandwidth=1e15,
    collective_start=2e-4,
    kernel_start=5e-6,
    contention=1.2,
)
UNIT_COLOURS = {"model.stages.0": "#8fb8de", "model.stages.1": "#f2b880", "model.stages.2": "#9ccfa0"}
KIND_COLOURS = {"gather": "#4c8bd6", "reduce": "#e0893a", "wait": "#d64550"}
CATEGORY_COLOURS = dict(
    zip(
        CATEGORIES,
        ("#4d6a8a", "#7a8fa8", "#c98f3f", "#4c8bd6", "#e0893a", "#5aa469", "#a3c585", "#b3b9c0"),
        strict=True,
    )
)
KILOBYTE, MILLISECOND = 1e3, 1e-3


def prediction_of(strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD) -> Prediction:
    workload = conv(ROWS)
    graphs = rewrite(workload.build(), *workload.inputs(), world_size=RANKS, sharding_strategy=strategy)
    return predict(graphs, HOSTS)


# ----------------------------------------------------------------------------------------------------------
# The figures
# ----------------------------------------------------------------------------------------------------------


def holdings() -> Figure:
    """Units by ranks: what each rank holds between steps."""
    figure = Figure(figsize=(8, 3.2))
    axes = figure.subplots()
    gathers = [node for node in prediction_of().work.forward.graph.nodes if ops.is_all_gather(node)]
    for row, gather in enumerate(gathers):
        bucket, (shard,) = ops.argument(gather, "bucket"), ops.gathered_shards(gather).values()
        kilobytes = shard.meta["val"].nbytes / KILOBYTE
        for rank in range(RANKS):
            axes.barh(-row, 0.9, left=rank, height=0.8, color="#eceff2")
            axes.barh(-row, 0.9 / RANKS, left=rank + 0.9 * rank / RANKS, height=0.8, color=UNIT_COLOURS[bucket])
            text = f"{kilobytes:.0f} kB parameters\n{kilobytes:.0f} kB gradients\n{2 * kilobytes:.0f} kB Adam"
            axes.text(rank + 0.45, -row, text, ha="center", va="center", fontsize=7)
    axes.set_yticks([-row for row in range(len(gathers))], [ops.argument(gather, "bucket") for gather in gathers])
    axes.set_xticks([rank + 0.45 for rank in range(RANKS)], [f"rank {rank}" for rank in range(RANKS)])
    _bare(axes)
    figure.subplots_adjust(left=0.2)
    return figure


def schedule() -> Figure:
    """Lanes and memory of a step, forward and backward."""
    found = Schedule.of(prediction_of())
    figure = Figure(figsize=(10, 5))
    lanes, memory = figure.subplots(2, sharex=True, height_ratios=(1, 1.3))
    _draw_lanes(lanes, found)
    times = [seconds / MILLISECOND for seconds, _ in found.memory] + [found.seconds / MILLISECOND]
    held = [
        [bytes_of / KILOBYTE for bytes_of in column] for column in zip(*(each for _, each in found.memory), strict=True)
    ]
    memory.stackplot(
        times,
        [[*column, column[-1]] for column in held],
        step="post",
        labels=CATEGORIES,
        colors=list(CATEGORY_COLOURS.values()),
    )
    memory.set_xlabel("ms")
    memory.set_ylabel("kB of a rank")
    memory.legend(fontsize=7, loc="upper right", ncols=2)
    return figure


def _draw_lanes(axes: Axes, found: Schedule) -> None:
    for block in found.blocks:
        if not block.seconds:
            continue
        lane = 0 if block.lane == "compute" else -1
        colour = KIND_COLOURS.get(block.kind) or UNIT_COLOURS.get(block.unit, "#cccccc")
        axes.barh(lane, block.seconds / MILLISECOND, left=block.start / MILLISECOND, height=0.8, color=colour)
        if block.kind in ("gather", "reduce") and block.seconds > 0.03 * found.seconds:
            middle = (block.start + block.end) / 2 / MILLISECOND
            axes.text(middle, lane, f"{block.kind}\n{block.unit[-1]}", ha="center", va="center", fontsize=6)
    begin = min(block.start for block in found.blocks if block.side == "backward" and block.lane == "compute")
    axes.axvline(begin / MILLISECOND, color="black", linewidth=0.8)
    axes.text(0, 0.55, "forward", fontsize=8)
    axes.text(begin / MILLISECOND, 0.55, " backward", fontsize=8)
    axes.set_yticks([0, -1], ["compute", "network"])
    _bare(axes)


def compared() -> Figure:
    """A naive pipeline, DDP and FSDP: time of a step, and bytes of a rank."""
    data, sharded = prediction_of(ShardingStrategy.NO_SHARD), prediction_of()
    compute = data.timeline.compute
    states = {name: data.memory.peak.held[name] / RANKS for name in ("shards", "optimizer", "gradients")}
    kept = data.memory.peak.held["activations"] + data.memory.peak.held["temporaries"]
    figure = Figure(figsize=(9, 3))
    time, memory = figure.subplots(1, 2)
    rows = {
        "naive pipeline": (compute, (RANKS - 1) * compute, sum(states.values()) + kept),
        "DDP": (compute, data.timeline.seconds - compute, data.memory.peak.total),
        "FSDP": (compute, sharded.timeline.seconds - compute, sharded.memory.peak.total),
    }
    for row, (busy, idle, peak) in enumerate(rows.values()):
        time.barh(-row, busy / MILLISECOND, color="#9ccfa0", label="computes" if row == 0 else None)
        time.barh(
            -row, idle / MILLISECOND, left=busy / MILLISECOND, color="#d64550", label="waits" if row == 0 else None
        )
        memory.barh(-row, peak / KILOBYTE, color="#7a8fa8")
        memory.text(peak / KILOBYTE, -row, f" {peak / KILOBYTE:,.0f}", va="center", fontsize=7)
    for axes, title in ((time, "ms of a step"), (memory, "kB of a rank, at most")):
        axes.set_yticks([-row for row in range(len(rows))], list(rows))
        axes.set_xlabel(title)
        _bare(axes)
    time.legend(fontsize=7)
    memory.margins(x=0.2)
    figure.subplots_adjust(wspace=0.4, bottom=0.2)
    return figure


def _bare(axes: Axes) -> None:
    axes.tick_params(length=0)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)


FIGURES: dict[str, Callable[[], Figure]] = {"holdings": holdings, "schedule": schedule, "compared": compared}


def render(name: str) -> str:
    """A figure as SVG, the same at every call."""
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "font.family": "sans-serif"}):
        buffer = io.StringIO()
        FIGURES[name]().savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


if __name__ == "__main__":
    TARGET.mkdir(exist_ok=True)
    for each in FIGURES:
        (TARGET / f"{each}.svg").write_text(render(each))
