"""Predicted against measured peak memory of a training step.

    python benchmarks/memory.py
    python benchmarks/memory.py --models mlp gpt --backends aot_eager

One process: the "fake" process group has the ranks of a larger job and sends nothing, so that a rank allocates what it
would allocate, and computes with wrong values. torch.profiler notes every allocation of forward and backward; shards
and inputs, which are there before, are added. As with a backend that sends, what a collective reads is held until that
is waited for. What a backend of collectives allocates is not in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from fsdp_compile import fsdp_compile
from fsdp_compile.costs.memory import Memory, memory_of
from fsdp_compile.costs.work import Work

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from llama import Llama, LlamaConfig
from train_gpt import GPT, GPTConfig


class Mlp(nn.Module):
    """Residual layers, with much of the memory in parameters."""

    def __init__(self, dim: int = 256, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)) for _ in range(layers)
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return (x - target).square().mean()  # in eager, mse_loss has memory of its own


class Encoder(nn.Module):
    """torch's own transformer layers, recomputed in the backward."""

    def __init__(self, dim: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.0, batch_first=True) for _ in range(layers)
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return F.mse_loss(x, target)


class Gpt2(nn.Module):
    """That of transformers."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        no_dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        sizes = {"n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 512, "n_positions": 128}
        config = GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0)
        self.model = GPT2LMHeadModel(config)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _tokens(vocab: int) -> Tensor:
    return torch.randint(vocab, (4, 128))


def _rows(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(shape), torch.randn(shape)


_LLAMA = LlamaConfig(layers=4, dim=256, heads=8, kv_heads=4, ffn_dim=768, vocab=1024)

MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "mlp": lambda: (Mlp(), _rows(256, 256)),
    "gpt": lambda: (GPT(GPTConfig(seq=128, dim=128, layers=4)), (_tokens(256), _tokens(256))),
    "llama": lambda: (Llama(_LLAMA), (_tokens(1024), _tokens(1024))),
    "encoder": lambda: (Encoder(), _rows(4, 128, 128)),
    "gpt2": lambda: (Gpt2(), (_tokens(512),)),
}
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


@dataclasses.dataclass(frozen=True)
class Result:
    """Bytes at the peak of a step."""

    predicted: Memory
    measured: int

    @property
    def ratio(self) -> float:
        return self.predicted.peak.total / self.measured


def measure(name: str, strategy: str, backend: str, **schedule: Any) -> Result:
    """One step after another that is not counted; a process group is initialised.

    `schedule` are further options of `fsdp_compile`.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    strategy_of_name = ShardingStrategy[strategy]
    fsdp_compile(model, backend=backend, sharding_strategy=strategy_of_name, sync_module_states=False, **schedule)
    for _ in range(2):  # some models compile once more at their second step
        model(*inputs).backward()
        model.zero_grad()
    with holding_what_is_sent(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model(*inputs).backward()
    predicted = memory_of(Work.of(model.graphs[-1], compiler=backend))
    resident = predicted.moments[0].held
    return Result(predicted, allocated(profiler) + resident["shards"] + resident["inputs"])


_c10d = torch.ops._c10d_functional  # private, as of torch 2.11 to 2.13
_SENDING = (
    _c10d.all_gather_into_tensor.default,
    _c10d.all_gather_into_tensor_coalesced.default,
    _c10d.reduce_scatter_tensor.default,
    _c10d.reduce_scatter_tensor_coalesced.default,
)


@contextmanager
def holding_what_is_sent() -> Iterator[None]:
    """The "fake" group is done with what it is given at once; others read it until the collective is waited for."""
    sent_for: dict[int, Any] = {}  # by where each result lies

    def sending(op: Any) -> Callable[..., Any]:
        def run(value: Any, *args: Any) -> Any:
            result = op._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, value, *args)
            sent_for.update((out.data_ptr(), value) for out in (result if isinstance(result, list) else [result]))
            return result

        return run

    def wait(result: Tensor) -> Tensor:
        sent_for.pop(result.data_ptr(), None)
        return _c10d.wait_tensor.default._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, result)

    with torch.library._scoped_library("_c10d_functional", "IMPL") as library:
        for op in _SENDING:
            library.impl(op, sending(op), "CPU")
        library.impl(_c10d.wait_tensor.default, wait, "CPU")
        yield


def allocated(profiler: profile) -> int:
    """The most bytes that were in memory of those allocated under the profiler."""
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(itertools.accumulate(changes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=list(STRATEGIES))
    parser.add_argument("--backends", nargs="+", default=["aot_eager", "inductor"], choices=["aot_eager", "inductor"])
    parser.add_argument("--world-size", type=int, default=4)
    options = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.world_size)
    table = Table(title=f"peak bytes of a rank of {options.world_size}")
    for heading in ("model", "strategy", "backend", "predicted", "measured", "ratio"):
        table.add_column(heading, justify="right" if heading in ("predicted", "measured", "ratio") else "left")
    for name, strategy, backend in itertools.product(options.models, options.strategies, options.backends):
        found = measure(name, strategy, backend)
        total = found.predicted.peak.total
        table.add_row(name, strategy, backend, f"{total:,}", f"{found.measured:,}", f"{found.ratio:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
