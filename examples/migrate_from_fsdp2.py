"""A training script written for FSDP2, which runs as one compiled program when one import is changed.

    torchrun --nproc-per-node 2 examples/migrate_from_fsdp2.py --torch       # torch.distributed.fsdp
    torchrun --nproc-per-node 2 examples/migrate_from_fsdp2.py               # fsdp_compile.compat
    torchrun --nproc-per-node 2 examples/migrate_from_fsdp2.py --compare     # both, and their losses side by side

`import_fully_shard` is the only place that knows which of the two it is. The rest is what scripts for FSDP2 do: units
from the bottom up, accumulated gradients of which the last micro-batch reduces all, clipping through torch.nn.utils,
a checkpoint through torch.distributed.checkpoint.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from train_gpt import GPT, GPTConfig, Ranks, compare, find_device, find_ranks, read_text, training_batch, warm_up


def import_fully_shard(options: argparse.Namespace, *, from_torch: bool) -> Callable[..., nn.Module]:
    if from_torch:
        from torch.distributed.fsdp import fully_shard
    else:
        from fsdp_compile.compat import fully_shard

        return functools.partial(fully_shard, backend=options.backend)
    return fully_shard


def build_model(
    fully_shard: Callable[..., nn.Module], mesh: DeviceMesh, options: argparse.Namespace, device: torch.device
) -> nn.Module:
    torch.manual_seed(0)  # the same values on every rank
    model = GPT(GPTConfig(seq=options.seq, dim=options.dim, layers=options.layers)).to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def training_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: list[tuple[Tensor, Tensor]], ranks: Ranks
) -> Tensor:
    """The mean loss of this rank's rows of all micro-batches."""
    losses = []
    for number, batch in enumerate(micro_batches, start=1):
        model.set_requires_gradient_sync(number == len(micro_batches))
        loss = model(*ranks.rows(batch)) / len(micro_batches)
        loss.backward()
        losses.append(loss.detach())
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses).sum()


def train(
    fully_shard: Callable[..., nn.Module], mesh: DeviceMesh, options: argparse.Namespace, folder: Path
) -> dict[int, float]:
    """The loss of every step, the mean over the global batch; half-way, all begins anew from a checkpoint."""
    device = find_device()
    ranks = find_ranks(options.batch, device)
    data, _ = read_text()
    losses: dict[int, float] = {}
    half = options.steps // 2
    for steps in (range(1, half + 1), range(half + 1, options.steps + 1)):
        model = build_model(fully_shard, mesh, options, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95))
        if losses:
            load_checkpoint(folder, model, optimizer)
        for step in steps:
            warm_up(optimizer, options.lr, step)
            first = (step - 1) * options.accumulate
            numbers = range(first, first + options.accumulate)
            micro_batches = [training_batch(data, number, options.batch, options.seq) for number in numbers]
            [losses[step]] = ranks.mean(training_step(model, optimizer, micro_batches, ranks))
        if steps.start == 1:
            save_checkpoint(folder, model, optimizer)
    return losses


def save_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)


def load_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


def train_in_a_folder_of_its_own(
    options: argparse.Namespace, mesh: DeviceMesh, console: Console, *, from_torch: bool
) -> dict[int, float]:
    fully_shard = import_fully_shard(options, from_torch=from_torch)
    with TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared)  # the ranks of one machine write their checkpoint to the first one's
        losses = train(fully_shard, mesh, options, Path(shared[0]))
        dist.barrier()
    name = "torch.distributed.fsdp" if from_torch else "fsdp_compile.compat"
    console.print(f"{name}: loss {losses[1]:.4f} at step 1, {losses[options.steps]:.4f} at step {options.steps}")
    return losses


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--torch", action="store_true", help="train with torch's fully_shard")
    add("--compare", action="store_true", help="train with both; exit status 1 if a loss differs by over 1e-4")
    add("--steps", type=int, default=20)
    add("--batch", type=int, default=8, help="rows of a micro-batch, of all ranks together")
    add("--accumulate", type=int, default=2, help="micro-batches in a step")
    add("--seq", type=int, default=64, help="bytes in a row")
    add("--dim", type=int, default=128)
    add("--layers", type=int, default=2)
    add("--lr", type=float, default=1e-3)
    add("--backend", default="inductor", choices=["inductor", "aot_eager"], help="of fsdp_compile")
    return parser.parse_args()


def main() -> None:
    options = parse()
    device = find_device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    console = Console(quiet=dist.get_rank() != 0, highlight=False)
    losses = train_in_a_folder_of_its_own(options, mesh, console, from_torch=options.torch)
    if options.compare:
        others = train_in_a_folder_of_its_own(options, mesh, console, from_torch=not options.torch)
        if compare(losses, others, console) > 1e-4:
            raise SystemExit("the losses differ by more than 1e-4")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
