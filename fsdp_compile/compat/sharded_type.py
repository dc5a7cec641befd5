"""What isinstance asks of torch's classes."""

from __future__ import annotations

import torch.nn as nn

from ..module.sharding import is_sharded


class ShardedType(type):
    """isinstance(model, FSDPModule), or FullyShardedDataParallel, is whether the model is sharded."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, nn.Module) and is_sharded(instance)
