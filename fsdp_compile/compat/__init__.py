"""The names of torch's FSDP: change the import, and a script trains as one compiled program.

Both shard and compile through `fsdp_compile`, so they can be applied from the bottom up: what was wrapped before
becomes a part of the program of what is wrapped around it.
"""

from torch.distributed.fsdp import FSDPModule

from ..module.sharded_module import register_fsdp_forward_method
from .fully_shard import fully_shard
from .fully_sharded_data_parallel import FullyShardedDataParallel
from .install import Installation, install

__all__ = [
    "FSDPModule",
    "FullyShardedDataParallel",
    "Installation",
    "fully_shard",
    "install",
    "register_fsdp_forward_method",
]
