"""The doctor: what is installed, and whether a small model trains on two ranks of this machine as it does on one."""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from multiprocessing import util
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from ..api import fsdp_compile

_RANKS = 2
_STEPS = 3
_DIM = 8


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the diagnosis."""

    what: str
    found: str
    is_well: bool = True


def examine() -> Iterator[Finding]:
    """What is installed, then a training with every backend that can run."""
    yield Finding("fsdp_compile", _version())
    yield Finding("Python", platform.python_version())
    yield Finding("torch", torch.__version__)
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    yield Finding("GPUs", ", ".join(names) or "none")
    found = [name for name in ("gloo", "nccl") if dist.is_backend_available(name)]
    yield Finding("collectives", ", ".join(found) or "none", bool(found))
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    yield Finding(
        "C++ compiler, for Inductor", compiler or "none: use backend='aot_eager', or install one", bool(compiler)
    )
    yield from _trained(("aot_eager", "inductor") if compiler else ("aot_eager",))


def _version() -> str:
    try:
        return metadata.version("fsdp-compile")
    except metadata.PackageNotFoundError:
        return "a checkout that is not installed (torch.compile(backend='fsdp') is found once it is)"


def _trained(backends: Sequence[str]) -> Iterator[Finding]:
    """A training with each, by the same processes, up to the first that fails: to start them takes seconds."""
    with tempfile.TemporaryDirectory() as folder:
        error: Exception | None = None
        try:
            spawn(_rank, (backends, folder), _RANKS)
        except Exception as e:
            error = e
        for backend in backends:
            what, seconds = f"{_RANKS} ranks with {backend}", Path(folder) / backend
            if not seconds.exists():
                yield Finding(what, f"{type(error).__name__}: {error}", is_well=False)
                return
            yield Finding(what, f"{_STEPS} steps as with one, in {seconds.read_text()} s")


def _rank(rank: int, backends: Sequence[str], folder: str) -> None:
    """Train on the CPU with each; what succeeds leaves a file with the seconds that it took."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=_RANKS)
    for backend in backends:
        begin = time.perf_counter()
        _train(rank, backend)
        dist.barrier()  # the other rank may still be reading, or find a difference
        if rank == 0:
            (Path(folder) / backend).write_text(f"{time.perf_counter() - begin:.1f}")
    util._run_finalizers(0)  # type: ignore[attr-defined]  # gives semaphores back, as tqdm's; Python's end would do it
    # DTensor's caches hold the process group, so destroying it joins none of gloo's threads. One of them that drops a
    # tensor while Python ends aborts the process ("terminate called without an active exception"): Python does not end.
    os._exit(0)


def _train(rank: int, backend: str) -> None:
    """Next to the same model unsharded on the whole batch; raises if they differ."""
    expected, model = _model(), fsdp_compile(_model(), backend=backend)
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (expected, model)]
    for step in range(_STEPS):
        torch.manual_seed(step)
        batch = torch.randn(_RANKS, 4, _DIM)
        _loss(expected, batch.flatten(0, 1)).backward()
        _loss(model, batch[rank]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for wanted, found in zip(expected.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.full_tensor(), wanted)  # type: ignore[attr-defined]  # a DTensor


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(_DIM, 4 * _DIM), nn.GELU(), nn.Linear(4 * _DIM, _DIM))


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = (model(x) - x).square().mean()
    return loss
