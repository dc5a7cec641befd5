"""accelerate: `prepare` of a sharded model, what it saves and loads, and its plugin for FSDP2 with our names."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from fsdp_compile import compat, fsdp_compile
from fsdp_compile.errors import ConfigError
from tests.integrations.frameworks import Rows, as_launched, fsdp_on_cpu, llama
from tests.ranks import on_ranks, run_on_ranks

RANKS = 2


@dataclasses.dataclass(frozen=True)
class Trained:
    losses: list[float]
    resumed: list[float]


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return llama(tie_word_embeddings=True)


def steps(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader):
    """The mean loss of the ranks, of every step; two micro-batches are one step."""
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def prepared(
    shard: str, seed: int, world_size: int, precision: str = "no"
) -> tuple[Accelerator, nn.Module, object, object]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if shard in ("install", "torch") else None
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True, fsdp_plugin=plugin, mixed_precision=precision)
    model = build(seed)
    if shard == "model":
        fsdp_compile(model, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    loader = DataLoader(Rows(16), batch_size=4 // world_size)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def train(shard: str, folder: Path, world_size: int) -> Trained:
    """Train and save, train on; load into other values, and train on from there."""
    with as_launched():
        if shard == "none":
            return _train(shard, folder, world_size)
        with fsdp_on_cpu():
            if shard == "install":
                with compat.install(backend="aot_eager"):
                    return _train(shard, folder, world_size)
            return _train(shard, folder, world_size)


def _train(shard: str, folder: Path, world_size: int) -> Trained:
    accelerator, *rest = prepared(shard, 0, world_size)
    first = steps(accelerator, *rest)
    accelerator.save_state(folder / "state")
    if shard != "none":
        accelerator.save_model(rest[0], folder / "model")
        accelerator.wait_for_everyone()
        rest[0].save_pretrained(folder / "pretrained") if shard == "model" else None
    second = steps(accelerator, *rest)
    accelerator.free_memory()
    accelerator, *rest = prepared(shard, 1, world_size)
    accelerator.load_state(folder / "state")
    return Trained(first + second, steps(accelerator, *rest))


@pytest.fixture(scope="module")
def unsharded(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train("none", tmp_path_factory.mktemp("unsharded"), 1)


@pytest.mark.parametrize("shard", ["model", "install", "torch"])
def test_a_prepared_model_trains_saves_and_resumes_as_the_unsharded_one(shard, unsharded, tmp_path):
    """With "torch" it is FSDP2, in the same accelerate."""
    found = run_on_ranks(RANKS, train, shard, tmp_path, RANKS)[0]
    torch.testing.assert_close(found.losses, unsharded.losses, rtol=1e-4, atol=1e-4)
    assert found.resumed == found.losses[4:]
    if shard == "model":
        for saved in ("pretrained", "model"):
            if saved == "model":
                build().config.save_pretrained(tmp_path / saved)
            model, report = AutoModelForCausalLM.from_pretrained(tmp_path / saved, output_loading_info=True)
            assert not any(report.values()), report
            assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@on_ranks(2)
def test_autocast_of_accelerate_is_that_of_the_unsharded_model(world_size):
    with as_launched():
        _, model, *_ = prepared("model", 0, world_size, "bf16")
        seen = []
        model.model.layers[0].mlp.down_proj.register_forward_hook(
            lambda *_: seen.append(torch.is_autocast_enabled("cpu"))
        )
        logits = model(input_ids=Rows(1)[0]["input_ids"][None]).logits
        assert all(seen) and seen and logits.dtype == torch.float32


@on_ranks(2)
def test_ranks_that_generate_different_numbers_of_tokens(world_size):
    import torch.distributed as dist

    model = fsdp_compile(build().eval(), backend="aot_eager")
    rows = Rows(1)[0]["input_ids"][None]
    number = 2 + 3 * dist.get_rank()
    tokens = model.generate(rows, max_new_tokens=number, do_sample=False)
    assert torch.equal(tokens, build().eval().generate(rows, max_new_tokens=number, do_sample=False))


@on_ranks(2)
def test_what_accelerate_cannot_do_is_said(world_size):
    with as_launched(), fsdp_on_cpu():
        plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        with pytest.raises(ConfigError, match=r"FullyShardedDataParallelPlugin\(fsdp_version=2\)"):
            accelerator.prepare(fsdp_compile(build(), backend="aot_eager"))
    with as_launched():
        accelerator = Accelerator(cpu=True, dynamo_backend="eager")
        with pytest.raises(ConfigError, match="leave dynamo_backend out"):
            accelerator.prepare(fsdp_compile(build(), backend="aot_eager"))
