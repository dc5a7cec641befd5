"""`fsdp-compile build`: the program that a GPU would run, compiled without one, in a process of its own.

That process is `emulation/command.py`: torch looks for CUDA once, while it is imported, and here it is.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..costs.hardware import HARDWARE

_LAUNCH = Path(__file__).parents[1] / "emulation/launch.py"
DTYPES = ("float32", "bfloat16", "float16")


def add_build(commands: Any) -> None:
    build = commands.add_parser(
        "build",
        help="compile the program of a GPU, without one, and look at its kernels",
        description="Traces a model with fake CUDA tensors, rewrites its training step, and has Inductor and Triton "
        "compile forward and backward for a GPU that is not there. Needs the CPU build of torch, Triton (extra gpu) "
        "and a C++ compiler.",
        epilog="example: fsdp-compile build examples/llama.py:llama3_8b --gpus 64 --hardware h100 --out build/h100",
    )
    build.add_argument("model", metavar="FILE:FUNCTION", help="a function without arguments that returns the model")
    build.add_argument(
        "--inputs",
        default="inputs",
        metavar="FUNCTION",
        help="of the same file: (batch, seq) to the arguments of the model (default: inputs)",
    )
    build.add_argument("--gpus", type=int, default=8, metavar="N", help="ranks (default: 8)")
    build.add_argument("--batch", type=int, default=1, metavar="N", help="rows of a rank (default: 1)")
    build.add_argument("--seq", type=int, default=2048, metavar="N", help="tokens of a row (default: 2048)")
    build.add_argument("--strategy", default="FULL_SHARD", choices=["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
    build.add_argument("--lowering", default="grouped", choices=["grouped", "packed"], help="(default: grouped)")
    build.add_argument("--param-dtype", choices=DTYPES, help="what parameters are gathered in (default: their own)")
    build.add_argument("--reduce-dtype", choices=DTYPES, help="what gradients are reduced in (default: as gathered)")
    build.add_argument("--hardware", default="h100", choices=list(HARDWARE), help="(default: h100)")
    build.add_argument("--out", default="build/gpu", metavar="DIRECTORY", help="(default: build/gpu)")
    build.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in _given(options).items()]
    command = [sys.executable, "-P", str(_LAUNCH), options.hardware, "fsdp_compile.emulation.command"]
    sys.exit(subprocess.call([*command, "build", options.model, *arguments]))


def _given(options: argparse.Namespace) -> dict[str, Any]:
    left_out = {"run", "debug", "model"}
    return {name: value for name, value in vars(options).items() if name not in left_out and value is not None}
