"""Checkpoints that were not written whole are not taken for whole ones, and a restart goes on from the last whole one.

torch.distributed.checkpoint writes its `.metadata` last, and reports the exceptions of any rank on all of them.
"""

import os
import resource
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from fsdp_compile import shard
from tests import ranks
from tests.distributed.training import adamw, load_checkpoint, save_checkpoint, train
from tests.models import build
from tests.ranks import on_ranks, run_on_ranks


def fresh(seed):
    model = shard(build("gpt", seed=seed))
    return model, adamw(model.parameters())


def train_and_save(path):
    """The losses after the checkpoint at `path`, without an interruption."""
    model, optimizer = fresh(seed=0)
    train(model, optimizer, range(3))
    save_checkpoint(path, model, optimizer)
    return train(model, optimizer, range(3, 6)), model, optimizer


def losses_after(path):
    model, optimizer = fresh(seed=1)
    load_checkpoint(path, model, optimizer)
    return train(model, optimizer, range(3, 6))


@contextmanager
def full_disk(is_full):
    """No file of this process may have more than 4 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if is_full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@on_ranks(2)
def test_a_full_disk_on_one_rank_is_an_error_on_all(world_size, tmp_path):
    losses, model, optimizer = train_and_save(tmp_path / "whole")
    with full_disk(dist.get_rank() == 1), pytest.raises(CheckpointException, match="(?s)ranks:.*1.*File too large"):
        save_checkpoint(tmp_path / "partial", model, optimizer)
    with pytest.raises(CheckpointException, match=r"\.metadata"):
        load_checkpoint(tmp_path / "partial", model, optimizer)
    assert torch.equal(losses_after(tmp_path / "whole"), losses)


@on_ranks(2)
def test_a_truncated_checkpoint_is_an_error_on_all(world_size, tmp_path):
    losses, model, optimizer = train_and_save(tmp_path / "whole")
    save_checkpoint(tmp_path / "truncated", model, optimizer)
    if dist.get_rank() == 0:
        largest = max((tmp_path / "truncated").glob("*.distcp"), key=lambda path: path.stat().st_size)
        os.truncate(largest, largest.stat().st_size // 2)
    dist.barrier()
    with pytest.raises(CheckpointException):
        load_checkpoint(tmp_path / "truncated", model, optimizer)
    assert torch.equal(losses_after(tmp_path / "whole"), losses)


class Dying(dcp.FileSystemWriter):
    """Ends its process when it has written."""

    def write_data(self, *args, **kwargs):
        super().write_data(*args, **kwargs).wait()
        os._exit(7)


def save_and_die(path):
    losses, model, optimizer = train_and_save(path / "whole")
    torch.save(losses, path / f"losses-{dist.get_rank()}")
    writer = (Dying if dist.get_rank() == 1 else dcp.FileSystemWriter)(path / "partial")
    begin = time.monotonic()
    try:
        save_checkpoint(path / "partial", model, optimizer, storage_writer=writer)
    except Exception as e:
        (path / "seen").write_text(f"{time.monotonic() - begin} {type(e).__name__}: {e}")
        raise


def restart(path):
    with pytest.raises(CheckpointException, match=r"\.metadata"):
        load_checkpoint(path / "partial", *fresh(seed=1))
    assert torch.equal(losses_after(path / "whole"), torch.load(path / f"losses-{dist.get_rank()}"))


def test_a_rank_that_dies_while_saving_leaves_no_checkpoint(tmp_path):
    with pytest.raises(Exception):  # noqa: B017  whichever rank is heard of first
        run_on_ranks(2, save_and_die, tmp_path)
    ranks._pools.pop(2, None)
    seconds, _ = (tmp_path / "seen").read_text().split(maxsplit=1)
    assert float(seconds) < 30
    run_on_ranks(2, restart, tmp_path)
