"""What narrower messages would win: as the graphs that send them are predicted to take."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile import rewrite
from fsdp_compile.costs import HARDWARE, Link, explain, predict
from fsdp_compile.costs.narrower import narrower_steps

H100 = HARDWARE["h100"]
SLOW = dataclasses.replace(H100, between_nodes=dataclasses.replace(H100.between_nodes, bandwidth=1e9), ranks_per_node=1)
MODEL = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))


def rewritten(lowering="packed", rows=256, world_size=16, **options):
    x = torch.ones(rows, 512)
    options = {"auto_wrap_policy": {nn.Linear}, "collective_lowering": lowering, **options}
    return rewrite(MODEL, x, world_size=world_size, **options)


@pytest.mark.parametrize("hardware", [SLOW, dataclasses.replace(SLOW, ranks_per_node=8)], ids=["alone", "by eight"])
@pytest.mark.parametrize("lowering", ["packed", "grouped"])
def test_seconds_and_bytes_are_those_of_graphs_that_send_so(hardware, lowering):
    now = predict(rewritten(lowering), hardware)
    for found in narrower_steps(now):
        graphs = rewritten(lowering, communication_dtype=found.communication)
        wanted = predict(graphs, hardware)
        assert found.seconds == pytest.approx(wanted.seconds, rel=0.03)
        assert found.sent == pytest.approx(next(narrower_steps(wanted)).sent_now, rel=0.01)


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("lowering", ["packed", "grouped"])
def test_what_replicas_send_is_priced_as_graphs_that_send_so(lowering, replicas):
    hardware = dataclasses.replace(SLOW, ranks_per_node=4)
    world = {"world_size": (replicas, 4), "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    now = predict(rewritten(lowering, **world), hardware)
    found = {narrower.communication.all_reduce: narrower for narrower in narrower_steps(now)}
    for asked in (torch.bfloat16, "int8"):
        wanted = predict(rewritten(lowering, **world, communication_dtype=found[asked].communication), hardware)
        assert found[asked].seconds == pytest.approx(wanted.seconds, rel=0.05)  # but for the kernel that narrows
    assert found["int8"].seconds < now.seconds
    assert "CommunicationDtype(all_reduce='int8') would send" in str(explain([rewritten(lowering, **world)], hardware))


def test_an_explanation_says_so_where_communication_shows():
    fast = dataclasses.replace(H100, collective_start=0.0, within_node=Link(1e15, 0.0), between_nodes=Link(1e15, 0.0))
    assert "communication_dtype" not in str(explain([rewritten()], fast))
    text = str(explain([rewritten()], SLOW))
    assert "communication_dtype=CommunicationDtype(None, torch.bfloat16) would send" in text
    assert (
        "it changes parameters by 1/254 of the largest of 256 neighbours and gradients by 0.0039 of themselves" in text
    )
