"""Train nine convolution layers in three units on scikit-learn's digits, sharded over the ranks.

    torchrun --nproc-per-node 3 examples/train_digits.py

BatchNorm normalises with the statistics of a rank's own rows, as in DistributedDataParallel without
SyncBatchNorm, so each rank has running statistics of its own; they are averaged before the test. Few of the
layers' numbers of channels can be divided by three: the shards of a unit are padded to the same length.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from sklearn.datasets import load_digits
from torch import Tensor, nn

from fsdp_compile import fsdp_compile
from train_gpt import Ranks, find_device, find_ranks, memory_table


def convolution(num_in: int, num_out: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(num_in, num_out, kernel_size=3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(num_out),
        nn.ReLU(),
    )


class Stage(nn.Sequential):
    """Three convolution layers: one unit."""

    def __init__(self, num_in: int, num_hidden: int, num_out: int, stride: int) -> None:
        super().__init__(
            convolution(num_in, num_hidden, stride),
            convolution(num_hidden, num_hidden, stride=1),
            convolution(num_hidden, num_out, stride=1),
        )


class ConvNet(nn.Module):
    """f32[batch, 1, 8, 8] images to f32[batch, 10] logits, the means over the last layer's channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(
            Stage(1, 32, 32, stride=1), Stage(32, 64, 64, stride=2), Stage(64, 64, 10, stride=2)
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.stages(images).mean((2, 3))


def read_digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(images, labels) for training and for the test, every fifth one in random order."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16 - 0.5, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, training = order[::5], order[torch.arange(len(order)) % 5 != 0]
    return (images[training], labels[training]), (images[test], labels[test])


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: tuple[Tensor, Tensor],
    batch: int,
    epoch: int,
    ranks: Ranks,
) -> float:
    """The mean loss over the epoch and the ranks."""
    order = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(epoch))
    num_batches = len(order) // batch
    losses = []
    for chosen in order[: num_batches * batch].view(num_batches, batch):
        images, labels = ranks.rows((data[0][chosen], data[1][chosen]))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return ranks.mean(torch.stack(losses).mean())[0]


def average_statistics(model: nn.Module, ranks: Ranks) -> None:
    """Give every rank the mean of the running statistics of all."""
    for buffer in model.buffers():
        if buffer.is_floating_point() and ranks.world_size > 1:
            dist.all_reduce(buffer)
            buffer /= ranks.world_size


@torch.no_grad()
def accuracy(model: nn.Module, data: tuple[Tensor, Tensor], ranks: Ranks) -> float:
    """The fraction of right answers; every rank answers for its rows."""
    images, labels = ranks.rows(data)
    model.eval()
    num_right = (model(images).argmax(1) == labels).sum()
    model.train()
    return ranks.mean(num_right)[0] * ranks.world_size / len(data[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=96, help="images of the global batch, of all ranks together")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--backend", default="inductor", choices=["inductor", "aot_eager"])
    options = parser.parse_args()

    torch.manual_seed(0)
    device = find_device()
    model = fsdp_compile(ConvNet().to(device), auto_wrap_policy=[Stage], backend=options.backend)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    ranks = find_ranks(options.batch, device)
    console = Console(quiet=ranks.rank != 0, highlight=False)

    training, test = read_digits()
    for epoch in range(options.epochs):
        loss = train_epoch(model, optimizer, training, options.batch, epoch, ranks)
        console.print(f"epoch {epoch:2}  loss {loss:.4f}")
    average_statistics(model, ranks)
    console.print(f"test accuracy {accuracy(model, test, ranks):.4f}")
    console.print(memory_table(model, optimizer, ranks.world_size))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
