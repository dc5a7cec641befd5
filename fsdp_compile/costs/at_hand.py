"""The hardware at hand: what the ranks run on, by its name or as it was measured.

A GPU that is described is known by its name. Other machines are measured by all ranks, once: the profile is kept in the
user's cache, by processor, number of ranks and versions. What joins several hosts is measured at each start, since the
same machines may be joined by another network the next time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..cache import keep_text, kept_text, path_of
from ..environment import hardware_by_environment, is_first_rank
from ..errors import ConfigError
from ..runtime.agreement import agreement_of
from ..runtime.comparison import Line
from ..runtime.inductor import generator_digest
from ..runtime.ranks import all_ranks
from .calibrate import calibrate, calibrate_network
from .hardware import Hardware, find_hardware, hardware_of_gpu

_known: dict[tuple[tuple[int, ...], Path], Hardware] = {}
"""Of this process: what the ranks run on, by the ranks that have asked, and where the profile is kept."""


def hardware_at_hand(device: torch.device, mesh: DeviceMesh | None, ranks_per_node: int | None) -> Hardware | None:
    """What the ranks of the mesh (None: this one) run on; None where that is not known. Every one of them calls this.

    Some of the ranks alone cannot measure it, and nobody can whose process group does not communicate. A name or a file
    in FSDP_COMPILE_HARDWARE is taken for it, without a look.

    Args:
        device: what the forward runs on.
        ranks_per_node: None where nobody has said so; then each rank counts as a host of its own.

    Raises:
        ConfigError: there is no such hardware as the environment names.
    """
    named = hardware_by_environment()
    if named not in (None, "0"):
        return find_hardware(named)
    found, agreement = hardware_of_gpu() if device.type == "cuda" else None, agreement_of(mesh)
    if found is not None or (mesh is not None and agreement is None):
        return found
    ranks_per_node = ranks_per_node or 1
    file = _file_for(device, ranks_per_node)
    ranks = () if mesh is None else all_ranks(mesh)
    known = ranks, path_of(file)
    if known not in _known:
        statement = [Line("options: planning for the hardware at hand")]
        kept = _kept(file) if agreement is None else agreement.decided_by_first(statement, lambda: _kept(file))
        hardware = Hardware.from_json(kept) if kept else None
        if max(1, len(ranks)) < _world_size():
            return hardware
        _known[known] = _measured(device, ranks_per_node, hardware)
    return _known[known]


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _measured(device: torch.device, ranks_per_node: int, kept: Hardware | None) -> Hardware:
    """The profile as it was kept, or else as all ranks measure it; then it is kept."""
    if kept is None:
        hardware = calibrate(device, name=_name(device), ranks_per_node=ranks_per_node)
    elif _world_size() > ranks_per_node:
        hardware = calibrate_network(device, kept)
    else:
        hardware = kept
    if hardware is not kept:
        keep(device, hardware)
    return hardware


def keep(device: torch.device, hardware: Hardware) -> None:
    """Keep the profile of these ranks for `hardware_at_hand`, if this is the first of them."""
    if is_first_rank():
        keep_text(_file_for(device, hardware.ranks_per_node), hardware.to_json() + "\n")


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()


def _processor() -> str:
    """As it calls itself, where the system says so."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _description(device: torch.device, ranks_per_node: int) -> dict[str, Any]:
    """What a profile depends on."""
    return {
        "device": _name(device),
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "ranks": _world_size(),
        "ranks_per_node": ranks_per_node,
        "backend": dist.get_backend() if dist.is_initialized() else "",
        "torch": torch.__version__,
        "fsdp_compile": generator_digest().hex(),
    }


def _file_for(device: torch.device, ranks_per_node: int) -> str:
    """The name of the file that the profile is kept in."""
    described = json.dumps(_description(device, ranks_per_node), sort_keys=True)
    return f"hardware-{hashlib.sha256(described.encode()).hexdigest()[:16]}.json"


def _kept(file: str) -> str:
    """The profile that was kept, as JSON; nothing if there is none that can be read."""
    try:
        return Hardware.from_json(kept_text(file) or "").to_json()
    except ConfigError:
        return ""
