"""What tests of frameworks share: a process as torchrun starts it, and accelerate's view of it begun anew."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from unittest import mock

import torch.distributed as dist
from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState
from torch.utils.data import Dataset

from tests.test_transformers import VOCABULARY, llama, rows_of

__all__ = ["VOCABULARY", "Rows", "as_launched", "fsdp_on_cpu", "llama"]


@contextlib.contextmanager
def as_launched() -> Iterator[None]:
    """Inside, accelerate finds what torchrun sets, and nothing of an earlier test."""
    values = {"ACCELERATE_USE_CPU": "true"}
    if dist.is_initialized():
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        values |= {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
        values |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    with mock.patch.dict(os.environ, values):
        _forget()
        try:
            yield
        finally:
            _forget()


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in ("ACCELERATE_USE_FSDP", "FSDP_VERSION", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        os.environ.pop(name, None)


@contextlib.contextmanager
def fsdp_on_cpu() -> Iterator[None]:
    """A fake: accelerate takes its plugin for FSDP on GPUs only, and here its state says what it would say on one.

    Everything that follows from that, in accelerate and in transformers, is theirs.
    """
    original = AcceleratorState.__init__

    def init(state: AcceleratorState, *args: object, fsdp_plugin: object = None, **kwargs: object) -> None:
        is_first = AcceleratorState._shared_state == {}
        original(state, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if is_first and fsdp_plugin is not None:
            if state._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(state._mixed_precision)
            state.fsdp_plugin = fsdp_plugin
            state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    with mock.patch.object(AcceleratorState, "__init__", init):
        yield


class Rows(Dataset):
    """Rows of tokens, the same on every rank; the number need not be a multiple of a batch."""

    def __init__(self, number: int, seed: int = 0) -> None:
        self.rows = [rows_of(index, seed)[0] for index in range(number)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}
