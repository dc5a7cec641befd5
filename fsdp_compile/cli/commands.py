"""What `fsdp-compile report`, `calibrate` and `doctor` do."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape

from ..costs.at_hand import keep
from ..costs.calibrate import calibrate
from ..environment import initialise_from_environment
from ..errors import ConfigError
from ..report import Schedule, page, trace
from .doctor import examine


def report(options: argparse.Namespace) -> None:
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


def diagnose(options: argparse.Namespace) -> None:
    console, is_well = Console(), True
    for finding in examine():  # which takes a while: what is found is said at once
        verdict = "ok" if finding.is_well else "[bold red]wrong[/]"
        console.print(escape(f"{finding.what}: {finding.found}"), verdict, soft_wrap=True)
        is_well &= finding.is_well
    if not is_well:
        sys.exit(1)


def measure(options: argparse.Namespace) -> None:
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no GPU that torch can use")
    if device.type == "cuda" and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    initialise_from_environment(device)
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    hardware = calibrate(device, name=Path(options.out).stem, ranks_per_node=ranks_per_node)
    keep(device, hardware)
    if not dist.is_initialized() or dist.get_rank() == 0:
        Path(options.out).write_text(hardware.to_json() + "\n")
        print(hardware.to_json())
        print(f"written to {options.out}, digest {hardware.digest}")
    if dist.is_initialized():
        dist.destroy_process_group()
