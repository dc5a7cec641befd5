"""What is sent in a narrower form: training is that of unsharded models that round where a message does."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, ShardingStrategy
from torch.func import functional_call

from fsdp_compile import CommunicationDtype, NonFiniteError, fsdp_compile
from fsdp_compile.passes import forms, ops
from tests.distributed.test_tensor_parallel import Net, by_tensor, root_mesh
from tests.distributed.training import (
    batch_of_rank,
    both_front_ends,
    compiled,
    full,
    hybrid_mesh,
    sgd,
)
from tests.models import DEVICE, OddRows, build, made, seeded
from tests.ranks import on_ranks

STEPS = range(3)
INT8, INT4 = CommunicationDtype("int8", "int8"), CommunicationDtype("int4", "int4")
BF16 = CommunicationDtype(reduce=torch.bfloat16)
ASKED = {
    "gathers": CommunicationDtype("int8"),
    "int8": INT8,
    "int4": INT4,
    "bf16": BF16,
    "mixed": CommunicationDtype("int8", torch.bfloat16),
    "fp16": CommunicationDtype("int4", torch.float16),
}


def rounded(tensor, form):
    """What arrives of a tensor that is sent in a form."""
    shape = tuple(tensor.shape)
    if not form or (forms.is_integers(form) and not forms.is_integers(forms.form_for(shape, form, tensor.dtype))):
        return tensor
    region = forms.Region(0, tensor.numel(), math.prod(shape[1:]), form)
    sent = torch.cat(forms.into_form(forms.eagerly, tensor.reshape(-1), [], region, tensor.dtype))
    return forms.out_of_form(forms.eagerly, sent, [], region, tensor.dtype).view(shape)


def of_unit(asked, name):
    """What is asked for a parameter: by the unit that it is in, if units differ."""
    return asked.get(name.rpartition(".")[0], asked[""]) if isinstance(asked, dict) else asked


def losses_and_gradients(model, asked, step, summed=False, size=1):
    """Of an unsharded model, on each rank's rows, by what the ranks, and replicas of `size` ranks, send each other."""
    names = dict(model.named_parameters())
    losses, sent = [], {name: [] for name in names}
    for rank in range(dist.get_world_size()):
        forms_of = {name: of_unit(asked, name) for name in names}
        read = {name: rounded(one.detach(), forms_of[name].gather_form).requires_grad_() for name, one in names.items()}
        loss = functional_call(model, read, batch_of_rank(model, step, rank))
        gradients = torch.autograd.grad(loss, list(read.values()), allow_unused=True)
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is not None:
                sent[name].append(rounded(gradient, forms_of[name].reduce_form))
        losses.append(loss.detach())
    sent = {name: sent_by_replicas(each, of_unit(asked, name).all_reduce_form, size) for name, each in sent.items()}
    of_all = {name: torch.stack(each).sum(0) / (1 if summed else len(each)) for name, each in sent.items() if each}
    return losses[dist.get_rank()], of_all


def sent_by_replicas(of_ranks, form, size):
    """What replicas send each other, where they have a form for it: the means of their ranks."""
    replicas = [of_ranks[first : first + size] for first in range(0, len(of_ranks), size)]
    return [rounded(torch.stack(each).mean(0), form) for each in replicas] if form else of_ranks


def assert_trains_so(model, expected, asked, *, is_equal=False, summed=False, size=1):
    """Losses, gradients and parameters, of a few steps; to the last bit if `is_equal`."""
    exact = {"rtol": 0, "atol": 0} if is_equal else {}
    same = torch.testing.assert_close if is_equal else assert_close_but_for_steps
    optimizers = sgd(model.parameters()), sgd(expected.parameters())
    for step in STEPS:
        loss = model(*batch_of_rank(model, step))
        loss.backward()
        expected_loss, gradients = losses_and_gradients(expected, asked, step, summed, size)
        same(loss.detach(), expected_loss, **exact)
        for (name, parameter), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert (parameter.grad is None) == (name not in gradients)
            if name in gradients:
                same(full(parameter.grad), gradients[name], **exact)
            wanted.grad = gradients.get(name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for parameter, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        same(full(parameter.detach()), wanted.detach(), **exact)


def assert_close_but_for_steps(found, expected):
    """Of a hundred elements, one may have been rounded to the next step: what is computed differs in its last bits."""
    assert ((found - expected).abs() > 1e-5 + 1e-4 * expected.abs()).float().mean() <= 0.01
    torch.testing.assert_close(found, expected, rtol=0, atol=0.01 * max(1e-2, float(expected.abs().max())))


def messages(model):
    """The dtypes of what the last graphs send, by operator."""
    found = {}
    for side in model.graphs[-1].sides:
        for node in filter(ops.is_collective, side.graph.nodes):
            found.setdefault(str(node.target).split(".")[1], set()).add(node.all_input_nodes[0].meta["val"].dtype)
    return found


@pytest.mark.parametrize(
    ("asked", "lowering"), [*((asked, "packed") for asked in ASKED), ("int8", "grouped"), ("mixed", "grouped")]
)
@on_ranks(2)
def test_without_generated_code_it_is_equal_to_the_last_bit(world_size, asked, lowering):
    model = compiled(made(OddRows), communication_dtype=ASKED[asked], collective_lowering=lowering)
    assert_trains_so(model, made(OddRows), ASKED[asked], is_equal=True)


def assert_a_transformer_trains_so(backend, asked, reduced):
    model = fsdp_compile(build("gpt"), backend=backend, communication_dtype=ASKED[asked])
    assert_trains_so(model, build("gpt"), ASKED[asked])
    assert messages(model) == {"all_gather": {torch.int8}, "all_to_all": {reduced}}


@on_ranks(4)
def test_a_transformer_trains_as_one_that_rounds(world_size):
    assert_a_transformer_trains_so("aot_eager", "mixed", torch.bfloat16)


@on_ranks(2)
def test_and_with_generated_code(world_size):
    assert_a_transformer_trains_so("inductor", "int8", torch.int8)


OPTIONS = {
    "kept": {"reshard_after_forward": False},
    "planned": {"hardware": "h100"},
    "offloaded": {"offload_policy": CPUOffloadPolicy()},
    "poisoned": {},
    "summed": {"gradient_reduction": "sum"},
}


@pytest.mark.parametrize("option", OPTIONS)
@on_ranks(2)
def test_no_schedule_changes_a_bit(world_size, option, monkeypatch):
    if option == "poisoned":
        monkeypatch.setenv("FSDP_COMPILE_POISON", "1")
    model = compiled(build("gpt"), communication_dtype=INT8, **OPTIONS[option])
    assert_trains_so(model, build("gpt"), INT8, is_equal=True, summed=option == "summed")


@both_front_ends
@on_ranks(2)
def test_units_differ_and_eager_code_sends_the_same(world_size, front_end):
    asked = {"*": INT8, "wide": CommunicationDtype()}
    model = front_end(made(OddRows), communication_dtype=asked, auto_wrap_policy={nn.Linear})
    assert_trains_so(model, made(OddRows), {"wide": CommunicationDtype(), "": INT8}, is_equal=True)


@on_ranks(4)
def test_replicas_reduce_in_float32_what_was_sent_in_integers(world_size):
    model = compiled(build("gpt"), hybrid_mesh(), communication_dtype=INT8)
    assert_trains_so(model, build("gpt"), INT8)
    assert messages(model) == {"all_gather": {torch.int8}, "all_to_all": {torch.int8}, "all_reduce": {torch.float32}}


REPLICAS = {
    "int8": CommunicationDtype(all_reduce="int8"),
    "int4 and bf16": CommunicationDtype("int8", torch.bfloat16, all_reduce="int4"),
    "bf16": CommunicationDtype(all_reduce=torch.bfloat16),
}


def assert_replicas_send_so(model, expected, asked, size, sent):
    assert_trains_so(model, expected, asked, size=size)
    assert messages(model)["all_gather_sums"] == {sent} and "all_reduce" not in messages(model)
    for parameter in model.parameters():  # replicas stay equal, to the last bit
        local = parameter.to_local().detach()
        of_replicas = [torch.empty_like(local) for _ in range(dist.get_world_size() // size)]
        dist.all_gather(of_replicas, local, group=parameter.device_mesh.get_group(0))
        assert all(torch.equal(each, local) for each in of_replicas)


@pytest.mark.parametrize(("asked", "backend"), [("int8", "aot_eager"), ("int8", "inductor"), ("bf16", "aot_eager")])
@on_ranks(4)
def test_replicas_send_each_other_what_their_ranks_have_summed_up(world_size, asked, backend):
    sent = torch.bfloat16 if asked == "bf16" else torch.int8
    options = {"backend": backend, "communication_dtype": REPLICAS[asked]}
    model = fsdp_compile(build("gpt"), hybrid_mesh(), **options)
    assert_replicas_send_so(model, build("gpt"), REPLICAS[asked], 2, sent)


@pytest.mark.parametrize("asked", ["int8", "bf16"])
@on_ranks(2)
def test_parameters_that_every_rank_keeps_whole_are_reduced_so(world_size, asked):
    model = compiled(made(OddRows), sharding_strategy=ShardingStrategy.NO_SHARD, communication_dtype=REPLICAS[asked])
    assert_trains_so(model, made(OddRows), REPLICAS[asked], is_equal=True)


@both_front_ends
@on_ranks(4)
def test_all_forms_together_and_where_nothing_is_compiled(world_size, front_end):
    """Compiled or not, the same arrives, of gradients that are kept as well."""
    asked = REPLICAS["int4 and bf16"]
    model, other = (front(made(OddRows), hybrid_mesh(), communication_dtype=asked) for front in (front_end, compiled))
    exact = compiled(made(OddRows), hybrid_mesh())
    model(*batch_of_rank(model, 0)).backward()
    other(*batch_of_rank(other, 0)).backward()
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        assert_close_but_for_steps(full(one.grad), full(another.grad))
    model.zero_grad()
    with model.no_sync():
        model(*batch_of_rank(model, 0)).backward()
    model(*batch_of_rank(model, 1)).backward()
    for step in (0, 1):
        exact(*batch_of_rank(exact, step)).backward()
    for one, another in zip(model.parameters(), exact.parameters(), strict=True):
        found, wanted = full(one.grad), full(another.grad)
        assert (found - wanted).abs().max() <= 0.2 * wanted.abs().max()


@pytest.mark.parametrize("sent", ["bf16", "int8"])
@on_ranks(2)
def test_gradients_that_are_kept_are_rounded_once(world_size, sent):
    model, expected, asked = compiled(made(OddRows), communication_dtype=ASKED[sent]), made(OddRows), ASKED[sent]
    for reduces_by_itself in (False, True):
        model.zero_grad()
        with model.no_sync():
            for step in (0, 1) if reduces_by_itself else (0,):
                model(*batch_of_rank(model, step)).backward()
        if reduces_by_itself:  # the backward of a model that is frozen takes nothing along
            model.requires_grad_(False)
            x, target = batch_of_rank(model, 2)
            model(x.requires_grad_(), target).backward()
            model.requires_grad_(True)
        else:
            model(*batch_of_rank(model, 1)).backward()
        for name, parameter in model.named_parameters():
            sums = []
            for rank in range(world_size):
                read = {
                    n: rounded(p.detach(), asked.gather_form).requires_grad_() for n, p in expected.named_parameters()
                }
                for step in (0, 1):
                    functional_call(expected, read, batch_of_rank(expected, step, rank)).backward()
                sums.append(rounded(read[name].grad, asked.reduce_form))
            torch.testing.assert_close(full(parameter.grad), torch.stack(sums).sum(0) / world_size, rtol=0, atol=1e-7)


@on_ranks(2)
def test_what_is_not_finite_on_one_rank_is_told_on_every_rank(world_size):
    model = compiled(made(OddRows), communication_dtype=INT8, check_gradients=True)
    x, target = batch_of_rank(model, 0)
    if dist.get_rank() == 1:
        x[0, 0] = torch.inf
    with pytest.raises(NonFiniteError, match=r"up\.weight"):
        model(x, target).backward()


@pytest.mark.parametrize("around", ["policy", "autocast"])
@on_ranks(2)
def test_parameters_are_rounded_from_their_own_dtype(world_size, around):
    """Integers are made of float32 shards, and become bfloat16 where they arrive."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mp_policy": policy} if around == "policy" else {}
    model, expected = compiled(made(OddRows), communication_dtype=INT8, **options), made(OddRows)
    autocast = torch.autocast(DEVICE.type, torch.bfloat16, enabled=around == "autocast")
    batch = batch_of_rank(model, 0)
    with autocast:
        loss = model(*batch)
    read = {name: rounded(one.detach(), "int8_blocks") for name, one in expected.named_parameters()}
    if around == "policy":
        read, batch = {name: one.bfloat16() for name, one in read.items()}, [each.bfloat16() for each in batch]
    with autocast:
        wanted = functional_call(expected, read, tuple(batch))
    torch.testing.assert_close(loss.detach().float(), wanted.detach().float(), rtol=0, atol=0)
    assert torch.int8 in messages(model)["all_gather"]


@on_ranks(4)
def test_what_tensor_parallelism_leaves_of_a_row_is_sent_so(world_size):
    root = root_mesh()
    wide, narrow = (by_tensor(Net(64), root["tp"]) for _ in range(2))
    compiled(wide, root["dp"])
    compiled(narrow, root["dp"], communication_dtype=INT8)
    rows = torch.randn(4, 4, 8, generator=seeded(dist.get_rank() // 2), device=DEVICE)
    losses = [model(rows).square().mean() for model in (wide, narrow)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=2e-2, atol=0)
    assert messages(narrow)["all_to_all"] == {torch.int8} and "all_to_all" not in messages(wide)
    for one, other in zip(wide.parameters(), narrow.parameters(), strict=True):
        wanted, found = full(one.grad), full(other.grad)
        assert (found - wanted).abs().mean() <= 0.02 * wanted.abs().max()  # a ReLU may be on the other side
