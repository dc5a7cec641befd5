"""Ranks that would not run the same collectives: an error on all of them, soon, and nothing where they may differ."""

import copy
import datetime
import functools
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_compile import RankError, fsdp_compile
from fsdp_compile.module.sharding import sharding_of
from fsdp_compile.runtime.agreement import agreement_of
from fsdp_compile.runtime.whole_states import whole_state
from tests.distributed.training import adamw, assert_same_parameters
from tests.models import seeded
from tests.ranks import on_ranks, run_until_parted

SOON = 30.0  # seconds


class Blocks(nn.Module):
    """Rows of `dim` numbers; `order` says which blocks they go through."""

    def __init__(self, dim=8, num_blocks=3):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(dim, dim), nn.Tanh()) for _ in range(num_blocks))

    def forward(self, x, order=(0, 1, 2)):
        for index in order:
            x = self.blocks[index](x)
        return x.square().mean()


def made(**options):
    torch.manual_seed(0)
    return Blocks(**options)


def renamed():
    model = made()
    model.layers = model.blocks
    del model.blocks
    return model


def frozen():
    model = made()
    model.blocks[1].requires_grad_(False)
    return model


def reordered():
    model = made()
    first, *others = model.blocks
    first.register_parameter("scale", nn.Parameter(torch.ones(8)))
    model.blocks = nn.ModuleList([*others, first])
    return model


OTHERS = {
    "names": (renamed, {}, "layers.0.0.weight"),
    "shapes": (lambda: made(dim=16), {}, r"\(16, 16\)"),
    "dtypes": (lambda: made().double(), {}, "float64"),
    "flags": (frozen, {}, "frozen"),
    "number": (lambda: made(num_blocks=4), {}, "rank 0: nothing\n  rank 1: parameter blocks.3.0.weight"),
    "order": (reordered, {}, "blocks.2.scale"),
    "policy": (made, {"auto_wrap_policy": [nn.Linear]}, "of the unit blocks.0.0"),
    "options": (made, {"forward_prefetch": 2}, "forward_prefetch=2"),
}


@pytest.mark.parametrize("what", OTHERS)
@on_ranks(2)
def test_ranks_with_different_models_raise_before_anything_is_changed(world_size, what):
    other, options, text = OTHERS[what]
    model, options = (made(), {}) if dist.get_rank() == 0 else (other(), options)
    before = copy.deepcopy(model)
    begin = time.monotonic()
    with pytest.raises(RankError, match=r"rank 0 and rank 1 differ, first in number \d+") as caught:
        fsdp_compile(model, backend="aot_eager", **options)
    assert time.monotonic() - begin < SOON
    assert text.replace("\\", "") in str(caught.value)
    assert type(model) is Blocks
    assert_same_parameters(model, before)


def train(model, batches, orders):
    optimizer = adamw(model.parameters())
    for batch, order in zip(batches, orders, strict=True):
        model(batch, order).backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_ranks_that_take_different_branches_at_first_raise(world_size):
    model = fsdp_compile(made(), backend="aot_eager")
    begin = time.monotonic()
    with pytest.raises(RankError) as caught:
        model(torch.ones(4, 8), (0, 1, 2) if dist.get_rank() == 0 else (0, 2, 1))
    assert time.monotonic() - begin < SOON
    first, line_0, line_1, _ = str(caught.value).splitlines()
    assert "rank 0" in first and "rank 1" in first
    assert "all_gather of blocks.1" in line_0 and "all_gather of blocks.2" in line_1
    assert "test_agreement.py" in line_0 or "linear.py" in line_0


def branch_at_a_later_step(backend, with_backward, **options):
    """Rank 1 alone takes another branch at its fourth step, while rank 0 runs what it has run before."""
    model = fsdp_compile(made(), backend=backend, **options)
    batches = [torch.ones(4, 8)] * 3
    train(model, batches, [(0, 1, 2)] * 3)
    begin = time.monotonic()
    try:
        loss = model(torch.ones(4, 8), (0, 2) if dist.get_rank() == 1 else (0, 1, 2))
        if with_backward:
            loss.backward()
    except RankError as e:
        try:
            model(torch.ones(4, 8))
        except RankError as again:
            return str(e), str(again), time.monotonic() - begin
    return None


def evaluate_on_one_rank(later):
    """Rank 0 evaluates where rank 1 trains: at first, or after steps of both."""
    model = fsdp_compile(made(), backend="aot_eager")
    if later:
        train(model, [torch.ones(4, 8)], [(0, 1, 2)])
    begin = time.monotonic()
    try:
        with torch.set_grad_enabled(dist.get_rank() == 1):
            model(torch.ones(4, 8))
    except RankError as e:
        return str(e), time.monotonic() - begin


def run_fewer_batches():
    """Rank 1 has a batch less, and stands in a barrier."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=10))
    model = fsdp_compile(made(), process_group=group, backend="aot_eager")
    try:
        for _ in range(3 - dist.get_rank()):
            model(torch.ones(4, 8)).backward()
    except RankError as e:
        return str(e)
    finally:
        dist.barrier()


def come_late():
    """Rank 1 does not call the model before rank 0 has stopped waiting."""
    model = fsdp_compile(made(), backend="aot_eager")
    agreement_of(sharding_of(model).mesh).limit = 2.0
    if dist.get_rank() == 1:
        dist.barrier()
    try:
        model(torch.ones(4, 8))
    except RankError as e:
        return str(e)
    finally:
        if dist.get_rank() == 0:
            dist.barrier()


@pytest.mark.parametrize("backend, with_backward", [("aot_eager", True), ("aot_eager", False), ("inductor", True)])
def test_a_rank_that_takes_another_branch_at_a_later_step_stops_all(backend, with_backward):
    results = run_until_parted(2, branch_at_a_later_step, backend, with_backward)
    for text, again, seconds in results:
        assert text == again == results[0][0]
        assert "blocks.1" in text and "blocks.2" in text
        assert seconds < SOON


@pytest.mark.parametrize("later", [False, True])
def test_a_rank_that_evaluates_while_another_trains_is_told_so(later):
    for text, seconds in run_until_parted(2, evaluate_on_one_rank, later):
        assert text.splitlines()[1:3] == [
            "  rank 0: a call without a backward (no_grad, or nothing to train)",
            "  rank 1: a call with a backward",
        ]
        assert "to train and to evaluate it together" in text
        assert seconds < SOON


def test_a_rank_whose_branch_needs_a_plan_stops_all():
    results = run_until_parted(2, functools.partial(branch_at_a_later_step, hardware="h100"), "aot_eager", True)
    for text, again, seconds in results:
        assert text == again == results[0][0]
        assert "all_gather_grouped of blocks.0" in text
        assert seconds < SOON


def test_a_rank_with_fewer_batches_stops_the_others_at_the_time_limit():
    text, _ = run_until_parted(2, run_fewer_batches)
    assert "a rank that rank 0 waits for has not come within the time limit of the process group" in text


def test_a_rank_that_does_not_come_is_named():
    for text in run_until_parted(2, come_late):
        assert "rank 1 has not come to where rank 0 is within 2 s" in text


@on_ranks(2)
def test_ranks_with_batches_of_different_sizes_train_undisturbed(world_size):
    expected, model = made(), fsdp_compile(made(), backend="aot_eager")
    optimizer, expected_optimizer = adamw(model.parameters()), adamw(expected.parameters())
    generator = seeded(0)
    agreement = agreement_of(sharding_of(model).mesh)
    numbers = []
    for _ in range(20):
        sizes = torch.randint(1, 9, (world_size,), generator=generator).tolist()
        batches = [torch.randn(size, 8, generator=generator) for size in sizes]
        model(batches[dist.get_rank()]).backward()
        (sum(expected(batch) for batch in batches) / world_size).backward()
        for found in (optimizer, expected_optimizer):
            found.step()
            found.zero_grad()
        numbers.append(agreement._num_compared)
    assert_same_parameters(model, expected)
    assert len(set(numbers)) == 1  # nothing was compared after the first step


def save_on_the_first_rank_alone():
    model = fsdp_compile(nn.Linear(8, 8), backend="aot_eager")
    model(torch.ones(2, 8)).sum().backward()
    try:
        if dist.get_rank() == 0:  # as Trainers do that take the model for one that each rank has whole
            whole_state(model)
        else:
            model(torch.ones(2, 8)).sum().backward()
    except RankError as e:
        return str(e)
    return "no error"


def test_a_full_state_that_the_other_ranks_do_not_ask_for_raises():
    for text in run_until_parted(2, save_on_the_first_rank_alone):
        assert "the full state of the Linear" in text
