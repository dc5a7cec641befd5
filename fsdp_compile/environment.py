"""The environment: what its variables say. Nothing else but the command line reads them."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from .errors import ConfigError


def poisons() -> bool:
    """Whether freed buffers are filled with NaN, a debug mode: FSDP_COMPILE_POISON=1 in the environment."""
    value = os.environ.get("FSDP_COMPILE_POISON", "0")
    if value not in ("0", "1"):
        raise ConfigError(f"FSDP_COMPILE_POISON is 0 or 1, not {value!r}")
    return value == "1"


def hardware_by_environment() -> str | None:
    """What the hardware at hand is taken for, FSDP_COMPILE_HARDWARE: a name or a file; "0" plans for none."""
    return os.environ.get("FSDP_COMPILE_HARDWARE") or None


def is_full_in_evaluation() -> bool:
    """Whether FSDP1's mixed precision is for training only: FSDP_USE_FULL_PREC_IN_EVAL=1, torch's own variable."""
    return os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL", "") == "1"


def is_first_rank() -> bool:
    """Whether this process is the one that speaks for all, also before there is a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def local_world_size() -> int | None:
    """How many ranks torchrun has started on this host, if it has."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if "LOCAL_WORLD_SIZE" in os.environ else None


def user_cache() -> Path:
    """Where this user's caches of ours are: below XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fsdp_compile"


def initialise_from_environment(device: torch.device) -> None:
    """Initialise the default process group if torchrun started several ranks and nobody has."""
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        on_cuda = device.type == "cuda" or (device.type == "meta" and torch.cuda.is_available())
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo")  # shards may be offloaded
