"""What the other ranks do when one is gone, or raises."""

import json
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compile import RankError, fsdp_compile
from fsdp_compile.runtime import agreement
from tests import ranks
from tests.distributed.training import adamw
from tests.models import DEVICE
from tests.ranks import run_on_ranks, run_until_parted

LIMIT = 30.0  # seconds in which a survivor has to stop


class Breaking(nn.Module):
    """Two layers, between which something happens to a rank."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, happens):
        x = self.first(x)
        happens()
        return self.second(x).square().mean()


@torch.compiler.disable
def nothing():
    pass


@torch.compiler.disable
def die():
    os._exit(7)


@torch.compiler.disable
def raise_error():
    raise ValueError("bad rows")


@torch.compiler.disable
def run_out_of_memory():
    torch.empty(1 << 60)


def train(path, place, fault):
    """Rank 1 has the fault at this place of its third step; what rank 0 sees of it goes to the file."""
    agreement._PATIENCE = 2.0
    model = fsdp_compile(Breaking(), backend="aot_eager")
    optimizer = adamw(model.parameters())
    x = torch.ones(4, 8)
    begin = time.monotonic()
    try:
        for step in range(6):
            happens = {place: fault} if step == 2 and dist.get_rank() == 1 else {}
            happens.get("before", nothing)()
            loss = model(x, happens.get("forward", nothing))
            happens.get("between", nothing)()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            happens.get("after", nothing)()
    except Exception as e:
        seconds = time.monotonic() - begin
        if dist.get_rank() == 0:
            path.write_text(json.dumps([type(e).__name__, str(e), seconds]))
        else:
            time.sleep(LIMIT)  # its process goes on, and so do its connections
        raise


def seen_by_rank_0(path, *args):
    with pytest.raises(Exception) as caught:
        run_on_ranks(2, train, path, *args)
    ranks._pools.pop(2, None)
    assert path.exists(), caught.value
    return json.loads(path.read_text())


@pytest.mark.parametrize("place", ["before", "forward", "between", "after"])
def test_a_rank_that_dies_stops_the_others(tmp_path, place):
    name, text, seconds = seen_by_rank_0(tmp_path / "seen", place, die)
    assert name == RankError.__name__
    assert "a rank that rank 0 waits for has ended, or lost its connection" in text
    assert seconds < LIMIT


@pytest.mark.parametrize("fault", [raise_error, run_out_of_memory])
def test_a_rank_that_raises_in_its_forward_stops_the_others(tmp_path, fault):
    name, text, seconds = seen_by_rank_0(tmp_path / "seen", "forward", fault)
    assert name == RankError.__name__
    assert "rank 1 has not come back since it raised" in text
    assert ("bad rows" if fault is raise_error else "memory") in text
    assert seconds < LIMIT


def all_raise():
    model = fsdp_compile(Breaking(), backend="aot_eager")
    x = torch.ones(4, 8)
    for _ in range(2):
        model(x, nothing).backward()
        with pytest.raises(ValueError, match="bad rows"):
            model(x, raise_error)
        with pytest.raises(RuntimeError, match="reduction dim"):
            model(torch.ones(4, 9), nothing)
    return model(x, nothing).item()


def test_what_all_ranks_raise_stops_nobody():
    first, second = run_on_ranks(2, all_raise)
    assert first == second


class Waiting(nn.Module):
    """A layer before which something happens to a rank."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, happens):
        happens()
        return self.layer(x).square().mean()


@torch.compiler.disable
def sleep():
    time.sleep(3.0)


def raise_in_one_model_and_go_on_with_another():
    agreement._PATIENCE = 1.0
    broken, model = fsdp_compile(Waiting(), backend="aot_eager"), fsdp_compile(Waiting(), backend="aot_eager")
    x = torch.ones(4, 8)
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="bad rows"):
            broken(x, raise_error)
    return model(x, sleep if dist.get_rank() == 1 else nothing).item()


def test_a_rank_that_goes_on_with_another_model_has_come_back():
    """However long it takes to compile that one."""
    first, second = run_until_parted(2, raise_in_one_model_and_go_on_with_another)
    assert first == second


def lose_the_process_group():
    mesh = init_device_mesh(DEVICE.type, (2,))
    model = fsdp_compile(Breaking(), mesh, backend="aot_eager")
    x = torch.ones(4, 8)
    loss = model(x, nothing)
    loss.backward()
    dist.destroy_process_group(mesh.get_group())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="process group"):
            model(x, nothing).backward()


def test_a_process_group_destroyed_underneath_is_an_error():
    run_on_ranks(2, lose_the_process_group)
    ranks._pools.pop(2).stop()  # which has none any more
