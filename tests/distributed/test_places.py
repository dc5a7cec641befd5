"""Ranks that have parted in what is not compared beforehand: backwards, and what is read outside of compiled graphs."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_compile import RankError, fsdp_compile, shard
from fsdp_compile.runtime.watching import TICK
from tests import ranks
from tests.distributed.training import adamw, hybrid_mesh
from tests.ranks import run_on_ranks, run_until_parted

SOON = 15.0  # seconds


@pytest.fixture(scope="module", autouse=True)
def _other_tests_have_ranks_that_have_not_parted():
    yield
    while ranks._pools:
        ranks._pools.popitem()[1].stop()


class Layers(nn.Module):
    """Two layers of one shape: their messages have the same sizes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(self.first(x).tanh()).square().mean()


class Experts(nn.Module):
    """Rows go to the experts that are asked for, in code that is not compiled; others may be left out of the loss."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 8)

    def forward(self, x, used, in_loss):
        return self.head(self.route(self.stem(x), used, in_loss)).square().mean()

    @torch.compiler.disable
    def route(self, x, used, in_loss):
        outputs = {index: self.experts[index](x) for index in used}
        return x + sum(output for index, output in outputs.items() if index in in_loss)


ALL = (0, 1, 2)


def error_of(call):
    """What `call` raises, what the next use of its model does, and after how many seconds."""
    begin = time.monotonic()
    try:
        call()
    except RankError as e:
        seconds = time.monotonic() - begin
        with pytest.raises(RankError) as again:
            call()
        assert str(again.value) == str(e)
        return str(e), seconds
    return None, time.monotonic() - begin


def go_backward_on_one_rank(then, backend, **options):
    """The last rank leaves out the backward of the third step."""
    model = fsdp_compile(Layers(), backend=backend, **options)
    optimizer = adamw(model.parameters())
    x = torch.ones(4, 8)

    def step(has_backward=True):
        loss = model(x)
        if has_backward:
            loss.backward()
        elif then == "clip":
            model.clip_grad_norm_(1.0)
        elif then == "summon":
            model.summon_full_params().__enter__()
        elif then == "evaluate":
            with torch.no_grad():
                model(x)
        optimizer.step()
        optimizer.zero_grad()

    def rest():
        step(has_backward=dist.get_rank() < dist.get_world_size() - 1)
        step()

    for _ in range(2):
        step()
    return error_of(rest)


def use_experts(how, backend):
    """From the third step on, the last rank reads an expert less, or has it not in its loss."""
    torch.manual_seed(0)
    if backend == "eager":
        model = shard(Experts(), auto_wrap_policy=[])
    else:
        model = fsdp_compile(Experts(), auto_wrap_policy=[], backend=backend)
    optimizer = adamw(model.parameters())
    x = torch.ones(4, 8)

    def train(used, in_loss):
        model(x, used, in_loss).backward()
        optimizer.step()
        optimizer.zero_grad()

    def rest():
        is_last = dist.get_rank() == dist.get_world_size() - 1
        some = (0, 2) if is_last else ALL
        train(some if how == "reads" else ALL, some)

    for _ in range(2):
        train(ALL, ALL)
    return error_of(rest)


def evaluate_on_one_replica():
    """Ranks 0 and 1 hold one copy of the model, and evaluate it once more than the others."""
    model = fsdp_compile(Layers(), hybrid_mesh(), backend="aot_eager")
    x = torch.ones(4, 8)

    def step(num_evaluated):
        with torch.no_grad():
            for _ in range(num_evaluated):
                model(x)
        time.sleep(2.5 * TICK)
        model(x).backward()

    step(num_evaluated=1)
    return error_of(lambda: step(num_evaluated=2 if dist.get_rank() < 2 else 1))


def check(results, *places):
    """All ranks raise the same soon, and it names two ranks and where they are."""
    for text, seconds in results:
        assert text == results[0][0]
        first, *lines, advice = text.splitlines()
        assert "have parted" in first and len(lines) == 2
        for place in places:
            assert place in text
        assert text.count("test_places.py") == 2
        assert seconds < SOON


@pytest.mark.parametrize(
    "world_size, then, backend",
    [
        (2, "step", "aot_eager"),
        (2, "step", "inductor"),
        (2, "clip", "aot_eager"),
        (2, "summon", "aot_eager"),
        (2, "evaluate", "aot_eager"),
        (3, "step", "aot_eager"),
    ],
)
def test_a_backward_that_a_rank_leaves_out_stops_all(world_size, then, backend):
    place = {
        "step": "the forward of a graph that reads first, second, for",
        "clip": "the norm of the gradients (clip_grad_norm_), outside of compiled graphs",
        "summon": "the gather of all of first, outside of compiled graphs",
        "evaluate": "about to begin what it has not run before: a call without a backward",
    }[then]
    results = run_until_parted(world_size, go_backward_on_one_rank, then, backend)
    check(results, ": the backward of a graph that reads first, second, for", f"rank {world_size - 1}: {place}")


@pytest.mark.parametrize("world_size, backend", [(2, "aot_eager"), (2, "eager"), (4, "eager")])
def test_a_parameter_that_a_rank_does_not_read_stops_all(world_size, backend):
    check(
        run_until_parted(world_size, use_experts, "reads", backend),
        "the gather of experts.1.weight, outside of compiled graphs",
    )


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_a_parameter_that_a_rank_has_no_gradient_for_stops_all(backend):
    results = run_until_parted(2, use_experts, "goes backward", backend)
    check(results, "rank 0: the reduction of the gradient of experts.1.", "rank 1: the reduction of the gradient of")


def test_a_replica_that_evaluates_once_more_disturbs_nobody():
    assert [error for error, _ in run_on_ranks(4, evaluate_on_one_replica)] == [None] * 4
