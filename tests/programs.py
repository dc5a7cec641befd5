"""Programs that tests run: each in a fork of a process that has imported what they import (`preloaded.py`).

One that is started by itself imports torch first, which takes longer than what most of them do.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import runpy
import shlex
import socket
import sys
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests import ranks

ROOT = Path(__file__).parents[1]
TIME_LIMIT = 600.0  # seconds


class Program:
    """Processes that run the same function and print to one file; what ends one with an error ends all.

    Args:
        environments: what each has in its environment besides.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        cwd: Path = ROOT,
        environments: Sequence[Mapping[str, str]] = ({},),
    ) -> None:
        self._output = Path(tempfile.mkdtemp(prefix="program-", dir=ranks.session_directory())) / "output"
        self._processes = [
            ranks.start_process(_run, {**os.environ, **each}, cwd, self._output, function, arguments)
            for each in environments
        ]

    @property
    def is_running(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def wait(self) -> str:
        """What all have printed; AssertionError if one fails."""
        running = {process.sentinel: process for process in self._processes}
        while running:
            ended = multiprocessing.connection.wait(list(running), TIME_LIMIT)
            codes = [running.pop(sentinel).exitcode for sentinel in ended]  # type: ignore[call-overload]
            if not ended or any(codes):
                self.kill()
                raise AssertionError(f"ended with {codes}, after it had printed:\n{self._output.read_text()}")
        return self._output.read_text()


def start(command: str, num_ranks: int | None = None, cwd: Path = ROOT) -> Program:
    """Start a script with its arguments: by itself, or on ranks, with what torchrun puts into their environment."""
    if num_ranks is None:
        return Program(run_script, shlex.split(command), cwd=cwd)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    shared |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    environments = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
    return Program(run_script, shlex.split(command), cwd=cwd, environments=environments)


def run(command: str, num_ranks: int | None = None) -> str:
    """What a script prints that is run from the root of the checkout."""
    return start(command, num_ranks).wait()


def run_script(command: Sequence[str]) -> None:
    """Run a script as `python` does."""
    sys.argv[:] = command
    sys.path.insert(0, str(Path(command[0]).resolve().parent))
    runpy.run_path(command[0], run_name="__main__")


def run_text(*parts: tuple[str, str]) -> None:
    """Run pieces of a program one after another, in one module; each is a name for its lines, and its text."""
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    for name, text in parts:
        exec(compile(text, name, "exec"), vars(main))


def _run(
    environment: Mapping[str, str], cwd: Path, output: Path, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    torch.seed()  # as every process begins with numbers of its own
    function(*arguments)
