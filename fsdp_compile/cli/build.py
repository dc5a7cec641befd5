"""`fsdp-compile build` and `emulate`: the program that a GPU would run, compiled without one, in a process of its own.

torch looks for CUDA once, while it is imported, and here it is. In that process `build` is `emulation/command.py`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from .names import HARDWARE

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
    build.add_argument("--offload", action="store_true", help="keep shards on the CPU, in pinned memory")
    build.add_argument("--hardware", default="h100", choices=HARDWARE, help="(default: h100)")
    build.add_argument("--out", default="build/gpu", metavar="DIRECTORY", help="(default: build/gpu)")
    build.set_defaults(run=_build)


def add_emulate(commands: Any) -> None:
    emulate = commands.add_parser(
        "emulate",
        help="run a script in a process that emulates a GPU, for rewrite(device='cuda')",
        description="Runs a script where torch finds a GPU that computes nothing: fake tensors on it are traced and "
        "compiled as on a real one. Needs what build needs.",
        epilog="example: fsdp-compile emulate --hardware h100 look.py",
    )
    emulate.add_argument("--hardware", default="h100", choices=HARDWARE, help="(default: h100)")
    emulate.add_argument("script", metavar="SCRIPT")
    emulate.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="what the script is given")
    emulate.set_defaults(run=_emulate)


def _build(options: argparse.Namespace) -> None:
    _launch(options.hardware, "fsdp_compile.emulation.command", "build", options.model, *_given(options))


def _emulate(options: argparse.Namespace) -> None:
    from ..errors import ConfigError

    if not options.script.endswith(".py") or not Path(options.script).is_file():
        raise ConfigError(f"there is no script {options.script!r}: a file that ends in .py")
    _launch(options.hardware, options.script, *options.arguments)


def _launch(gpu: str, *command: str) -> None:
    sys.exit(subprocess.call([sys.executable, "-P", str(_LAUNCH), gpu, *command]))


def _given(options: argparse.Namespace) -> list[str]:
    left_out = {"run", "debug", "model"}
    given = {f"--{name.replace('_', '-')}": value for name, value in vars(options).items() if name not in left_out}
    flags = [name for name, value in given.items() if value is True]
    return flags + [f"{name}={value}" for name, value in given.items() if not isinstance(value, bool | None)]
