"""Plan a training run before there is a machine for it: time, memory and what limits them, from the rewritten graphs.

    python examples/plan_a_run.py                       # Llama 3 8B on 8 to 64 H100
    python examples/plan_a_run.py --config small --hardware a100-80

Everything happens on the meta device: no GPU, no process group, no parameter in memory. The same from a shell:

    python -m fsdp_compile plan examples/llama.py:llama3_8b --gpus 8 64 --seq 8192 --hardware h100
"""

from __future__ import annotations

import argparse

from rich.console import Console
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile import rewrite
from fsdp_compile.costs import explain, find_hardware
from llama import inputs, llama3_8b, llama_small


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="8b", choices=["8b", "small"])
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--seq", type=int, default=4096)
    options = parser.parse_args()

    console = Console(width=110)
    hardware = find_hardware(options.hardware)
    for gpus in options.gpus:
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
            model = llama3_8b() if options.config == "8b" else llama_small()
            graphs = rewrite(
                model,
                *inputs(1, options.seq),
                world_size=gpus,
                sharding_strategy=strategy,
                collective_lowering="grouped",  # as on NCCL
            )
            found = explain([graphs], hardware)
            (prediction,) = found.predictions
            speed = options.seq / prediction.seconds
            fits = "fits" if prediction.memory.peak.total <= hardware.memory else "does not fit"
            console.rule(f"{strategy.name} on {gpus} x {hardware.name}: {speed:.0f} tokens/s a GPU, {fits}")
            console.print(str(found), highlight=False)


if __name__ == "__main__":
    main()
