"""What accelerate asks of a sharded model in `prepare`, and what it then saves and loads.

An Accelerator wraps a model, unless the model says that it is prepared already; then it leaves out its autocast, too.
So a sharded model has it do all but wrap, by the argument that it has for models that are only evaluated, and says that
it is prepared. With no plugin for FSDP, an Accelerator saves what `get_state_dict` gives, and the states of its
optimizers, from the first process: full tensors, here.

Of accelerate 1.15: that it reads `_is_accelerate_prepared` in `prepare_model`, whose `self` and `evaluation_mode` are
looked at, and holds its optimizers in `_optimizers`.
"""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import optim
from torch.distributed.fsdp import FullyShardedDataParallel

from ..errors import ConfigError
from .whole_states import shard_optimizer_states, whole_optimizer_state, whole_state


def is_prepared(model: nn.Module, was_prepared: bool, asking: FrameType) -> bool:
    """The answer to the frame that asks whether the sharded model is prepared: True once all but the wrapping is done.

    Raises:
        ConfigError: accelerate was asked to compile it too, or to save it as FSDP1's, or a Trainer to shard it again.
    """
    accelerator, accelerate = asking.f_locals.get("self"), sys.modules.get("accelerate")
    if accelerate is None or not isinstance(accelerator, accelerate.Accelerator):
        return was_prepared
    _refuse_plugin(accelerator, is_sharded_for_trainer=bool(asking.f_locals.get("evaluation_mode")))
    if asking.f_locals.get("evaluation_mode"):
        return was_prepared  # it does not wrap then
    if not was_prepared and accelerator.prepare_model(model, device_placement=False, evaluation_mode=True) is not model:
        raise ConfigError("accelerate was asked to compile the model, which is compiled: leave dynamo_backend out")
    if str(accelerator.distributed_type) != "DistributedType.FSDP":
        _save_whole(accelerator)
    return True


def _refuse_plugin(accelerator: Any, *, is_sharded_for_trainer: bool) -> None:
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and is_sharded_for_trainer:
        raise ConfigError("the model is sharded already: leave fsdp and fsdp_config out of TrainingArguments")
    fsdp1 = sys.modules["torch.distributed.fsdp"].FullyShardedDataParallel  # what accelerate will look up
    if plugin is not None and plugin.fsdp_version == 1 and fsdp1 is FullyShardedDataParallel:
        raise ConfigError(
            "accelerate's plugin is for FSDP1, which would save the first rank's rows as the model: "
            "FullyShardedDataParallelPlugin(fsdp_version=2), or no plugin"
        )


def _save_whole(accelerator: Any) -> None:
    """Have this accelerator save full tensors of sharded models and of their optimizers, and load them."""
    if isinstance(accelerator.get_state_dict, functools.partial):
        return
    accelerator.get_state_dict = functools.partial(_get_state_dict, accelerator.get_state_dict)
    accelerator.register_save_state_pre_hook(functools.partial(_before_saving, accelerator))
    accelerator.register_load_state_pre_hook(functools.partial(_before_loading, accelerator))


def _get_state_dict(original: Any, model: nn.Module, unwrap: bool = True) -> Any:
    return whole_state(model) if _is_ours(model) else original(model, unwrap=unwrap)


def _before_saving(accelerator: Any, models: Any, weights: Any, output_dir: Any) -> None:
    """The next `state_dict()` of each optimizer, which every rank asks for and one saves, has full tensors."""

    def once(optimizer: optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        handles.pop(optimizer).remove()
        return whole_optimizer_state(state, is_kept=dist.get_rank() == 0)

    inner = [_inner(optimizer) for optimizer in accelerator._optimizers]
    handles = {optimizer: optimizer.register_state_dict_post_hook(once) for optimizer in inner}


def _before_loading(accelerator: Any, models: list[Any], input_dir: Any) -> None:
    """The next `load_state_dict` of each optimizer takes full tensors, and so do the models."""

    def once(optimizer: optim.Optimizer) -> None:
        handles.pop(optimizer).remove()
        shard_optimizer_states(optimizer)

    inner = [_inner(optimizer) for optimizer in accelerator._optimizers]
    handles = {optimizer: optimizer.register_load_state_dict_post_hook(once) for optimizer in inner}
    models[:] = [_TakesWhole(model) if _is_ours(model) else model for model in models]


class _TakesWhole:
    """A sharded model, for safetensors to load into: it asks a state dict only which names share memory."""

    def __init__(self, model: nn.Module) -> None:
        self.load_state_dict = model.load_state_dict
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        stand_in = {parameter: torch.empty(1) for parameter in self._model.parameters()}
        tied = dict(self._model.named_parameters(remove_duplicate=False))
        state = self._model.state_dict()
        return {name: stand_in.get(tied.get(name), value) for name, value in state.items()}  # type: ignore[arg-type]


def _inner(optimizer: Any) -> optim.Optimizer:
    """The optimizer of torch inside accelerate's."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer  # type: ignore[no-any-return]


def _is_ours(model: nn.Module) -> bool:
    return "_fsdp_running" in vars(model)
