"""The program of a GPU, without one: fake CUDA tensors for tracing, and a described GPU for Inductor and Triton.

A process that emulates does nothing else: `command` starts one. Nothing outside this room imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path


def command(gpu: str, module: str, arguments: Sequence[str] = (), *, runs: bool = False) -> list[str]:
    """The command line that runs a Python module as on a machine with this GPU, one of `gpus.GPUS`.

    With `runs`, what Inductor generates for the GPU runs, on the CPU's memory (run.py); otherwise it can only be built.
    """
    launch = str(Path(__file__).with_name("launch.py"))
    return [sys.executable, "-P", launch, *(["--run"] if runs else []), gpu, module, *arguments]
