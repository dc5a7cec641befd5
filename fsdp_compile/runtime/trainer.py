"""A Trainer of transformers saves the optimizer's state from its first process: full tensors, for a sharded model.

The Trainer asks only that process for the state. So a callback, which all processes run, writes the file again. Loading
it is the same on every rank, which keeps its rows.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ConfigError
from .whole_states import shard_optimizer_states, whole_optimizer_state


def save_whole_optimizer_of(trainer: Any) -> None:
    """Have this Trainer, of a model that is sharded already, save and load full states; anything else is left alone.

    Raises:
        ConfigError: it was asked to shard, too.
    """
    module = sys.modules.get("transformers.trainer")
    if module is None or not isinstance(trainer, module.Trainer):
        return
    if trainer.is_fsdp_enabled and getattr(trainer, "is_distributed_loading_by_transformers", False):
        raise ConfigError("the model is sharded already: leave fsdp and fsdp_config out of TrainingArguments")
    if trainer.is_fsdp_enabled:
        return
    kind = _callback()
    if not any(isinstance(callback, kind) for callback in trainer.callback_handler.callbacks):
        trainer.add_callback(kind)
    if trainer.optimizer is not None and not hasattr(trainer.optimizer, "_fsdp_takes_whole"):
        trainer.optimizer._fsdp_takes_whole = trainer.optimizer.register_load_state_dict_post_hook(
            shard_optimizer_states
        )


@functools.cache
def _callback() -> type:
    from transformers import TrainerCallback

    class SaveWholeOptimizer(TrainerCallback):  # type: ignore[misc]  # untyped
        """Writes the optimizer's state of a checkpoint anew, with full tensors."""

        def on_save(self, args: Any, state: Any, control: Any, *, optimizer: Any, **_: Any) -> None:
            file = Path(args.output_dir) / f"checkpoint-{state.global_step}" / "optimizer.pt"
            if args.save_only_model:
                return
            whole = whole_optimizer_state(optimizer.state_dict(), is_kept=args.should_save)
            if args.should_save:
                torch.save(whole, file)
            dist.barrier()

    return SaveWholeOptimizer
