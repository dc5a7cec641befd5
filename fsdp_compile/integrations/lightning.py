"""Lightning: strategies that shard and compile what Trainer and Fabric are given.

Importing this file registers both by the name "fsdp_compile":

    import fsdp_compile.integrations.lightning

    Trainer(strategy="fsdp_compile", devices=2)
    Fabric(strategy="fsdp_compile", devices=2)

They are Lightning's ModelParallelStrategy, which has launching, process groups, precision and checkpoints, as of
Lightning 2.6; what is private of it here is `_setup_model`, `_setup_distributed` and `_BackwardSyncControl`.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn as nn
from lightning import LightningModule, Trainer
from lightning.fabric import strategies as fabric
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.pytorch import strategies as pytorch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from ..api import fsdp_compile
from ..backend import compile_parts
from ..compiler.options import CompileConfig
from ..errors import ConfigError
from ..module.resetting import param_init_by_reset
from ..module.sharded_module import register_fsdp_forward_method
from ..module.sharding import is_sharded, sharding_of
from ..options import Options, taken, takes
from ..runtime.clipping import clip_gradients
from ..runtime.optimizers import repoint

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class FSDPCompileStrategy(pytorch.ModelParallelStrategy):
    """Shards and compiles the LightningModule of a Trainer; `configure_model` need not be overridden.

    The whole LightningModule is sharded, under its names. Its `forward` and the modules in it are compiled; steps run
    uncompiled around them, in which parameters read as full tensors. A LightningModule that `configure_model` has
    sharded, whole or in parts, is left as it is.

    Args:
        device_mesh: ranks as a pair (number of copies, ranks that share one), or a mesh of one or two dimensions; by
            default all share one copy.
        save_distributed_checkpoint: whether every rank writes its part into a folder, or the first rank all to a file.
        process_group_backend, timeout: of the process group, as of Lightning's strategies.
        arguments: options of `fsdp_compile`, except the ranks.

    Raises:
        ConfigError: an option cannot be meant.
    """

    @takes(Options, CompileConfig, without=("process_group",))
    def __init__(
        self,
        *,
        device_mesh: DeviceMesh | tuple[int, int] | None = None,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: datetime.timedelta | None = default_pg_timeout,
        **arguments: Any,
    ) -> None:
        check_options(arguments)
        super().__init__(
            data_parallel_size=1,  # until the number of ranks is known
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._given_mesh, self._options = device_mesh, arguments

    def setup_environment(self) -> None:
        """As of any strategy; `device_mesh["data_parallel"]` has all ranks."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        """As of a strategy that wraps models, not as of ModelParallelStrategy, which leaves it to the user."""
        super(pytorch.ModelParallelStrategy, self).setup(trainer)

    def model_to_device(self) -> None:
        """Sharded parameters are there already; what is on the meta device gets memory when it is sharded."""
        assert self.model is not None
        to_device(self.model, self.root_device)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        if any(is_sharded(module) for module in model.modules()):
            return model
        shard_and_compile(model, mesh_of(self._given_mesh, self.device_mesh), self.root_device, self._options)
        compile_parts(model)
        for step in _STEPS:
            if is_overridden(step, model, LightningModule):
                register_fsdp_forward_method(model, step)
        return model

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Nothing: every backward reduces its gradients to shards, as with Lightning's other sharding strategies.

        ParallelStrategy asks for `no_sync` of what has such a method, and then every rank would hold full gradients.
        """
        return nullcontext()

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning's loop loads the optimizers: on a single rank, where nothing is sharded."""
        return bool(self.world_size == 1)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._checkpointing.lightning_module_state_dict()  # type: ignore[no-any-return]

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._checkpointing.optimizer_state(optimizer)  # type: ignore[no-any-return]

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        self._checkpointing.save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return self._checkpointing.load_checkpoint(checkpoint_path, weights_only)  # type: ignore[no-any-return]

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._checkpointing.load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._checkpointing.load_optimizer_state_dict(checkpoint)

    @property
    def _checkpointing(self) -> Any:
        """ModelParallelStrategy's checkpoints, which are of DTensors; a single rank has those of any strategy."""
        return super() if self.world_size > 1 else super(pytorch.ModelParallelStrategy, self)


class FSDPCompileFabricStrategy(fabric.ModelParallelStrategy):
    """Shards and compiles what `fabric.setup` or `setup_module` is given, in place.

    Optimizers may be built before or after. A model that is sharded already, whole or in parts, is left as it is.

    Args:
        device_mesh: ranks as a pair (number of copies, ranks that share one), or a mesh of one or two dimensions; by
            default all share one copy.
        save_distributed_checkpoint: whether every rank writes its part into a folder, or the first rank all to a file.
        process_group_backend, timeout: of the process group, as of Lightning's strategies.
        arguments: options of `fsdp_compile`, except the ranks.

    Raises:
        ConfigError: an option cannot be meant.
    """

    @takes(Options, CompileConfig, without=("process_group",))
    def __init__(
        self,
        *,
        device_mesh: DeviceMesh | tuple[int, int] | None = None,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: datetime.timedelta | None = default_pg_timeout,
        **arguments: Any,
    ) -> None:
        check_options(arguments)
        super().__init__(
            self._parallelize,
            data_parallel_size=1,  # until the number of ranks is known
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._given_mesh, self._options = device_mesh, arguments
        self._backward_sync_control = NoSync()

    def setup_environment(self) -> None:
        """As of any strategy; `device_mesh["data_parallel"]` has all ranks."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def module_to_device(self, module: nn.Module) -> None:
        to_device(module, self.root_device)

    def _parallelize(self, module: nn.Module, _: DeviceMesh) -> nn.Module:
        if not any(is_sharded(part) for part in module.modules()):
            shard_and_compile(module, mesh_of(self._given_mesh, self.device_mesh), self.root_device, self._options)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """It lists the sharded parameters from now on: clipping and loading may come before its first step."""
        repoint(optimizer)
        return optimizer

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """As of any strategy, and of parameters that are not sharded, too."""
        self.precision.unscale_gradients(optimizer)
        sharding = sharding_of(module)
        return clip_gradients(
            self.precision.main_params(optimizer),
            sharding.holders,
            max_norm=max_norm,
            norm_type=norm_type,
            error_if_nonfinite=error_if_nonfinite,
        )

    @property
    def checkpoint_io(self) -> Any:
        """Of a single rank: ModelParallelStrategy's checkpoints, which have none, are of DTensors."""
        return super().checkpoint_io if self.world_size > 1 else TorchCheckpointIO()

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        raise ConfigError("the strategy of fsdp_compile writes checkpoints itself: leave out the plugin CheckpointIO")

    def save_checkpoint(self, path: Any, state: Any, storage_options: Any = None, filter: Any = None) -> None:
        self._checkpointing.save_checkpoint(path, state, storage_options, filter)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return self._checkpointing.load_checkpoint(path, state, strict, weights_only)  # type: ignore[no-any-return]

    @property
    def _checkpointing(self) -> Any:
        return super() if self.world_size > 1 else super(fabric.ModelParallelStrategy, self)


class NoSync(_BackwardSyncControl):
    """What `fabric.no_backward_sync` asks: gradients are kept, full, until a backward outside of it."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return module.no_sync() if enabled else nullcontext()  # type: ignore[operator]


def check_options(arguments: dict[str, Any]) -> None:
    """Raise ConfigError for what cannot be meant, whatever the model; TypeError for what is no option."""
    if "process_group" in arguments:
        raise ConfigError("Lightning makes the process group: give the strategy device_mesh=(copies, ranks of each)")
    left = dict(arguments)
    taken(CompileConfig, left)
    Options(**left)


def mesh_of(given: DeviceMesh | tuple[int, int] | None, all_ranks: DeviceMesh) -> DeviceMesh:
    """The mesh to shard over. Every rank calls it."""
    if given is None:
        return all_ranks["data_parallel"]
    if isinstance(given, DeviceMesh):
        return given
    copies, ranks = given
    if copies * ranks != all_ranks.size():
        raise ConfigError(f"device_mesh={given} is of {copies * ranks} ranks, and there are {all_ranks.size()}")
    return init_device_mesh(all_ranks.device_type, (copies, ranks), mesh_dim_names=("replicate", "shard"))


def to_device(model: nn.Module, device: torch.device) -> None:
    """Move what is not on the meta device."""
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def shard_and_compile(model: nn.Module, mesh: DeviceMesh, device: torch.device, options: Mapping[str, Any]) -> None:
    """`fsdp_compile`; what is on the meta device gets memory, and the values of `reset_parameters`.

    Raises:
        ConfigError: a module on the meta device has no such method, and there is no `param_init_fn`.
    """
    if options.get("param_init_fn") is None:
        options = {**options, "param_init_fn": param_init_by_reset(model, device)}
    fsdp_compile(model, mesh, **options)


for registry, strategy in (
    (pytorch.StrategyRegistry, FSDPCompileStrategy),
    (fabric.STRATEGY_REGISTRY, FSDPCompileFabricStrategy),
):
    registry.register("fsdp_compile", strategy, description="FSDP as one compiled program", override=True)
