"""What a rank does in test_run.py: `python -m tests.emulation.on_rank RANK WORLD_SIZE STORE CASE`, as on a GPU.

It prints, as JSON, how far losses, gradients and parameters of the program that ran are from those of the eager model.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

from tests.emulation import cases


def main() -> None:
    rank, world_size, store, case, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world_size))
    found = getattr(cases, case)(*arguments)
    print("RESULT", json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
