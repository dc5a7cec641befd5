"""Step time of fsdp_compile at world size 1 against plain torch.compile of the same GPT.

    python benchmarks/world_size_one.py
    python benchmarks/world_size_one.py --dim 64 --layers 12 --batch 1      # little compute: overhead shows

Both models live in one process and take turns: each round times a few whole steps (forward, backward, AdamW)
of one and then of the other, the first being the other one in the next round. The ratio is taken within a
round, where both meet the same state of the machine, and the median of the rounds is what to read.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from harness import spread
from torch import nn

from fsdp_compile import fsdp_compile

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from train_gpt import GPT, GPTConfig, find_device, read_text, training_batch, training_step


class Subject:
    """A model, its optimizer and how many steps it has done."""

    def __init__(self, name: str, model: nn.Module, options: argparse.Namespace, device: torch.device) -> None:
        self.name = name
        self.model = model
        self.options = options
        self.device = device
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.data = read_text()[0]
        self.num_steps = 0
        self.loss = float("nan")

    def seconds_per_step(self, num_steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(num_steps):
            self.num_steps += 1
            batch = training_batch(self.data, self.num_steps, self.options.batch, self.options.seq)
            loss = training_step(self.model, self.optimizer, *(part.to(self.device) for part in batch))
        self.loss = loss.item()  # waits for the device
        return (time.perf_counter() - begin) / num_steps


def build_subjects(options: argparse.Namespace, device: torch.device) -> list[Subject]:
    """The same initial values twice, compiled in the two ways."""
    config = GPTConfig(seq=options.seq, dim=options.dim, layers=options.layers)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(GPT(config).to(device))
    return [
        Subject("torch.compile", torch.compile(models[0], backend=options.backend), options, device),
        Subject("fsdp_compile", fsdp_compile(models[1], backend=options.backend), options, device),
    ]


def measure(subjects: list[Subject], num_rounds: int, num_steps: int) -> dict[str, list[float]]:
    """Seconds per step of each subject in each round."""
    seconds: dict[str, list[float]] = {subject.name: [] for subject in subjects}
    for number in range(num_rounds):
        for subject in subjects if number % 2 == 0 else reversed(subjects):
            seconds[subject.name].append(subject.seconds_per_step(num_steps))
    return seconds


def summarize(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    plain, ours = seconds["torch.compile"], seconds["fsdp_compile"]
    summary = {f"{name}, ms": spread([1e3 * value for value in values]) for name, values in seconds.items()}
    summary["ratio in a round"] = spread([b / a for a, b in zip(plain, ours, strict=True)])
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=3, help="steps of each in a round")
    parser.add_argument("--warm-up", type=int, default=5, help="steps of each before the first round")
    parser.add_argument("--backend", default="inductor", choices=["inductor", "aot_eager"])
    options = parser.parse_args()

    device = find_device()
    subjects = build_subjects(options, device)
    for subject in subjects:
        subject.seconds_per_step(options.warm_up)
    summary = summarize(measure(subjects, options.rounds, options.steps))

    print(f"{options.rounds} rounds of {options.steps} steps, {device}")
    print(f"{'':20}{'median':>10}{'p10':>10}{'p90':>10}")
    for name, row in summary.items():
        print(f"{name:20}" + "".join(f"{row[column]:10.3f}" for column in ("median", "p10", "p90")))
    print("last loss           " + "".join(f"{subject.loss:10.5f}" for subject in subjects))
    print(json.dumps({"options": vars(options), "device": str(device), "torch": torch.__version__, **summary}))


if __name__ == "__main__":
    main()
