"""Train a GPT on the English text inside CPython, its parameters sharded over the ranks.

    torchrun --nproc-per-node 2 examples/train_gpt.py
    python examples/train_gpt.py                        # world size 1
    python examples/train_gpt.py --reference            # the same training without fsdp_compile

The data order is a function of the step alone and every rank reads its rows of the same global batch. So the
losses of any world size, of the unsharded model and of a training resumed from its checkpoint are the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data import topics
from typing import TextIO

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from fsdp_compile import fsdp_compile
from fsdp_compile.costs.calibrate import calibrate

# ----------------------------------------------------------------------------------------------------------
# The model: bytes in, the mean cross entropy (nats per byte) out


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    seq: int
    dim: int
    layers: int
    head_dim: int = 64
    vocab: int = 256


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        dim = config.dim
        self.num_heads = dim // config.head_dim
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))

    def attention(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).transpose(1, 3)
        q, k, v = heads.unbind(2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.position = nn.Embedding(config.seq, config.dim)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


# ----------------------------------------------------------------------------------------------------------
# The data: about 460 kB of English prose, the last tenth held out


def read_text() -> tuple[Tensor, Tensor]:
    """(training bytes, held-out bytes), each a 1-D int64 tensor."""
    text = "\n".join(topics.topics.values()).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    num_training = len(data) * 9 // 10
    return data[:num_training], data[num_training:]


def training_batch(data: Tensor, step: int, batch: int, seq: int) -> tuple[Tensor, Tensor]:
    """(tokens, targets) of the whole global batch, int64[batch, seq], a function of the step alone."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(data) - seq, (batch,), generator=generator)
    windows = data[starts[:, None] + torch.arange(seq + 1)]
    return windows[:, :-1], windows[:, 1:]


def held_out_batches(data: Tensor, batch: int, seq: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Global batches that cover the held-out bytes once, but for the rest that fills no batch."""
    num_batches = (len(data) - 1) // (batch * seq)
    assert num_batches > 0, f"a batch of {batch} windows of {seq} bytes is more than the held-out text"
    tokens = data[: num_batches * batch * seq].view(num_batches, batch, seq)
    targets = data[1 : num_batches * batch * seq + 1].view(num_batches, batch, seq)
    return zip(tokens, targets, strict=True)


# ----------------------------------------------------------------------------------------------------------
# Ranks: who I am, my rows of a batch, the mean of a number


@dataclasses.dataclass(frozen=True)
class Ranks:
    rank: int
    world_size: int
    device: torch.device

    def rows(self, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
        return [part.chunk(self.world_size)[self.rank].to(self.device) for part in batch]

    def mean(self, *values: float | Tensor) -> list[float]:
        """The mean over the ranks of each value."""
        total = torch.stack([torch.as_tensor(value, device=self.device).double() for value in values])
        if self.world_size > 1:
            dist.all_reduce(total)
        return (total / self.world_size).tolist()


def find_ranks(batch: int, device: torch.device) -> Ranks:
    """To be called after `fsdp_compile`, which initialises the process group where torchrun started us."""
    if not dist.is_initialized():
        return Ranks(0, 1, device)
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), device)
    if batch % ranks.world_size:
        raise SystemExit(f"--batch {batch} cannot be divided among {ranks.world_size} ranks")
    return ranks


def find_device() -> torch.device:
    """A GPU of this rank's own where there are enough of them, else the CPU."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


# ----------------------------------------------------------------------------------------------------------
# What a rank holds


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind the tensors: what this rank holds, padding included."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}.values())


def full_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def memory_table(model: nn.Module, optimizer: torch.optim.Optimizer, world_size: int) -> Table:
    """Gradients are those of the last step: `training_step` clears them only before the next."""
    parameters = list(model.parameters())
    kinds = {
        "parameters": parameters,
        "gradients": [p.grad for p in parameters if p.grad is not None],
        "optimizer state": [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)],
    }
    table = Table(title=f"bytes, world size {world_size}")
    for column in ("", "this rank", "unsharded", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    for kind, tensors in kinds.items():
        held, full = held_bytes(tensors), full_bytes(tensors)
        table.add_row(kind, f"{held:,}", f"{full:,}", f"{held / full:.3f}")
    return table


def write_graphs(model: nn.Module, folder: Path) -> None:
    """The rewritten graphs of the training step and its schedule, as text."""
    graphs = next(graphs for graphs in model.graphs if graphs.backward is not None)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "forward.txt").write_text(f"{graphs.forward}\n")
    (folder / "backward.txt").write_text(f"{graphs.backward}\n")
    (folder / "schedule.txt").write_text(f"{graphs.schedule()}\n")


# ----------------------------------------------------------------------------------------------------------
# Checkpoints: torch.distributed.checkpoint, never half written


@dataclasses.dataclass
class Progressed:
    """How far the training has come."""

    step: int = 0
    seconds: float = 0.0


def latest_checkpoint(folder: Path) -> Path | None:
    complete = sorted(folder.glob("step-??????"))
    return complete[-1] if complete else None


def save_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, done: Progressed) -> None:
    """Written beside its place, then renamed: a killed run leaves the checkpoint before as the latest."""
    place = folder / f"step-{done.step:06}"
    beside = place.with_suffix(".partial")
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "done": dataclasses.asdict(done)}
    dcp.save(state, checkpoint_id=beside)
    if not dist.is_initialized() or dist.get_rank() == 0:
        beside.rename(place)
        for older in sorted(folder.glob("step-??????"))[:-2]:
            shutil.rmtree(older)


def load_checkpoint(place: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progressed:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    done = dataclasses.asdict(Progressed())
    state = {"model": model_state, "optimizer": optimizer_state, "done": done}
    dcp.load(state, checkpoint_id=place)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return Progressed(**state["done"])


# ----------------------------------------------------------------------------------------------------------
# What is printed and logged, by rank 0 only


class Report:
    def __init__(self, options: argparse.Namespace, rank: int, done: Progressed) -> None:
        self.console = Console(quiet=rank != 0, highlight=False)
        self.progress = Progress(
            *Progress.get_default_columns(), TextColumn("{task.fields[rate]}"), console=self.console
        )
        self.bar = self.progress.add_task("training", total=options.steps, completed=done.step, rate="")
        self.losses: dict[int, float] = {}
        self.log = open_log(options.losses, done.step) if options.losses and rank == 0 else None

    def training_loss(self, step: int, loss: float, tokens_per_second: float) -> None:
        self.losses[step] = loss
        if self.log:
            print(json.dumps({"step": step, "loss": loss}), file=self.log, flush=True)
        self.progress.update(self.bar, completed=step, rate=f"loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s")
        if step <= 20 or step % 50 == 0:
            self.console.print(f"step {step:5}  loss {loss:.6f}  {tokens_per_second:9,.0f} tokens/s")

    def held_out_loss(self, done: Progressed, loss: float) -> None:
        self.console.print(
            f"step {done.step:5}  held-out loss {loss:.4f} nats/byte after {done.seconds:.0f} s of training"
        )


def read_losses(log: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


def open_log(log: Path, num_steps_done: int) -> TextIO:
    """The log to append to, cut back to the steps that the checkpoint holds."""
    log.parent.mkdir(parents=True, exist_ok=True)
    earlier = read_losses(log) if num_steps_done and log.exists() else {}
    file = log.open("w")
    for step, loss in earlier.items():
        if step <= num_steps_done:
            print(json.dumps({"step": step, "loss": loss}), file=file)
    return file


def compare(losses: dict[int, float], others: dict[int, float], console: Console) -> float:
    """Print both losses of the steps in common and return the largest difference."""
    table = Table(title="loss, mean over the global batch")
    for column in ("step", "this run", "the run compared with", "difference"):
        table.add_column(column, justify="right")
    steps = sorted(losses.keys() & others.keys())
    differences = [abs(losses[step] - others[step]) for step in steps]
    for step, difference in zip(steps, differences, strict=True):
        table.add_row(str(step), f"{losses[step]:.7f}", f"{others[step]:.7f}", f"{difference:.1e}")
    console.print(table)
    console.print(f"largest difference over {len(steps)} steps: {max(differences):.1e}")
    return max(differences)


# ----------------------------------------------------------------------------------------------------------
# The training


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(tokens, targets)
    loss.backward()
    optimizer.step()
    return loss.detach()


def warm_up(optimizer: torch.optim.Optimizer, lr: float, step: int, num_steps: int = 20) -> None:
    """Linear, then constant: a function of the step alone, so longer trainings begin like shorter ones."""
    for group in optimizer.param_groups:
        group["lr"] = lr * min(1.0, step / num_steps)


@torch.no_grad()
def evaluate(model: nn.Module, data: Tensor, options: argparse.Namespace, ranks: Ranks) -> float:
    """The mean held-out loss, nats per byte."""
    batches = held_out_batches(data, options.batch, options.seq)
    losses = torch.stack([model(*ranks.rows(batch)) for batch in batches])
    return ranks.mean(losses.mean())[0]


def has_ended(done: Progressed, options: argparse.Namespace) -> bool:
    return done.step >= options.steps or done.seconds > options.time_limit


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    done: Progressed,
    options: argparse.Namespace,
    ranks: Ranks,
    report: Report,
) -> None:
    training, held_out = read_text()
    report.held_out_loss(done, evaluate(model, held_out, options, ranks))
    if has_ended(done, options):
        return
    begin = time.perf_counter() - done.seconds
    first = done.step + 1
    for step in range(first, options.steps + 1):
        warm_up(optimizer, options.lr, step)
        batch = ranks.rows(training_batch(training, step, options.batch, options.seq))
        step_begin = time.perf_counter()
        loss = training_step(model, optimizer, *batch)
        # The times are means too: so all ranks stop at the same step.
        now = time.perf_counter()
        mean_loss, done.seconds, seconds = ranks.mean(loss, now - begin, now - step_begin)
        done.step = step
        report.training_loss(step, mean_loss, options.batch * options.seq / seconds)
        if options.out and step == first and not options.reference:
            if ranks.rank == 0:
                write_graphs(model, options.out)
            report.console.print(f"graphs and schedule written to {options.out}")
        last = has_ended(done, options)
        if last or step % options.eval_every == 0:
            report.held_out_loss(done, evaluate(model, held_out, options, ranks))
        if options.checkpoint and (last or step % options.checkpoint_every == 0):
            save_checkpoint(options.checkpoint, model, optimizer, done)
        if last:
            return


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=600)
    add("--batch", type=int, default=16, help="rows of the global batch, of all ranks together")
    add("--seq", type=int, default=128, help="bytes in a row")
    add("--dim", type=int, default=256)
    add("--layers", type=int, default=4)
    add("--lr", type=float, default=1e-3)
    add("--time-limit", type=float, default=float("inf"), help="seconds of training, resumed ones included")
    add("--eval-every", type=int, default=100, help="steps between held-out losses")
    add("--backend", default="inductor", choices=["inductor", "aot_eager"])
    add("--checkpoint", type=Path, help="folder to save to, and to resume from where it holds a checkpoint")
    add("--checkpoint-every", type=int, default=100, help="steps between checkpoints")
    add("--out", type=Path, help="folder for the rewritten graphs and the schedule as text, and the report")
    # Not --log: torchrun takes that for an abbreviation of its own options.
    add("--losses", type=Path, help="file for the loss of every step, one JSON object a line")
    add(
        "--compare",
        type=Path,
        help="such a file of another run; exit status 1 if a loss differs by over 1e-4",
    )
    add("--reference", action="store_true", help="train the unsharded model in this one process")
    return parser.parse_args()


def build_model(options: argparse.Namespace, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = GPT(GPTConfig(seq=options.seq, dim=options.dim, layers=options.layers)).to(device)
    return model if options.reference else fsdp_compile(model, backend=options.backend)


def main() -> None:
    options = parse()
    device = find_device()
    model = build_model(options, device)
    ranks = find_ranks(options.batch, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95))

    done = Progressed()
    place = latest_checkpoint(options.checkpoint) if options.checkpoint else None
    if place is not None:
        done = load_checkpoint(place, model, optimizer)
    report = Report(options, ranks.rank, done)
    if place is not None:
        report.console.print(f"resumed from {place}" + (": nothing left to do" if has_ended(done, options) else ""))

    with report.progress:
        train(model, optimizer, done, options, ranks, report)
    if done.step < options.steps:
        report.console.print(f"ended after step {done.step}, for {options.time_limit:.0f} s are over (--time-limit)")
    if report.losses and not options.reference:
        report.console.print(memory_table(model, optimizer, ranks.world_size))
        if options.out:
            hardware = calibrate(device)  # by all ranks
            if ranks.rank == 0:
                model.explain(hardware, html=options.out / "report.html")
            report.console.print(f"report written to {options.out / 'report.html'}")
    if options.compare and compare(report.losses, read_losses(options.compare), report.console) > 1e-4:
        raise SystemExit("the losses differ by more than 1e-4")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
