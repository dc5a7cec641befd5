"""Plans for the hardware at hand: it is measured once, and by default plans hold no more than without one."""

import contextlib
import dataclasses
import os
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compile import ConfigError, compat, fsdp_compile, shard
from fsdp_compile.costs import HARDWARE, Hardware, Link, at_hand
from fsdp_compile.costs.at_hand import hardware_at_hand
from fsdp_compile.costs.predict import predict
from fsdp_compile.module.sharding import sharding_of
from fsdp_compile.planning import step_plans
from tests.distributed.test_plans import SLOW
from tests.distributed.training import assert_trains_as, backend_of, batch_of_rank
from tests.models import DEVICE, build
from tests.ranks import on_ranks, session_directory

CPU = torch.device("cpu")


@contextlib.contextmanager
def a_new_machine(**environment):
    """Nothing is kept, and plans are made by default; gives the folder that all ranks keep profiles in."""
    folder = [tempfile.mkdtemp(dir=session_directory())]
    dist.broadcast_object_list(folder)
    found = {"XDG_CACHE_HOME": folder[0], "FSDP_COMPILE_HARDWARE": "", "LOCAL_WORLD_SIZE": str(dist.get_world_size())}
    with mock.patch.dict(os.environ, {**found, **environment}), started_again():
        yield Path(folder[0], "fsdp_compile")


def started_again():
    return mock.patch.dict(at_hand._known, clear=True)


def everyone():
    return init_device_mesh(DEVICE.type, (dist.get_world_size(),))


def watched(name):
    return mock.patch.object(at_hand, name, wraps=getattr(at_hand, name))


@on_ranks(2)
def test_a_host_is_measured_once_for_all_starts(world_size):
    with a_new_machine() as folder, watched("calibrate") as measured, watched("calibrate_network") as looked:
        random = torch.get_rng_state()
        found = hardware_at_hand(CPU, everyone(), 2)
        assert torch.equal(torch.get_rng_state(), random)  # or a first start would train otherwise than the next
        assert hardware_at_hand(CPU, everyone(), 2) is found
        dist.barrier()  # the first rank has kept it
        [profile] = folder.iterdir()
        assert Hardware.from_json(profile.read_text()) == found
        with started_again():
            assert hardware_at_hand(CPU, everyone(), 2) == found
        dist.barrier()
        profile.write_text("{")  # not whole
        with started_again():
            hardware_at_hand(CPU, everyone(), 2)
    assert (measured.call_count, looked.call_count) == (2, 0)
    profiles = [None, None]
    dist.all_gather_object(profiles, found)
    assert profiles[0] == profiles[1]


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def everything():
    """What a model may be sharded in."""
    autocast = torch.autocast(DEVICE.type, torch.bfloat16)
    with torch.inference_mode(), autocast, default_dtype(torch.bfloat16), torch.device("meta"):
        yield


@on_ranks(2)
def test_the_same_is_measured_wherever_a_model_is_sharded(world_size):
    seen = {}

    class Seen(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.is_floating_point():
                seen.setdefault((function, result.dtype, result.device))
            return result

    found = []
    for around in (contextlib.nullcontext, everything):
        seen.clear()
        with a_new_machine(), around(), Seen():
            hardware_at_hand(CPU, everyone(), 2)
        found.append(set(seen))
    assert found[0] == found[1]


@on_ranks(2)
def test_what_joins_hosts_is_looked_at_in_every_start(world_size):
    with a_new_machine() as folder, watched("calibrate") as measured:
        found = hardware_at_hand(CPU, everyone(), None)
        dist.barrier()
        [profile] = folder.iterdir()
        slower = dataclasses.replace(found, between_nodes=Link(found.between_nodes.bandwidth / 100, 0.0))
        dist.barrier()
        profile.write_text(slower.to_json())
        dist.barrier()
        with started_again():
            again = hardware_at_hand(CPU, everyone(), None)
        dist.barrier()
        assert again == Hardware.from_json(profile.read_text()) != slower
    assert again.between_nodes.bandwidth > 10 * slower.between_nodes.bandwidth
    assert (again.flops, again.memory_bandwidth) == (found.flops, found.memory_bandwidth)
    assert measured.call_count == 1


@on_ranks(4)
def test_a_part_of_the_ranks_is_planned_for_if_asked_and_measures_nothing(world_size):
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("pipe", "dp"))["dp"]
    with a_new_machine() as folder, watched("calibrate") as measured:
        with pytest.raises(ConfigError, match="a part of the ranks needs hardware="):
            shard(build("gpt"), mesh, memory_budget="1 GiB")
        found = hardware_at_hand(CPU, everyone(), 4)
        dist.barrier()
        assert list(folder.iterdir())
        assert sharding_of(shard(build("gpt"), mesh, memory_budget="1 GiB")).schedule.hardware == found
        assert sharding_of(shard(build("gpt"), mesh)).schedule.hardware is None
        assert sharding_of(shard(build("gpt"))).schedule.hardware == found
    assert measured.call_count == 1


@contextlib.contextmanager
def planning_by_default():
    """For a slow profile, on a machine where nothing is kept; gives the searches for plans that this rank makes.

    Of what it makes, plans are kept, and calls are not.
    """
    profile = [None]
    if dist.get_rank() == 0:
        profile = [tempfile.mkstemp(dir=session_directory())[1]]
        Path(profile[0]).write_text(SLOW.to_json())
    dist.broadcast_object_list(profile)
    watching = mock.patch.object(step_plans, "find_plan", wraps=step_plans.find_plan)
    without_calls = torch._functorch.config.patch(enable_autograd_cache=False)
    with a_new_machine(FSDP_COMPILE_HARDWARE=profile[0]) as folder, watching as searched, without_calls:
        yield folder, searched


@on_ranks(2)
def test_the_next_start_takes_the_plan_that_was_kept(world_size):
    is_first = dist.get_rank() == 0

    def plan(batch=4, **options):
        torch._dynamo.reset()
        model, inputs = build("gpt"), build("gpt").inputs(batch, 0)
        random = torch.get_rng_state()
        model = fsdp_compile(model, backend="aot_eager", **options)
        model(*inputs).backward()
        assert torch.equal(torch.get_rng_state(), random)
        return model.graphs[-1].plan

    with planning_by_default() as (folder, searched):
        first = plan()
        assert first is not None
        assert plan() == first
        assert searched.call_count == is_first
        plan(batch=8), plan(memory_budget="1 GiB"), plan(collective_lowering="grouped")  # other graphs, goals, options
        assert searched.call_count == 4 * is_first
        if is_first:
            kept = list(folder.glob("plan-*.json"))
            assert len(kept) == 4
            for path in kept:
                path.write_text("{}")  # by whoever it was
        dist.barrier()
        assert plan() == first
        assert searched.call_count == 5 * is_first


@on_ranks(2)
def test_by_default_a_plan_is_no_slower_and_holds_no_more_than_none(world_size):
    with planning_by_default(), watched("calibrate") as measured:
        model = fsdp_compile(build("gpt"), backend="aot_eager")
        assert_trains_as(model, build("gpt"))
        plain = fsdp_compile(build("gpt"), backend="aot_eager", hardware=False)
        plain(*batch_of_rank(plain, 0)).backward()
    assert not measured.called
    (graphs,), (without,) = model.graphs, plain.graphs
    assert graphs.plan is not None and without.plan is None
    planned, unplanned = (predict(each, SLOW) for each in (graphs, without))
    assert planned.seconds < unplanned.seconds
    assert planned.memory.peak.total <= unplanned.memory.peak.total
    assert "on slow" in str(model.explain()) and "planned" in str(model.explain())
    assert "as the options say" in str(plain.explain())


@on_ranks(2)
def test_what_the_user_decides_is_not_planned_by_default(world_size):
    def hardware(options):
        return sharding_of(shard(build("gpt"), **options)).schedule.hardware

    with a_new_machine(FSDP_COMPILE_HARDWARE="h100"):
        assert hardware({}) == HARDWARE["h100"]
        assert hardware({"reshard_after_forward": True}) == HARDWARE["h100"]
        for options in ({"hardware": False}, {"hardware": None}, {"forward_prefetch": 2}, {"backward_prefetch": None}):
            assert hardware(options) is None
        model = build("gpt")
        compat.fully_shard(model.blocks[0], backend="aot_eager")
        compat.fully_shard(model, backend="aot_eager")
        assert sharding_of(model).schedule.hardware == HARDWARE["h100"]
        model.set_modules_to_forward_prefetch([model.blocks[0]])
        assert sharding_of(model).schedule.hardware is None
        model = shard(build("gpt"), hardware="h100")
        with pytest.raises(ConfigError, match="contradict the schedule, which is planned"):
            sharding_of(model).schedule.unplanned("this")
    with (
        a_new_machine(FSDP_COMPILE_HARDWARE="h1000"),
        pytest.raises(ConfigError, match="'h1000' is neither a file nor"),
    ):
        shard(build("gpt"))


@on_ranks(2)
def test_several_models_in_one_graph_are_not_planned_and_a_budget_for_them_is_refused(world_size):
    def losses_of(**options):
        models = [shard(build("odd_mlp"), **options) for _ in range(2)]
        batch = batch_of_rank(models[0], 0)
        both = torch.compile(lambda: [model(*batch) for model in models], backend=backend_of(models[0]))
        return both()

    with a_new_machine(FSDP_COMPILE_HARDWARE="h100"):
        first, second = losses_of()
        torch.testing.assert_close(first, second)
        with pytest.raises(Exception, match="plan for one model, and several are compiled into one graph"):
            losses_of(memory_budget="1 GiB")
