"""The program of a GPU, without one: fake CUDA tensors for tracing, and a described GPU for Inductor and Triton.

A process that emulates does nothing else: `command` starts one. Nothing outside this room imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path


def command(gpu: str, module: str, arguments: Sequence[str] = ()) -> list[str]:
    """The command line that runs a Python module as on a machine with this GPU, one of `gpus.GPUS`."""
    return [sys.executable, "-P", str(Path(__file__).with_name("launch.py")), gpu, module, *arguments]
