"""Fine-tune a Llama of transformers with LoRA adapters of peft, its parameters sharded over the ranks.

    torchrun --nproc-per-node 2 examples/finetune_lora.py
    torchrun --nproc-per-node 2 examples/finetune_lora.py --base int8   # which is gathered as int8, too
    python examples/finetune_lora.py                    # world size 1

Nothing is downloaded. A small base model first learns the English text inside CPython and is saved as transformers
saves its models. Adapters on the frozen base then learn Python, from the source code of the standard library, and are
saved as peft saves them. At the end both are loaded without fsdp_compile.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_compile import fsdp_compile
from train_gpt import Ranks, find_device, find_ranks, held_out_batches, memory_table, read_text, training_batch, warm_up

# ----------------------------------------------------------------------------------------------------------
# The models: both take bytes and return the mean cross entropy (nats per byte)


def new_base_model(num_layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=num_layers,
        num_attention_heads=3,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def with_adapters(base: LlamaForCausalLM) -> PeftModel:
    """The model with its weights frozen, and a trainable update of rank 8 beside each of its matrices."""
    return get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))


class Int8Linear(nn.Linear):
    """A linear layer without bias, whose frozen weight is stored as int8, with a scale for each row."""

    @classmethod
    def of(cls, linear: nn.Linear) -> Int8Linear:
        stored = cls(linear.in_features, linear.out_features, bias=False, device="meta")
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        stored.weight = nn.Parameter((linear.weight / scale).round().to(torch.int8), requires_grad=False)
        stored.scale = nn.Parameter(scale, requires_grad=False)
        return stored

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype) * self.scale)


def load_base(folder: Path, stored: str) -> LlamaForCausalLM:
    """As transformers loads it, or with the matrices of its layers as int8."""
    model = LlamaForCausalLM.from_pretrained(folder)
    for parent in list(model.model.layers.modules()) if stored == "int8" else []:
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                setattr(parent, name, Int8Linear.of(child))
    return model


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


# ----------------------------------------------------------------------------------------------------------
# The data


def read_code() -> tuple[Tensor, Tensor]:
    """(training bytes, held-out bytes) of modules of the standard library, in random order."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-f]*.py"))
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0))
    text = b"".join(files[index].read_bytes() for index in order)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    num_training = len(data) * 9 // 10
    return data[:num_training], data[num_training:]


def some_held_out_batches(data: Tensor, options: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """The first twenty."""
    size = options.batch * options.seq
    return held_out_batches(data[: 20 * size + 1], options.batch, options.seq)


# ----------------------------------------------------------------------------------------------------------
# Training


def train(
    model: nn.Module, data: Tensor, options: argparse.Namespace, lr: float, ranks: Ranks, console: Console
) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(trainable_parameters(model), lr=lr)
    for step in range(1, options.steps + 1):
        warm_up(optimizer, lr, step)
        rows, _ = ranks.rows(training_batch(data, step, options.batch, options.seq))
        optimizer.zero_grad()
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        if step <= 3 or step % 20 == 0 or step == options.steps:
            console.print(f"step {step:5}  loss {ranks.mean(loss.detach())[0]:.4f}")
    return optimizer


@torch.no_grad()
def evaluate(model: nn.Module, data: Tensor, options: argparse.Namespace, ranks: Ranks) -> float:
    """The mean held-out loss, nats per byte."""
    rows = [ranks.rows(batch)[0] for batch in some_held_out_batches(data, options)]
    return ranks.mean(torch.stack([model(input_ids=part, labels=part).loss for part in rows]).mean())[0]


def save(model: nn.Module, folder: Path, is_first: bool, **which: bool) -> None:
    """What transformers and peft write: one rank does, with the full tensors of all."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True, **which))
    if is_first:
        model.save_pretrained(folder, state_dict=state)
    if dist.is_initialized():
        dist.barrier()  # the others load what was written


def train_base(options: argparse.Namespace, device: torch.device, console: Console) -> None:
    torch.manual_seed(0)
    model = fsdp_compile(new_base_model(options.layers).to(device), backend=options.backend)
    ranks = find_ranks(options.batch, device)
    console.print("base model, on English")
    train(model, read_text()[0], options, 1e-3, ranks, console)
    save(model, options.out / "base", ranks.rank == 0)


def train_adapters(options: argparse.Namespace, device: torch.device, console: Console) -> None:
    torch.manual_seed(0)
    model = with_adapters(load_base(options.out / "base", options.base).to(device))
    fsdp_compile(model, backend=options.backend)
    ranks = find_ranks(options.batch, device)
    num_trainable = sum(parameter.numel() for parameter in trainable_parameters(model))
    num_all = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"adapters, on Python: {num_trainable:,} of {num_all:,} parameters are trainable")
    training, held_out = read_code()
    console.print(f"held-out loss before {evaluate(model, held_out, options, ranks):.4f} nats/byte")
    optimizer = train(model, training, options, 3e-3, ranks, console)
    console.print(f"held-out loss after {evaluate(model, held_out, options, ranks):.4f} nats/byte")
    console.print(memory_table(model, optimizer, ranks.world_size))
    save(model, options.out / "adapters", ranks.rank == 0, ignore_frozen_params=True)


def load(folder: Path, stored: str) -> PeftModel:
    """The fine-tuned model, as anybody loads it."""
    return PeftModel.from_pretrained(load_base(folder / "base", stored), folder / "adapters")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=400, help="of the base model, and of the adapters")
    add("--batch", type=int, default=16, help="rows of the global batch, of all ranks together")
    add("--seq", type=int, default=128, help="bytes in a row")
    add("--layers", type=int, default=4)
    add(
        "--base", default="float32", choices=["float32", "int8"], help="how the base model is stored below the adapters"
    )
    add("--backend", default="inductor", choices=["inductor", "aot_eager"])
    add("--out", type=Path, default=Path("build/lora"), help="folder for the base model and the adapters")
    return parser.parse_args()


def main() -> None:
    options = parse()
    device = find_device()
    is_first = int(os.environ.get("RANK", "0")) == 0
    console = Console(quiet=not is_first, highlight=False)
    train_base(options, device, console)
    train_adapters(options, device, console)
    if is_first:
        alone = Ranks(0, 1, torch.device("cpu"))
        loss = evaluate(load(options.out, options.base), read_code()[1], options, alone)
        console.print(f"held-out loss {loss:.4f} nats/byte as loaded from {options.out}, unsharded")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
