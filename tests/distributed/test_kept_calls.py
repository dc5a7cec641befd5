"""A second start on real ranks: it finds what the first has compiled, and trains to the last bit as that did."""

import dataclasses
import os
import shutil

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from fsdp_compile import fsdp_compile
from fsdp_compile.planning import step_plans
from tests.distributed.test_plans import SLOW
from tests.distributed.training import assert_trains_as, sgd, train
from tests.models import build
from tests.ranks import on_ranks


@pytest.fixture
def cache(tmp_path):
    """A folder that no other test has written to."""
    return tmp_path


@dataclasses.dataclass
class Start:
    """Of a job.

    Attributes:
        was_found: whether this rank has found the call.
        num_found: how many ranks have.
    """

    losses: torch.Tensor
    parameters: list[torch.Tensor]
    plan: object
    was_found: bool
    num_found: int


def start(cache, in_backward=False, name="odd_mlp", backend="aot_eager", **options):
    """Two steps of a job whose ranks keep what they compile in this folder."""
    before = os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["XDG_CACHE_HOME"]
    os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["XDG_CACHE_HOME"] = str(cache / "inductor"), str(cache / "user")
    try:
        torch._dynamo.reset()
        found = counters["aot_autograd"]["autograd_cache_hit"]
        model = fsdp_compile(build(name), backend=backend, **options)
        optimizer = sgd(model.parameters())
        if in_backward:
            model.optimizer_in_backward(optimizer)
        losses = train(model, optimizer, range(2))
        parameters = [parameter.to_local().detach().clone() for parameter in model.parameters()]
        plan = model.graphs[-1].plan
        was_found = counters["aot_autograd"]["autograd_cache_hit"] > found
        num_found = torch.tensor(was_found, dtype=torch.int)
        dist.all_reduce(num_found)
        return Start(losses, parameters, plan, was_found, num_found.item())
    finally:
        os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["XDG_CACHE_HOME"] = before


def assert_same(start, other):
    assert torch.equal(start.losses, other.losses)
    assert all(map(torch.equal, start.parameters, other.parameters))
    assert start.plan == other.plan


@pytest.mark.parametrize("options", [{"name": "gpt"}, {"hardware": SLOW}, {"in_backward": True}], ids=",".join)
@on_ranks(2)
def test_a_second_start_trains_as_the_first(world_size, options, cache):
    first, second = (start(cache, backend="inductor", **options) for _ in range(2))
    assert (first.num_found, second.num_found) == (world_size - 1, world_size)
    assert_same(first, second)
    assert (first.plan is not None) == ("hardware" in options)


@on_ranks(2)
def test_a_start_whose_optimizer_steps_in_the_backward_does_not_take_the_call_of_one_that_does_not(world_size, cache):
    first, second = start(cache), start(cache, in_backward=True)
    assert second.num_found == world_size - 1  # what the other rank has compiled meanwhile
    torch.testing.assert_close(second.losses, first.losses)


@pytest.mark.parametrize("loser", [0, 1])
@on_ranks(2)
def test_a_rank_that_has_lost_its_cache_compiles_by_the_plan_of_the_others(world_size, loser, cache):
    """As on a host that is new to the job."""
    own = cache / str(dist.get_rank())
    first = start(own, hardware=SLOW)
    if dist.get_rank() == loser:
        shutil.rmtree(own)
    second = start(own, hardware=SLOW)
    assert second.was_found == (dist.get_rank() != loser)
    assert_same(first, second)


@on_ranks(2)
def test_what_was_kept_for_another_plan_than_that_of_the_first_rank_is_compiled(world_size, cache):
    own = cache / str(dist.get_rank())
    first = start(own, hardware=SLOW)
    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() == 0:
            shutil.rmtree(own)
            patched.setattr(step_plans, "find_plan", lambda *_: step_plans.Found(None, None))
        second = start(own, hardware=SLOW)
    assert first.plan is not None and second.plan is None
    assert second.num_found == 0
    torch.testing.assert_close(second.losses, first.losses)


@on_ranks(2)
def test_what_was_found_has_the_gradients_of_the_unsharded_model(world_size, cache):
    before = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    try:
        for _ in range(2):
            torch._dynamo.reset()
            assert_trains_as(fsdp_compile(build("gpt"), backend="inductor"), build("gpt"))
    finally:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = before
