"""What a rank of the suite does: `on_rank GROUP RANK WORLD_SIZE STORE CASE ...`, with the cases of cases.py.

GROUP is "nccl", "gloo", or "fake": torch's group of many ranks that are not there, whose messages are copies.

Over gloo ranks share a GPU. Its gathers of several tensors, which torch's functional collectives are, crash with those
of a GPU (pytorch/pytorch issue 152645); emulation's are made of plain ones.
"""

from __future__ import annotations

import faulthandler
import os
import sys

import torch
import torch.distributed as dist

from fsdp_compile.emulation import collectives
from tests.emulation import on_rank
from tests.gpu import cases
from tests.models import DEVICE
from tests.ranks import join_fake_group, use_device


def main() -> None:
    group, rank, world_size, store, *wanted = sys.argv[1:]
    faulthandler.dump_traceback_later(150, repeat=True)  # before it is killed, a case that hangs says where
    torch.set_num_threads(1)
    backend = use_device(int(rank))
    if group == "fake":
        join_fake_group(int(world_size))
    else:
        if group == "gloo" and DEVICE.type == "cuda":
            collectives.install("CUDA")
            backend = group
        dist.init_process_group(backend, init_method=f"file://{store}", rank=int(rank), world_size=int(world_size))
    on_rank.run(cases, wanted)
    os._exit(0)  # Python's own end may abort in a thread of gloo that drops its last tensor meanwhile


if __name__ == "__main__":
    main()
