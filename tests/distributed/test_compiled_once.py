"""The ranks of a host make a graph once: one traces, rewrites and compiles it, and the others find that."""

import contextlib
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

from fsdp_compile import fsdp_compile
from fsdp_compile.compiler.kept_calls import Keep
from fsdp_compile.compiler.partitioner import Partitioner
from fsdp_compile.errors import ConfigError
from fsdp_compile.planning import step_plans
from tests.distributed.test_plans import SLOW
from tests.ranks import on_ranks, run_on_ranks


class Scaled(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.linear, self.factor = nn.Linear(8, 8), factor

    def forward(self, x):
        return self.linear(x).tanh() * self.factor


def never_seen():
    """Another number for each test, the same on all ranks: graphs with it are in no cache."""
    now = torch.tensor(time.time(), dtype=torch.float64)
    dist.broadcast(now, 0)
    return now.item()


@contextlib.contextmanager
def counting(made):
    """Inside, every joint graph that is rewritten, and every plan that is searched for, is noted."""
    with pytest.MonkeyPatch.context() as patched:
        for owner, name in ((Partitioner, "_rewritten"), (step_plans, "find_plan")):
            patched.setattr(owner, name, noting(name, getattr(owner, name), made))
        yield


def noting(name, wrapped, made):
    def noted(*args, **kwargs):
        made.append(name)
        return wrapped(*args, **kwargs)

    return noted


def what_ranks_made(made):
    """How often all of them together did what."""
    all_made = [None] * dist.get_world_size()
    dist.all_gather_object(all_made, made)
    return {name: sum(each.count(name) for each in all_made) for name in ("_rewritten", "find_plan")}


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
@pytest.mark.parametrize("options", [{}, {"hardware": SLOW}], ids=["unplanned", "planned"])
@on_ranks(3)
def test_one_rank_traces_rewrites_and_plans(world_size, options, backend):
    made = []
    factor = never_seen()
    with counting(made):
        model = fsdp_compile(Scaled(factor), backend=backend, **options)
        model(torch.randn(4, 8)).sum().backward()
    assert what_ranks_made(made) == {"_rewritten": 1, "find_plan": len(options)}
    plans = [None] * world_size
    dist.all_gather_object(plans, model.graphs[-1].plan)
    assert plans == plans[:1] * world_size


def compiled_and_found(factor):
    """How many graphs this rank has compiled, and how many it found in the cache."""
    counters.clear()
    with pytest.MonkeyPatch.context() as patched:  # as where a call cannot be kept
        patched.setattr(Keep, "write", lambda *_: None)
        fsdp_compile(Scaled(factor), backend="inductor")(torch.randn(4, 8)).sum().backward()
    return [counters["inductor"][f"fxgraph_cache_{what}"] for what in ("miss", "hit")]


def test_what_is_not_kept_all_trace_and_one_compiles():
    factor = time.time()
    found = run_on_ranks(3, compiled_and_found, factor)
    assert [sum(counts) for counts in zip(*found, strict=True)] == [2, 4], found


def called(is_late, num_rows=4, **options):
    """A model for which a plan is searched, and what this rank has made for its first call."""
    made = []
    with counting(made):
        model = fsdp_compile(Scaled(never_seen()), backend="aot_eager", hardware=SLOW, **options)
        if is_late:
            time.sleep(2)  # longer than the others let the first rank go first
        model(torch.randn(num_rows, 8)).sum().backward()
    return model, made


@on_ranks(3)
def test_ranks_with_other_shapes_compile_for_themselves_by_the_plan_of_the_first(world_size):
    """Whoever comes first: those that wait for others decide nothing, and nobody waits for them."""
    rank = dist.get_rank()
    model, made = called(is_late=rank == 0, num_rows=4 + rank)
    assert what_ranks_made(made) == {"_rewritten": 3, "find_plan": 1}
    assert made.count("find_plan") == (rank == 0)
    plans = [None] * world_size
    dist.all_gather_object(plans, model.graphs[-1].plan)
    assert plans == plans[:1] * world_size


@pytest.mark.parametrize("late", [0, 2])
@on_ranks(3)
def test_a_budget_that_nothing_fits_is_refused_on_all_ranks_whoever_plans(world_size, late):
    with pytest.raises(ConfigError, match="memory_budget of 1000 B: .* are missing"):
        called(is_late=dist.get_rank() == late, memory_budget=1000)


@on_ranks(3)
def test_a_rank_that_the_first_waits_for_plans_in_its_place(world_size):
    rank = dist.get_rank()
    _, made = called(is_late=rank != 2)
    assert what_ranks_made(made) == {"_rewritten": 1, "find_plan": 1}
    assert made.count("find_plan") == (rank == 2)
