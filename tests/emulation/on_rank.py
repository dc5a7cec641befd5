"""What a rank of test_run.py does, as on a GPU: `on_rank RANK WORLD_SIZE STORE CASE ...`, a case `name argument ...`.

It prints what each case found, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.emulation import cases


def main() -> None:
    rank, world_size, store, *wanted = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world_size))
    run(cases, wanted)
    os._exit(0)  # Python's own end may abort in a thread of gloo that drops its last tensor meanwhile


def run(cases: Any, wanted: Sequence[str]) -> None:
    """Run functions of a module, one after another, until one raises."""
    for line in wanted:
        name, *arguments = line.split()
        torch._dynamo.reset()
        begin = time.perf_counter()
        try:
            found = getattr(cases, name)(*arguments)
        except Exception as e:
            traceback.print_exc()
            found = {"error": repr(e)[:400], "traceback": traceback.format_exc()}
        seconds = round(time.perf_counter() - begin)
        print("RESULT", json.dumps({"case": line, "seconds": seconds, **found}), flush=True)
        if "error" in found:
            break
        dist.barrier()


if __name__ == "__main__":
    main()
