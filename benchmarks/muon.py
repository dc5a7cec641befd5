"""The time of torch.optim.Muon's step: unsharded in one process, on FSDP2's DTensors, and on ours, on two ranks.

    python benchmarks/muon.py
    python benchmarks/muon.py --layers 8 --dim 768 --world-size 2 --rounds 10

The matrices are those of a transformer: for each layer four of (dim, dim), one of (4 dim, dim) and one of (dim, 4 dim).
Each subject has processes of its own, with a thread each, and they take turns. "loopback MB" is what all ranks sent to
each other in a step.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import harness
import torch
import torch.distributed as dist
from harness import Reply, Team, Teams, milliseconds, on_this_machine, serve, spread
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_compile import shard

SUBJECTS = ["single", "fsdp2", "fsdp_compile"]


class Layers(nn.Module):
    """Never called: its gradients are random numbers."""

    def __init__(self, layers: int, dim: int) -> None:
        super().__init__()
        shapes = [(dim, dim)] * 4 + [(4 * dim, dim), (dim, 4 * dim)]
        self.layers = nn.ModuleList(
            nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes) for _ in range(layers)
        )


def sharded(subject: str, model: Layers) -> nn.Module:
    """A unit for each layer."""
    if subject == "single":
        return model
    if subject == "fsdp_compile":
        return shard(model, auto_wrap_policy=list(model.layers), sync_module_states=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def on_loopback() -> int:
    """Bytes that were sent on the loopback device, by all processes of this machine."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def answers(subject: str, layers: int, dim: int) -> Callable[[Reply], Reply]:
    torch.manual_seed(0)
    model = sharded(subject, Layers(layers, dim))
    parameters = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    for parameter in parameters:
        gradient = torch.randn(parameter.shape)
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = gradient
    optimizer = torch.optim.Muon(parameters, lr=1e-3)

    def step() -> float:
        if dist.is_initialized():
            dist.barrier()
        begin = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - begin

    def answer(request: Reply) -> Reply:
        first = step()
        before = on_loopback()
        seconds = [[step()] for _ in range(request["count"])]
        return {"first": first, "steps": seconds, "loopback": (on_loopback() - before) / request["count"]}

    return answer


def team(subject: str, folder: Path, options: argparse.Namespace) -> Team:
    size = 1 if subject == "single" else options.world_size
    command = [sys.executable, __file__, "--serve", subject, "--layers", str(options.layers), "--dim", str(options.dim)]
    return on_this_machine(command, size, folder / f"{subject}.log")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="of each subject in a round")
    parser.add_argument("--serve", choices=SUBJECTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        if options.serve != "single":
            dist.init_process_group("gloo")
        serve(answers(options.serve, options.layers, options.dim))
        os._exit(0)  # without waiting for a rank that has ended
    teams = Teams()
    with tempfile.TemporaryDirectory() as folder:
        try:
            for subject in SUBJECTS:
                teams.start(subject, team(subject, Path(folder), options), {"count": 1})
            replies = teams.take_turns(options.rounds, {"count": options.steps})
        finally:
            teams.stop()
    found = {subject: spread(harness.seconds_of(rounds, 0)) for subject, rounds in replies.items()}
    sent = {subject: max(ranks[0]["loopback"] for ranks in rounds) for subject, rounds in replies.items()}
    rows = [
        {
            "subject": subject,
            **milliseconds(seconds, "step ms"),
            **{
                f"/{other}": f"{seconds['median'] / found[other]['median']:.2f}" for other in SUBJECTS if other in found
            },
            "loopback MB": f"{sent[subject] / 1e6:.1f}",
        }
        for subject, seconds in found.items()
    ]
    title = f"a step of Muon, {options.layers} layers of {options.dim}, {options.world_size} ranks"
    harness.show(title, rows, teams.failures)


if __name__ == "__main__":
    main()
