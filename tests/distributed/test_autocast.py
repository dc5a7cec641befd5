"""Under autocast: training is that of the unsharded model, and what is used as bf16 travels as bf16."""

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from fsdp_compile import fsdp_compile
from fsdp_compile.passes import commute_casts, ops
from tests.distributed.training import first_rows, full, sgd
from tests.models import DEVICE, MODELS, build
from tests.ranks import on_ranks

ONCE = [
    name for name in MODELS if name not in ("called_twice", "gpt", "graph_break")
]  # eager adds bf16 where we add fp32
AROUND = torch.autocast(DEVICE.type, torch.bfloat16)


def train(model, steps=2):
    """Losses and gradients of steps of SGD under autocast."""
    optimizer, found = sgd(model.parameters()), []
    for step in range(steps):
        with AROUND:
            loss = model(*first_rows(model, step))
        loss.backward()
        found += [loss.detach(), *(None if one.grad is None else full(one.grad).clone() for one in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return found


def assert_equal(found, expected):
    """To the last bit."""
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def gathered_dtypes(model):
    sides = [side for graphs in model.graphs for side in (graphs.forward, graphs.backward)]
    return [node.meta["val"].dtype for side in sides for node in side.graph.nodes if ops.is_all_gather(node)]


@pytest.mark.parametrize("name", ONCE)
@on_ranks(2)
def test_without_generated_code_training_is_that_of_eager_to_the_last_bit(world_size, name):
    model, expected = fsdp_compile(build(name), backend="aot_eager"), build(name)
    for parameter in expected.parameters():
        parameter.data = parameter.data.contiguous()
    assert_equal(train(model), train(expected))


OPTIONS = {
    "plain": {},
    "grouped": {"collective_lowering": "grouped"},
    "kept": {"reshard_after_forward": False},
    "planned": {"hardware": "h100"},
    "offloaded": {"offload_policy": CPUOffloadPolicy()},
    "poisoned": {},
}


CASES = [("aot_eager", "gpt", option) for option in OPTIONS]
CASES += [("inductor", "odd_parameters", "poisoned")]


@pytest.mark.parametrize(("backend", "name", "option"), CASES)
@on_ranks(2)
def test_casts_before_gathers_change_nothing_to_the_last_bit(world_size, backend, name, option):
    # Inductor would leave out the rounding of a value that it casts and computes with in one kernel.
    inductor = {"options": {"emulate_precision_casts": True}} if backend == "inductor" else {}
    options = inductor | OPTIONS[option]
    with pytest.MonkeyPatch.context() as patch:
        if option == "poisoned":
            patch.setenv("FSDP_COMPILE_POISON", "1")
        model, wide = (fsdp_compile(build(name), backend=backend, **options) for _ in range(2))
        found = train(model)
        patch.setattr(commute_casts, "narrow_reads", lambda graph, parted: {})
        with torch.compiler.config.patch(force_disable_caches=True):  # they know nothing of that
            expected = train(wide)
    assert_equal(found, expected)
    assert set(gathered_dtypes(wide)) == {torch.float32}
    assert torch.bfloat16 in gathered_dtypes(model)
