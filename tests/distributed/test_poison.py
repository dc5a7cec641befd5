"""FSDP_COMPILE_POISON=1: with NaN in every buffer that is freed, training is that of the unsharded model."""

import pytest

from fsdp_compile import ConfigError, fsdp_compile
from fsdp_compile.passes import ops
from tests.distributed.test_fuzz import compare
from tests.distributed.training import assert_trains_as
from tests.models import build
from tests.ranks import on_ranks


def count(gm, target):
    return sum(ops.is_call(node, target) for node in gm.graph.nodes)


@pytest.mark.parametrize("lowering", ["packed", "grouped"])
@pytest.mark.parametrize(
    ("backend", "name"),
    [("aot_eager", "gpt"), ("aot_eager", "adapted"), ("inductor", "odd_parameters")],
)
@on_ranks(2)
def test_nothing_reads_what_was_freed(world_size, backend, name, lowering):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_COMPILE_POISON", "1")
        model = fsdp_compile(build(name), backend=backend, collective_lowering=lowering)
    assert_trains_as(model, build(name))
    (graphs,) = model.graphs
    for scheduled, lowered in (
        (graphs.forward.module, graphs.lowered.forward),
        (graphs.backward.module, graphs.lowered.backward),
    ):
        assert count(lowered, ops.POISON) >= count(scheduled, ops.FREE) > 0


@on_ranks(2)
def test_inductor_moves_no_matmul_past_the_free_of_what_it_reads(world_size):
    """It would, down to the addition of a residual."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_COMPILE_POISON", "1")
        compare(("residual", ("linear", False)), False, {"backend": "inductor"}, in_backward=False)


@on_ranks(4)
def test_what_is_kept_for_a_smaller_group_is_no_view_of_what_was_freed(world_size):
    """Inductor takes a copy for what it copies, which would keep all of the gathered buffer, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_COMPILE_POISON", "1")
        model = fsdp_compile(build("odd_mlp"), reshard_after_forward=2)
    assert_trains_as(model, build("odd_mlp"))


@on_ranks(1)
def test_the_setting_is_0_or_1(world_size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_COMPILE_POISON", "yes")
        with pytest.raises(ConfigError, match="FSDP_COMPILE_POISON is 0 or 1, not 'yes'"):
            fsdp_compile(build("odd_mlp"))
