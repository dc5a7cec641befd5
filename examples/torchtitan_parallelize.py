"""A parallelize_fn for torchtitan that shards and compiles its model with fsdp_compile.

    spec = dataclasses.replace(spec, parallelize_fn=parallelize)      # of torchtitan.protocols.model_spec.ModelSpec

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/torchtitan_parallelize.py

The second line runs it without torchtitan, on a small model: `parallel_dims` and the configurations are stand-ins,
with the attributes that are read here. With torchtitan itself it has not been run.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from fsdp_compile import fsdp_compile


def parallelize(
    model: nn.Module,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    ac_config: Any,
    backend: str = "inductor",
    **_: Any,  # compile_config, model_converters, dump_folder: nothing here depends on them
) -> nn.Module:
    """What torchtitan calls with a model on the meta device, before it gives the parameters memory and values."""
    for name in ("tp", "cp", "pp", "ep"):
        if getattr(parallel_dims, f"{name}_enabled"):
            raise ValueError(f"fsdp_compile shards over data-parallel ranks only: set the degree of {name} to 1")
    if ac_config.mode != "none":
        raise ValueError("this parallelize_fn applies no activation checkpointing: set its mode to none")
    names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    dtypes = (getattr(torch, name) for name in (training.mixed_precision_param, training.mixed_precision_reduce))
    return fsdp_compile(
        model,
        parallel_dims.get_mesh(names),
        mp_policy=MixedPrecisionPolicy(*dtypes),
        offload_policy=CPUOffloadPolicy() if training.enable_cpu_offload else None,
        reshard_after_forward={"always": True, "never": False}.get(parallelism.fsdp_reshard_after_forward),
        gradient_reduction="sum",  # torchtitan divides its loss by the number of tokens of all ranks
        backend=backend,
    )


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    dims = dict.fromkeys(["tp_enabled", "cp_enabled", "pp_enabled", "ep_enabled", "dp_replicate_enabled"], False)
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 64))
    parallelize(
        model,
        parallel_dims=SimpleNamespace(**dims, get_mesh=lambda names: mesh[tuple(names)]),
        training=SimpleNamespace(
            mixed_precision_param="float32", mixed_precision_reduce="float32", enable_cpu_offload=False
        ),
        parallelism=SimpleNamespace(fsdp_reshard_after_forward="default"),
        ac_config=SimpleNamespace(mode="none"),
        backend="aot_eager",
    )
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(64, (8,), generator=torch.Generator().manual_seed(dist.get_rank()))
    num_tokens = 8 * dist.get_world_size()
    for step in range(5):
        loss = nn.functional.cross_entropy(model(tokens), tokens, reduction="sum") / num_tokens
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {total.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
