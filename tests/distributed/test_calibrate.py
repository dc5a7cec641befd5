"""All ranks plan with the same description of the hardware."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from fsdp_compile import ConfigError
from fsdp_compile.costs import HARDWARE
from fsdp_compile.costs.calibrate import calibrate, check_same
from tests.ranks import on_ranks


@on_ranks(2)
def test_every_rank_gets_the_profile_of_rank_0(world_size):
    hardware = calibrate(torch.device("cpu"), name=f"as rank {dist.get_rank()} has it", ranks_per_node=2)
    assert hardware.name == "as rank 0 has it"
    check_same(hardware)


@on_ranks(2)
def test_descriptions_that_differ_are_refused_on_every_rank(world_size):
    mine = dataclasses.replace(HARDWARE["h100"], contention=1.0 + dist.get_rank())
    digests = [dataclasses.replace(mine, contention=contention).digest for contention in (1.0, 2.0)]
    with pytest.raises(ConfigError, match=rf"h100 \(digest {digests[0]}\) on rank 0, h100 \(digest {digests[1]}\)"):
        check_same(mine)
    check_same(HARDWARE["h100"])


@on_ranks(4)
def test_ranks_of_a_group_are_compared_with_each_other_only(world_size):
    group, _ = dist.new_subgroups(2)
    name = "h100" if dist.get_rank() < 2 else "h200"
    check_same(HARDWARE[name], group)
    with pytest.raises(ConfigError, match="h200"):
        check_same(HARDWARE[name])
