"""transformers' Trainer: a sharded model, and `args.fsdp` with our names in the place of torch's."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

from fsdp_compile import compat, fsdp_compile
from fsdp_compile.errors import ConfigError
from tests.integrations.frameworks import Rows, as_launched, fsdp_on_cpu, llama
from tests.ranks import on_ranks, run_on_ranks

RANKS = 2
CONFIG = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "FULL_STATE_DICT"}
FSDP = {"fsdp": True, "fsdp_config": CONFIG}


@dataclasses.dataclass(frozen=True)
class Trained:
    losses: list[float]
    norms: list[float]
    eval_losses: list[float]
    best: float | None = None
    resumed: list[float] = dataclasses.field(default_factory=list)


def build(**options: object) -> torch.nn.Module:
    torch.manual_seed(0)
    return llama(**options)


def trainer_of(model: torch.nn.Module, folder: Path, world_size: int, **options: object) -> Trainer:
    arguments = {
        "per_device_train_batch_size": 4 // world_size,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 8,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-4,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "report_to": [],
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 1,
    }
    args = TrainingArguments(folder, **{**arguments, **options})
    stops = EarlyStoppingCallback(1, early_stopping_threshold=10.0)  # after the second evaluation
    callbacks = [stops] if args.load_best_model_at_end else []
    return Trainer(model=model, args=args, train_dataset=Rows(40), eval_dataset=Rows(5, seed=7), callbacks=callbacks)


def history(trainer: Trainer, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def trained(trainer: Trainer, **more: object) -> Trained:
    losses, norms, evals = (history(trainer, key) for key in ("loss", "grad_norm", "eval_loss"))
    return Trained(losses, [float(norm) for norm in norms], evals, **more)


def train(shard: str, folder: Path, world_size: int, **options: object) -> Trained:
    """Train, then train on from the middle with another model, whose values it was not given."""
    with as_launched(), surroundings(shard):
        make = functools.partial(fsdp_compile, backend="aot_eager") if shard == "model" else lambda model: model
        trainer = trainer_of(make(build()), folder, world_size, **options)
        trainer.train()
        trainer.save_model(folder / "last")
        if shard == "model":
            return trained(trainer, best=trainer.state.best_metric)
        other = build()
        for parameter in other.parameters():
            torch.nn.init.normal_(parameter)
    with as_launched(), surroundings(shard):
        again = trainer_of(other, folder, world_size, **options)
        again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        return trained(trainer, best=trainer.state.best_metric, resumed=history(again, "loss"))


@contextlib.contextmanager
def surroundings(shard: str):
    with contextlib.ExitStack() as stack:
        if shard in ("install", "torch"):
            stack.enter_context(fsdp_on_cpu())
        if shard == "install":
            stack.enter_context(compat.install(backend="aot_eager"))
        yield


BEST = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "gradient_checkpointing": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def unsharded(folder: Path) -> Trained:
    return train("none", folder / "none", 1, **BEST)


@pytest.fixture(scope="module")
def fsdp2(folder: Path) -> Trained:
    return run_on_ranks(RANKS, functools.partial(train, **BEST, **FSDP), "torch", folder / "torch", RANKS)[0]


@pytest.mark.parametrize("shard", ["model", "install"])
def test_a_trainer_trains_evaluates_saves_and_resumes(shard, unsharded, fsdp2, folder):
    """With activation checkpointing, until it stops early.

    The last batch of the evaluation is uneven: on several ranks, a Trainer counts some rows twice.
    """
    options = {**BEST, "save_only_model": True} if shard == "model" else {**BEST, **FSDP}
    found = run_on_ranks(RANKS, functools.partial(train, **options), shard, folder / shard, RANKS)[0]
    assert len(found.losses) == 4
    for expected in (unsharded, fsdp2):
        torch.testing.assert_close(found.losses, expected.losses, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.norms, expected.norms, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.eval_losses, fsdp2.eval_losses, rtol=1e-4, atol=1e-4)
    assert found.best == pytest.approx(fsdp2.best, abs=1e-4)
    assert shard == "model" or found.resumed == found.losses
    assert loss_of(folder / shard / "last") == pytest.approx(loss_of(folder / "none" / "last"), abs=1e-4)


def loss_of(folder: Path) -> float:
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    row = Rows(1, seed=7)[0]["input_ids"][None]
    return model(input_ids=row, labels=row).loss.item()


@on_ranks(2)
def test_what_a_trainer_cannot_do_is_said(world_size, tmp_path):
    model = fsdp_compile(build(), backend="aot_eager")
    with as_launched(), pytest.raises(ValueError, match="save_only_model=True"):
        trainer_of(model, tmp_path, world_size)
    with as_launched(), fsdp_on_cpu():
        trainer = trainer_of(model, tmp_path, world_size, **FSDP, save_strategy="no")
        with pytest.raises(ConfigError, match="leave fsdp and fsdp_config out"):
            trainer.train()


@on_ranks(2)
def test_from_pretrained_shards_while_it_loads(world_size, tmp_path):
    expected = build()
    if dist.get_rank() == 0:
        expected.save_pretrained(tmp_path / "checkpoint")
    dist.barrier()
    with compat.install(backend="aot_eager"):
        config = DistributedConfig(fsdp_size=world_size)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", distributed_config=config)
    row = Rows(1)[0]["input_ids"][None]
    loss = model(input_ids=row, labels=row).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected(input_ids=row, labels=row).loss.item(), abs=1e-5)
    assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())
    model.save_pretrained(tmp_path / "saved")
    assert loss_of(tmp_path / "saved") == pytest.approx(loss_of(tmp_path / "checkpoint"))


@on_ranks(2)
def test_a_trainer_that_compiles_what_it_shards_by_size(world_size, tmp_path):
    """accelerate shards what torch.compile returned; the method by which it is saved is that of the model inside."""
    config = {**CONFIG, "auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1000}
    with as_launched(), surroundings("install"), pytest.warns(UserWarning, match="left there"):
        options = {"max_steps": 1, "eval_strategy": "no", "save_strategy": "no", "fsdp": True, "fsdp_config": config}
        options |= {"torch_compile": True, "torch_compile_backend": "aot_eager"}
        trainer = trainer_of(build(), tmp_path, world_size, **options)
        trainer.train()
        trainer.save_model(tmp_path / "last")
    with as_launched():
        row = Rows(1, seed=7)[0]["input_ids"][None]
        loss = trainer.model(input_ids=row, labels=row).loss.item()
    assert loss_of(tmp_path / "last") == pytest.approx(loss, abs=1e-5)


@on_ranks(2)
def test_a_model_inside_another_is_saved_whole(world_size, tmp_path):
    class Wrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build()

        def forward(self, row: torch.Tensor) -> torch.Tensor:
            return self.inner(input_ids=row, labels=row).loss

    row = Rows(1, seed=7)[0]["input_ids"][None]
    model = fsdp_compile(Wrapper(), backend="aot_eager")
    expected = model(row).item()
    model.inner.save_pretrained(tmp_path / "by_all")
    state = model.inner.state_dict()
    full = {name: value.full_tensor() for name, value in state.items()}
    if dist.get_rank() == 0:
        model.inner.save_pretrained(tmp_path / "by_one", state_dict=full)
    dist.barrier()
    for folder in ("by_all", "by_one"):
        assert loss_of(tmp_path / folder) == pytest.approx(expected, abs=1e-5)
