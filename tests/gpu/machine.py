"""The machine that the suite runs on: its GPUs, or the one that is emulated, and what is installed."""

from __future__ import annotations

import ctypes
import dataclasses
import datetime
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
EMULATED = "h100"
_MOST_RANKS = 8


@dataclasses.dataclass(frozen=True)
class Machine:
    """`gpus`: their names; without any, `EMULATED` is emulated."""

    gpus: tuple[str, ...]

    @classmethod
    def at_hand(cls) -> Machine:
        num = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return cls(tuple(torch.cuda.get_device_name(index) for index in range(num)))

    @property
    def is_emulated(self) -> bool:
        return not self.gpus

    @property
    def has_nccl(self) -> bool:
        """Whether every rank has a GPU of its own, as NCCL asks."""
        return len(self.gpus) > 1

    @property
    def ranks(self) -> tuple[str, int]:
        """How ranks are joined, and how many there are."""
        if self.has_nccl:
            return "nccl", min(len(self.gpus), _MOST_RANKS)
        may_share = not self.is_emulated and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        return "nccl" if may_share else "gloo", 2

    @property
    def stand_in(self) -> str:
        """What takes the place of ranks with a GPU each."""
        if self.is_emulated:
            return f"the program of an emulated {EMULATED}, in Triton's interpreter, over gloo"
        if self.has_nccl:
            return ""
        return f"two ranks share the GPU{', over gloo instead of NCCL' if self.ranks[0] == 'gloo' else ''}"

    def facts(self) -> dict[str, str]:
        """What a reader of the report wants to know."""
        return {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "GPUs": ", ".join(self.gpus) or f"none: an {EMULATED} is emulated",
            "driver": _said(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) or "none",
            "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
            "NCCL": _nccl_version() if dist.is_nccl_available() else "none",
            "triton": _version("triton"),
            "fsdp_compile": f"{_version('fsdp-compile')}, commit {_said(['git', 'rev-parse', 'HEAD']) or 'unknown'}",
            "Python": platform.python_version(),
            "system": f"{platform.platform()}, {os.cpu_count()} cores",
        }


def _nccl_version() -> str:
    """The version of the library that is loaded, which need not be the one that torch was built with."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    except OSError:  # it is a part of torch
        return ".".join(map(str, torch.cuda.nccl.version()))
    return f"{version.value // 10000}.{version.value // 100 % 100}.{version.value % 100}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _said(command: Sequence[str]) -> str:
    """The first line that a command prints; "" if it cannot be run."""
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.partition("\n")[0].strip() if found.returncode == 0 else ""
