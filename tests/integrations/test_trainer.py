"""transformers' Trainer: a sharded model, and `args.fsdp` with our names in the place of torch's."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from fsdp_compile import compat, fsdp_compile
from tests.integrations.frameworks import Rows, as_launched, fsdp_on_cpu, llama
from tests.ranks import run_on_ranks

RANKS = 2
FSDP = {
    "fsdp": True,
    "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "FULL_STATE_DICT"},
}


@dataclasses.dataclass(frozen=True)
class Trained:
    losses: list[float]
    norms: list[float]
    eval_losses: list[float]
    best: float | None = None
    resumed: list[float] = dataclasses.field(default_factory=list)
    graphs: int = 0


def build(**options: object) -> torch.nn.Module:
    torch.manual_seed(0)
    return llama(**options)


def trainer_of(model: torch.nn.Module, folder: Path, world_size: int, **options: object) -> Trainer:
    arguments = {
        "per_device_train_batch_size": 4 // world_size,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
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
    return Trainer(model=model, args=args, train_dataset=Rows(24), eval_dataset=Rows(5, seed=7))


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
        graphs = len(trainer.model.graphs) if shard in ("model", "install") else 0
        if shard == "model":
            return trained(trainer, best=trainer.state.best_metric, graphs=graphs)
        other = build()
        for parameter in other.parameters():
            torch.nn.init.normal_(parameter)
    with as_launched(), surroundings(shard):
        again = trainer_of(other, folder, world_size, **options)
        again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        return trained(trainer, best=trainer.state.best_metric, resumed=history(again, "loss"), graphs=graphs)


@contextlib.contextmanager
def surroundings(shard: str):
    with contextlib.ExitStack() as stack:
        if shard in ("install", "torch"):
            stack.enter_context(fsdp_on_cpu())
        if shard == "install":
            stack.enter_context(compat.install(backend="aot_eager"))
        yield


BEST = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}


@pytest.fixture(scope="module")
def unsharded(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train("none", tmp_path_factory.mktemp("unsharded"), 1, **BEST)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.mark.parametrize("shard", ["model", "install", "torch"])
def test_a_trainer_trains_evaluates_saves_and_resumes_as_with_the_unsharded_model(shard, unsharded, folder):
    """The last batch of the evaluation is uneven. With torch's names it is FSDP2, in the same Trainer."""
    options = {**BEST, "save_only_model": True} if shard == "model" else {**BEST, **FSDP}
    found = run_on_ranks(RANKS, functools.partial(train, **options), shard, folder / shard, RANKS)[0]
    assert len(found.losses) == 4
    torch.testing.assert_close(found.losses, unsharded.losses, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.norms, unsharded.norms, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.eval_losses, unsharded.eval_losses, rtol=1e-4, atol=1e-4)
    assert shard == "model" or found.resumed == found.losses
    model, report = AutoModelForCausalLM.from_pretrained(folder / shard / "last", output_loading_info=True)
    assert not any(report.values()), report
    rows = Rows(5, seed=7)
    losses = [model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss.item() for row in rows]
    assert sum(losses) / len(losses) == pytest.approx(found.best, abs=1e-4)  # the best model was loaded
