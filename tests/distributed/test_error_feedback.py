"""What messages lose of gradients is sent with the next: training is that of unsharded models that do so."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.func import functional_call

from fsdp_compile import CommunicationDtype, CommunicationState, ConfigError, fsdp_compile, shard
from fsdp_compile.passes import forms, ops
from tests.distributed.test_communication_dtype import assert_close_but_for_steps, rounded
from tests.distributed.training import batch_of_rank, both_front_ends, compiled, full, hybrid_mesh, sgd
from tests.models import OddRows, made
from tests.ranks import on_ranks

STEPS = range(4)
INT8, INT4 = (CommunicationDtype(reduce=form, error_feedback=True) for form in ("int8", "int4"))


class Expected:
    """An unsharded model with what each rank's messages have lost."""

    def __init__(self, model, asked):
        self.model, self.asked, self.optimizer = model, asked, sgd(model.parameters())
        self.lost = [{} for _ in range(dist.get_world_size())]

    def gradients(self, *steps, change=lambda rank, batch: batch):
        """The losses of the last step by rank, and the mean of what all ranks send: for each sum over the steps."""
        names, losses = list(dict(self.model.named_parameters())), []
        sent = {name: [] for name in names}
        for rank, lost in enumerate(self.lost):
            sums = [None] * len(names)
            for step in steps:
                read = {name: each.detach().requires_grad_() for name, each in self.model.named_parameters()}
                loss = functional_call(self.model, read, change(rank, batch_of_rank(self.model, step, rank)))
                gradients = torch.autograd.grad(loss, list(read.values()), allow_unused=True)
                sums = [new if old is None else old + new for old, new in zip(sums, gradients, strict=True)]
            losses.append(loss.detach())
            for name, gradient in zip(names, sums, strict=True):
                if gradient is not None:
                    total = gradient + lost.get(name, torch.zeros_like(gradient)).float()
                    sent[name].append(rounded(total, self.asked.reduce_form))
                    left = total - sent[name][-1]
                    lost[name] = torch.where(left.isfinite(), left, 0.0).to(forms.RESIDUAL)
        return losses, {name: torch.stack(each).mean(0) for name, each in sent.items() if each}

    def step(self, gradients):
        for name, parameter in self.model.named_parameters():
            parameter.grad = gradients.get(name)
        self.optimizer.step()


def assert_trains_so(model, expected, *, is_equal=True, steps=STEPS):
    exact = {"rtol": 0, "atol": 0} if is_equal else {}
    same = torch.testing.assert_close if is_equal else assert_close_but_for_steps
    optimizer = sgd(model.parameters())
    for step in steps:
        loss = model(*batch_of_rank(model, step))
        loss.backward()
        losses, gradients = expected.gradients(step)
        same(loss.detach(), losses[dist.get_rank()], **exact)
        for name, parameter in model.named_parameters():
            same(full(parameter.grad), gradients[name], **exact)
        optimizer.step()
        optimizer.zero_grad()
        expected.step(gradients)


OPTIONS = {
    "packed": {},
    "grouped": {"collective_lowering": "grouped"},
    "planned": {"hardware": "h100"},
    "kept": {"reshard_after_forward": False},
}


@pytest.mark.parametrize(("option", "asked"), [("packed", INT8), *((option, INT4) for option in OPTIONS)])
@on_ranks(2)
def test_it_is_equal_to_the_last_bit(world_size, option, asked):
    model = compiled(made(OddRows), communication_dtype=asked, **OPTIONS[option])
    assert_trains_so(model, Expected(made(OddRows), asked))
    of_integers = [
        node.target
        for node in model.graphs[-1].backward.graph.nodes
        if ops.is_call(node, ops.KEEP) or (ops.is_call(node, ops.PACK) and ops.argument(node, "forms"))
    ]
    assert of_integers.count(ops.KEEP) == of_integers.count(ops.PACK) > 0


@both_front_ends
@on_ranks(2)
def test_units_differ_and_eager_code_does_the_same(world_size, front_end):
    asked = {"*": CommunicationDtype(reduce="int8"), "up": INT4}
    model = front_end(made(OddRows), communication_dtype=asked, auto_wrap_policy={nn.Linear})
    expected = Expected(made(OddRows), INT4)
    model(*batch_of_rank(model, 0)).backward()
    _, gradients = expected.gradients(0)
    torch.testing.assert_close(full(model.up.weight.grad), gradients["up.weight"], rtol=0, atol=0)
    model.zero_grad()
    model(*batch_of_rank(model, 1)).backward()
    _, gradients = expected.gradients(1)
    torch.testing.assert_close(full(model.up.weight.grad), gradients["up.weight"], rtol=0, atol=0)
    assert list(CommunicationState(model).state_dict()) == ["up.weight", "up.bias"]


@on_ranks(4)
def test_with_generated_code_and_replicas(world_size):
    model = fsdp_compile(made(OddRows), hybrid_mesh(), backend="inductor", communication_dtype=INT4)
    assert_trains_so(model, Expected(made(OddRows), INT4), is_equal=False)


@on_ranks(2)
def test_gradients_that_are_kept_lose_once(world_size):
    model, expected = compiled(made(OddRows), communication_dtype=INT4), Expected(made(OddRows), INT4)
    for first in (0, 2):
        model.zero_grad()
        with model.no_sync():
            model(*batch_of_rank(model, first)).backward()
        model(*batch_of_rank(model, first + 1)).backward()
        _, gradients = expected.gradients(first, first + 1)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(full(parameter.grad), gradients[name], rtol=0, atol=1e-7)


@on_ranks(2)
def test_two_forwards_before_their_backwards(world_size):
    model, expected = compiled(made(OddRows), communication_dtype=INT4), Expected(made(OddRows), INT4)
    losses = [model(*batch_of_rank(model, step)) for step in (0, 1)]
    for loss in losses:
        loss.backward()
    (_, first), (_, second) = expected.gradients(0), expected.gradients(1)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(full(parameter.grad), first[name] + second[name], rtol=0, atol=0)


@on_ranks(2)
def test_nothing_of_what_is_not_finite_is_sent_again(world_size):
    model, expected = compiled(made(OddRows), communication_dtype=INT4), Expected(made(OddRows), INT4)

    def change(rank, batch):
        return (batch[0].index_fill(0, torch.tensor([0]), torch.inf), batch[1]) if rank == 1 else batch

    for step in STEPS:
        batch = batch_of_rank(model, step)
        model(*(change(dist.get_rank(), batch) if step == 1 else batch)).backward()
        _, gradients = expected.gradients(step, **({"change": change} if step == 1 else {}))
        is_finite = [each.isfinite().all() for each in gradients.values()]
        assert all(is_finite) == (step != 1)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(full(parameter.grad), gradients[name], rtol=0, atol=0, equal_nan=True)
        model.zero_grad()


@on_ranks(4)
def test_a_checkpoint_is_taken_over_by_fewer_ranks(world_size, tmp_path):
    def states(model):
        return {"model": model.state_dict(), "communication": CommunicationState(model)}

    model = compiled(made(OddRows), communication_dtype=INT4)
    expected = Expected(made(OddRows), INT4)
    assert_trains_so(model, expected)
    saved = CommunicationState(model).state_dict()
    for name, lost in saved.items():
        wanted = torch.stack([rank[name].float() for rank in expected.lost]).mean(0)
        torch.testing.assert_close(full(lost), wanted, rtol=1e-6, atol=1e-9)
    dcp.save(states(model), checkpoint_id=tmp_path)
    everyone, half = hybrid_mesh(), hybrid_mesh()["shard"]
    for mesh, num_ranks in ((everyone, 4), (half, 2)):
        other = compiled(made(OddRows), mesh, communication_dtype=INT4)
        dcp.load(states(other), checkpoint_id=tmp_path, process_group=None)
        found = CommunicationState(other).state_dict()
        for name, lost in saved.items():
            torch.testing.assert_close(full(found[name]), full(lost), rtol=2**-8, atol=1e-9)
        rank = dist.get_rank() % num_ranks
        other(*batch_of_rank(other, 7, rank)).backward()
        assert all(parameter.grad is not None for parameter in other.parameters())


@on_ranks(2)
def test_what_cannot_be_is_refused(world_size):
    with pytest.raises(ConfigError, match="error_feedback is for reduce='int8' and 'int4', not torch.bfloat16"):
        CommunicationDtype(reduce=torch.bfloat16, error_feedback=True)
    with pytest.raises(ConfigError, match="error_feedback is for reduce='int8' and 'int4', not None"):
        CommunicationDtype("int8", error_feedback=True)
    plain = shard(made(OddRows), communication_dtype=CommunicationDtype(reduce="int8"))
    with pytest.raises(ConfigError, match="no unit has error_feedback"):
        CommunicationState(plain)
    state = CommunicationState(shard(made(OddRows), communication_dtype=INT8))
    found = state.state_dict()
    with pytest.raises(ConfigError, match=r"nothing for up\.weight"):
        state.load_state_dict({name: value for name, value in found.items() if name != "up.weight"})
    with pytest.raises(ConfigError, match=r"up\.weight as Tensor"):
        state.load_state_dict(found | {"up.weight": torch.zeros(7, 20)})
    recorded = fsdp_compile(made(OddRows), communication_dtype=INT8, options={"triton.cudagraphs": True})
    with pytest.raises(ConfigError, match="error_feedback writes from step to step"):
        recorded(*batch_of_rank(recorded, 0))
