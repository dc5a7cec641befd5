"""Lightning's Trainer and Fabric with the strategies of fsdp_compile, against one device and FSDP2, on two ranks."""

import functools
import logging
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning")

from lightning import Fabric, LightningModule, Trainer
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy

from fsdp_compile import ConfigError
from fsdp_compile.integrations.lightning import FSDPCompileFabricStrategy, FSDPCompileStrategy
from tests.distributed.training import assert_same_tensors, full_parameters, mean_over_ranks
from tests.ranks import on_ranks

ours = functools.partial(FSDPCompileStrategy, backend="aot_eager")
fabric_strategy = functools.partial(FSDPCompileFabricStrategy, backend="aot_eager")

ROWS, BATCHES = 4, 4  # of a rank's batch; of an epoch


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")


class Environment(LightningEnvironment):
    """Of the ranks that there are; a group of one where they are to be alone."""

    creates_processes_externally = True

    def world_size(self):
        return dist.get_world_size()

    def global_rank(self):
        return dist.get_rank()

    def local_rank(self):
        return dist.get_rank()

    def set_world_size(self, size):
        pass

    def set_global_rank(self, rank):
        pass


class Lit(LightningModule):
    """`style` is how its steps call what is in it."""

    def __init__(self, style="forward"):
        super().__init__()
        torch.manual_seed(0)
        self.style = style
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.head = nn.Linear(6, 1)
        self.scale = nn.Parameter(torch.tensor([2.0]))
        self.losses, self.rows_validated = [], []

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x) * self.scale

    def step(self, batch):
        x, y = batch
        if self.style == "forward":
            return F.mse_loss(self(x), y)
        for layer in self.layers:
            x = layer(x).tanh()
        return F.mse_loss(self.head(x) * self.scale, y)

    def training_step(self, batch, _):
        loss = self.step(batch)
        self.log("loss", loss)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch, _):
        self.rows_validated.append(len(batch[0]))
        self.log("validated", self.step(batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class ShardedByTorch(Lit):
    def configure_model(self):
        fully_shard(self, mesh=self.device_mesh["data_parallel"])
        for name in ("training_step", "validation_step"):
            torch.distributed.fsdp.register_fsdp_forward_method(self, name)


def rows_of(rank, world_size, batches=BATCHES, *, last=ROWS):
    """This rank's part of every batch, the last with so many rows of it; with one rank all of them."""
    made = torch.Generator().manual_seed(1)
    counts = [2 * ROWS] * (batches - 1) + [2 * last]
    for count in counts:
        x, y = torch.randn(count, 6, generator=made), torch.randn(count, 1, generator=made)
        yield from zip(x.chunk(world_size)[rank], y.chunk(world_size)[rank], strict=True)


def loader(rank, world_size, **options):
    x, y = map(torch.stack, zip(*rows_of(rank, world_size, **options), strict=True))
    return DataLoader(TensorDataset(x, y), batch_size=2 * ROWS // world_size)


def trainer(strategy, path, **options):
    options = {"max_epochs": 2, "gradient_clip_val": 0.5, "accumulate_grad_batches": 2} | options
    return Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=dist.get_world_size(),
        plugins=[Environment()],
        default_root_dir=path,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def fit(model, strategy, path, *, ckpt_path=None, **options):
    """The trainer, after; and the losses of all ranks together."""
    made = trainer(strategy, path, **options)
    of_rank = dist.get_rank(), dist.get_world_size()
    made.fit(model, loader(*of_rank), loader(*of_rank, batches=2, last=1), ckpt_path=ckpt_path)
    return made, mean_over_ranks(torch.stack(model.losses))


def fit_by_hand(model, epochs=2, autocast=False):
    """What the trainer does, on one device with the rows of all ranks; the losses."""
    optimizer, losses = model.configure_optimizers(), []
    for _ in range(epochs):
        for number, batch in enumerate(loader(0, 1)):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model.step([each.to(model.dtype) for each in batch])
            (loss / 2).backward()
            losses.append(loss.detach())
            if number % 2:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    return torch.stack(losses)


@pytest.mark.parametrize("style", ["forward", "parts"])
@on_ranks(2)
def test_a_trainer_trains_as_one_device_and_as_fsdp2(world_size, style, tmp_path):
    expected = Lit(style)
    expected_losses = fit_by_hand(expected)
    _, losses_by_torch = fit(ShardedByTorch(style), ModelParallelStrategy(world_size, 1), tmp_path)
    model = Lit(style)
    made, losses = fit(model, ours(), tmp_path)
    torch.testing.assert_close(losses, expected_losses)
    torch.testing.assert_close(losses, losses_by_torch)
    assert_same_tensors(full_parameters(model), full_parameters(expected))
    assert model.rows_validated[-2:] == [ROWS, 1]
    assert len([graphs for graphs in model.graphs if graphs.backward]) == (1 if style == "forward" else 3)
    with torch.no_grad():  # the mean over rows, as Lightning weighs batches
        losses = [(len(batch[0]), expected.step(batch)) for batch in loader(0, 1, batches=2, last=1)]
    validated = sum(rows * loss for rows, loss in losses) / sum(rows for rows, _ in losses)
    torch.testing.assert_close(made.callback_metrics["validated"], validated)


@pytest.mark.parametrize("save_distributed_checkpoint", [True, False], ids=["folder", "file"])
@on_ranks(2)
def test_a_trainer_resumes_to_the_last_bit(world_size, save_distributed_checkpoint, tmp_path):
    strategy = functools.partial(ours, save_distributed_checkpoint=save_distributed_checkpoint)
    model, path = Lit(), from_first_rank(tmp_path / "checkpoint")
    _, losses = fit(model, strategy(), tmp_path, max_epochs=2)
    made, _ = fit(Lit(), strategy(), tmp_path, max_epochs=1)
    made.save_checkpoint(path)
    resumed = Lit()
    nn.init.zeros_(resumed.head.weight)
    _, later_losses = fit(resumed, strategy(), tmp_path, max_epochs=2, ckpt_path=path)
    assert path.is_dir() == save_distributed_checkpoint
    assert torch.equal(later_losses, losses[BATCHES:])
    for name, parameter in full_parameters(resumed).items():
        assert torch.equal(parameter, full_parameters(model)[name]), name


@on_ranks(1)
def test_a_trainer_on_one_rank_trains_and_resumes(world_size, tmp_path):
    expected, path = Lit(), tmp_path / "checkpoint.ckpt"
    expected_losses = fit_by_hand(expected)
    made, losses = fit(Lit(), ours(), tmp_path, max_epochs=1)
    made.save_checkpoint(path)
    resumed = Lit()
    _, later_losses = fit(resumed, ours(), tmp_path, max_epochs=2, ckpt_path=path)
    torch.testing.assert_close(torch.cat([losses, later_losses]), expected_losses)
    assert_same_tensors(full_parameters(resumed), full_parameters(expected))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@on_ranks(2)
def test_precision_is_that_of_lightning(world_size, precision, tmp_path):
    expected = Lit().to(torch.bfloat16 if precision == "bf16-true" else torch.float32)
    expected_losses = fit_by_hand(expected, epochs=1, autocast=precision == "bf16-mixed")
    model = Lit()
    _, losses = fit(model, ours(), tmp_path, max_epochs=1, precision=precision)
    assert {p.dtype for p in model.parameters()} == {p.dtype for p in expected.parameters()}
    torch.testing.assert_close(losses, expected_losses, rtol=0.05, atol=0.02)
    with pytest.raises(AssertionError):  # it is not that of fp32
        torch.testing.assert_close(losses.float(), fit_by_hand(Lit(), epochs=1), rtol=1e-6, atol=1e-6)


@on_ranks(2)
def test_fabric_trains_as_one_device_and_resumes(world_size, tmp_path):
    expected, path = Lit(), from_first_rank(tmp_path / "checkpoint")
    expected_losses = fit_by_hand(expected)
    fabric, state = set_up(Lit())
    first = fit_with_fabric(fabric, state)
    fabric.save(path, state)
    fabric, state = set_up(Lit())
    fabric.load(path, state)
    later = fit_with_fabric(fabric, state)
    torch.testing.assert_close(torch.cat([first, later]), expected_losses)
    assert_same_tensors(full_parameters(state["model"].module), full_parameters(expected))


def launched(strategy):
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, plugins=[Environment()])
    fabric.launch()
    return fabric


def set_up(model):
    fabric = launched(fabric_strategy())
    model, optimizer = fabric.setup(model, model.configure_optimizers())
    return fabric, {"model": model, "optimizer": optimizer}


def fit_with_fabric(fabric, state):
    """An epoch; gradients are reduced once for two batches."""
    model, optimizer, losses = state["model"], state["optimizer"], []
    for number, (x, y) in enumerate(loader(fabric.global_rank, fabric.world_size)):
        with fabric.no_backward_sync(model, enabled=number % 2 == 0):
            loss = F.mse_loss(model(x), y)
            fabric.backward(loss / 2)
        losses.append(loss.detach())
        has_gradients = all(parameter.grad is not None for parameter in model.parameters())
        assert has_gradients == bool(number % 2)  # what is kept is not in .grad yet
        if number % 2:
            assert fabric.clip_gradients(model, optimizer, max_norm=0.5) > 0
            optimizer.step()
            optimizer.zero_grad()
    return mean_over_ranks(torch.stack(losses))


@on_ranks(2)
def test_models_on_the_meta_device_get_the_values_of_reset_parameters(world_size):
    fabric = launched(fabric_strategy())
    with fabric.init_module(empty_init=True):
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    torch.manual_seed(3)
    sharded = full_parameters(fabric.setup(model).module)
    torch.manual_seed(3)
    expected = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    assert_same_tensors(sharded, full_parameters(expected))
    with fabric.init_module(empty_init=True):
        model = Lit()
    with pytest.raises(ConfigError, match="a Lit has tensors on the meta device and no reset_parameters"):
        fabric.setup(model)


@on_ranks(2)
def test_strategies_are_known_by_name(world_size, tmp_path):
    assert isinstance(trainer("fsdp_compile", tmp_path).strategy, FSDPCompileStrategy)
    fabric = launched("fsdp_compile")
    assert isinstance(fabric.strategy, FSDPCompileFabricStrategy)


@pytest.mark.parametrize("strategy", [FSDPCompileStrategy, FSDPCompileFabricStrategy])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"process_group": None}, "Lightning makes the process group"),
        ({"backend": "eager"}, "backend is one of"),
        ({"forward_prefetch": -1}, "forward_prefetch"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_when_the_strategy_is_made(strategy, options, message):
    with pytest.raises(ConfigError, match=message):
        strategy(**options)
    with pytest.raises(TypeError, match="wrap_policy"):
        strategy(wrap_policy=None)


@on_ranks(2)
def test_a_mesh_of_other_ranks_is_refused(world_size):
    fabric = launched(fabric_strategy(device_mesh=(2, 2)))
    with pytest.raises(ConfigError, match=r"device_mesh=\(2, 2\) is of 4 ranks, and there are 2"):
        fabric.setup(nn.Linear(2, 2))


def from_first_rank(path):
    paths = [path]
    dist.broadcast_object_list(paths)
    return paths[0]
