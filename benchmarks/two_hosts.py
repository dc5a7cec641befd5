"""Steps of two hosts, joined by a link of known rate: fsdp_compile and its peers, side by side.

    sudo python benchmarks/two_hosts.py                           # needs Linux, root, and the commands ip and tc
    sudo python benchmarks/two_hosts.py --rates 2 --models gpt --subjects fsdp2 simple-overlap fsdp_compile
    sudo python benchmarks/two_hosts.py --ranks-per-host 2 --subjects fsdp2 fsdp2-compiled fsdp_compile

Each subject is a process on each of two network namespaces (hosts.py), with a core each; the processes stay alive (some
1.3 GB each for the GPT), and the subjects take turns. A single device computes on both cores at once too, and sends
nothing. Two ranks of a host split the model by tensor parallelism, share its core, and reach each other without the
link. All train on the same batch, so that all losses must be equal. Times are of the slower rank: forward and backward
(fb), the whole step with AdamW (step); cpu is the time of all threads of a rank. Rounds begin with a step that is not
counted; the others follow each other as in a training, without barriers.

The bound is the larger of the compiled single device's forward and backward, and the bytes that full sharding needs
(two gathers and a reduction of all parameters) at the link's rate. The host's bound adds to the compute the processor
time that the same collectives take alone ("messages"), for on the CPU the same cores send. Memory is that of tensors
(allocation.py): between steps, and at most. The first step includes sharding and compilation, with nothing cached; what
measures the link starts anew for every rate, and keeps what the first start took.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness
from allocation import LIBRARY, build
from harness import BACKWARD, FORWARD, OPTIMIZER, RANK, Reply, Team, Teams, milliseconds, seconds_of, spread
from hosts import environment, on_host, shape, two_hosts
from subjects import NARROWER, REPLICAS, SUBJECTS

MODELS = ["gpt", "gpt-autocast", "mlp", "conv", "conv-large"]
SPLIT = ["llama-split"]
_ASKED_FOR = {f"fsdp_compile-{name}" for name in ("packed", "grouped", "kept", *REPLICAS, *NARROWER)} | {
    "fsdp1-kept",
    "fsdp2-kept",
}
DEFAULT = [name for name in SUBJECTS if name not in _ASKED_FOR]


def start(teams: Teams, started: dict[str, Reply], model: str, options: argparse.Namespace, folder: Path) -> None:
    """Start the subjects that do not run; and again those that measure the link, at its present rate."""
    for number, name in enumerate(options.subjects):
        subject = SUBJECTS[name]
        depends_on_rate = subject.is_calibrated or subject.measures
        if (name in teams.running or name in teams.failures) and not depends_on_rate:
            continue
        peak = started["fsdp2"]["peak"] if "fsdp2" in started else None
        if subject.budget is not None and peak is None:
            teams.failures[name] = "its budget is a part of fsdp2's peak, and that is not measured"
            continue
        split = options.ranks_per_host
        request = {"subject": name, "workload": model, "arguments": {}, "memory_budget": peak, "split": split}
        request["micro_batches"] = options.micro_batches
        replies = teams.start(name, team(f"{model}-{name}", 29510 + number, folder, split), request)
        if replies is not None:
            first = started.get(name, replies[0])["first"]
            started[name] = {**replies[0], "first": first, "peak": max(reply["peak"] for reply in replies)}


def team(name: str, port: int, folder: Path, ranks_per_host: int) -> Team:
    command = [sys.executable, str(RANK), "--library", str(folder / LIBRARY)]
    commands = []
    for rank in range(2 * ranks_per_host):
        cache = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / name / str(rank))}
        setting = environment(rank, port, 2 * ranks_per_host) | cache
        commands.append((on_host(rank // ranks_per_host, command), setting))
    return Team(commands, folder / f"{name}.log")


def summarize(replies: list[list[Reply]], started: Reply) -> dict[str, Any]:
    """Of all rounds: steps of the slower rank; bytes, and processor time, of the rank with more."""
    every = [reply for ranks in replies for reply in ranks]
    return {
        "forward_backward": spread(seconds_of(replies, FORWARD, BACKWARD)),
        "step": spread(seconds_of(replies, FORWARD, BACKWARD, OPTIMIZER)),
        **{name: max(reply[name] for reply in every) for name in ("sent", "state", "peak")},
        "cpu": spread([max(reply["cpu"] for reply in ranks) for ranks in replies])["median"],
        **{name: started[name] for name in ("first", "loss", "parameters")},
    }


def with_ratios(found: dict[str, dict[str, Any]], rate: float) -> None:
    """Add to every subject how it compares with FSDP2 and with the bound, where those are known."""
    bound = None
    if "single-compiled" in found:
        compute = found["single-compiled"]["forward_backward"]["median"]
        needed = 1.5 * found["single-compiled"]["parameters"]  # a half of all for each of three, by a rank of two
        bound = max(compute, needed / (rate * 1e9 / 8) if rate else 0.0)
    sending = found.get("messages", {}).get("cpu")
    hosts_bound = max(compute + sending, bound) if bound and sending else None
    for row in found.values():
        seconds = row["forward_backward"]["median"]
        row["of_bound"] = seconds / bound if bound else None
        row["of_hosts_bound"] = seconds / hosts_bound if hosts_bound else None
        if "fsdp2" in found:
            row["of_fsdp2"] = seconds / found["fsdp2"]["forward_backward"]["median"]
            row["step_of_fsdp2"] = row["step"]["median"] / found["fsdp2"]["step"]["median"]


def cells(name: str, row: dict[str, Any]) -> dict[str, str]:
    def ratio(key: str) -> str:
        return f"{row[key]:.3f}" if row.get(key) else "-"

    return {
        "subject": name,
        **milliseconds(row["forward_backward"], "fb ms"),
        "fb/FSDP2": ratio("of_fsdp2"),
        "fb/bound": ratio("of_bound"),
        "fb/host's": ratio("of_hosts_bound"),
        **milliseconds(row["step"], "step ms"),
        "step/FSDP2": ratio("step_of_fsdp2"),
        "cpu ms": f"{1e3 * row['cpu']:.0f}",
        **{f"{key} MB": f"{row[key] / 1e6:.1f}" for key in ("sent", "state", "peak")},
        "first s": f"{row['first']:.1f}",
    }


def measure(model: str, options: argparse.Namespace, folder: Path) -> None:
    """Print the table of every rate."""
    teams, started = Teams(), {}
    try:
        for rate in options.rates:
            shape(rate)
            start(teams, started, model, options, folder)
            replies = teams.take_turns(options.rounds, {"count": options.steps})
            found = {name: summarize(replies[name], started[name]) for name in options.subjects if name in replies}
            with_ratios(found, rate)
            title = f"{model}, {f'{rate:g} Gbit/s' if rate else 'no limit'}, {options.rounds} rounds"
            harness.show(title, [cells(name, row) for name, row in found.items()], teams.failures)
            check_losses(found)
    finally:
        teams.stop()


def check_losses(found: dict[str, dict[str, Any]]) -> None:
    losses = {name: row["loss"] for name, row in found.items() if SUBJECTS[name].computes}
    expected = next(iter(losses.values()), math.nan)
    for name, loss in losses.items():
        if not math.isclose(loss, expected, rel_tol=1e-3):
            harness.CONSOLE.print(f"[red]{name} computes something else[/red]: a loss of {loss}, not {expected}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[1, 2, 4, 0], help="Gbit/s; 0 is no limit")
    parser.add_argument("--models", nargs="+", choices=MODELS + SPLIT, help="(default: all for as many ranks)")
    parser.add_argument(
        "--ranks-per-host", type=int, default=1, choices=[1, 2], help="two split the model, and share a core"
    )
    parser.add_argument("--subjects", nargs="+", default=DEFAULT, choices=list(SUBJECTS))
    parser.add_argument("--micro-batches", type=int, default=1, help="of a step; all but the last keep gradients")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="of each subject in a round")
    options = parser.parse_args()
    options.models = options.models or (MODELS if options.ranks_per_host == 1 else SPLIT)
    if options.ranks_per_host > 1 and set(options.models) - set(SPLIT):
        parser.error(f"only {', '.join(SPLIT)} can be split")
    options.subjects = [name for name in SUBJECTS if name in options.subjects]  # fsdp2 before what needs its peak
    with tempfile.TemporaryDirectory() as folder, two_hosts():
        build(Path(folder))
        for model in options.models:
            measure(model, options, Path(folder))


if __name__ == "__main__":
    main()
