"""`compat.install`: which names it replaces, and how that is undone."""

from __future__ import annotations

import sys
import threading
import types

import pytest
import torch.distributed._composable.fsdp as composable
import torch.distributed.fsdp as fsdp
import torch.nn as nn
import transformers.distributed.fsdp as of_transformers
from torch.distributed.fsdp import FullyShardedDataParallel as ImportedBefore
from torch.distributed.fsdp import fully_sharded_data_parallel

from fsdp_compile import compat
from fsdp_compile.errors import ConfigError

HOLDERS = (fsdp, composable, of_transformers, fully_sharded_data_parallel, sys.modules[__name__])
NAMES = ("fully_shard", "FSDPModule", "register_fsdp_forward_method", "FullyShardedDataParallel")


def names_of_torch() -> list[object]:
    return [vars(holder).get(name) for holder in HOLDERS for name in (*NAMES, "ImportedBefore")]


@pytest.fixture(autouse=True)
def undone():
    before = names_of_torch()
    yield
    assert names_of_torch() == before
    assert fsdp.fully_shard.__module__ == "torch.distributed.fsdp"


def test_names_are_ours_inside_and_torchs_afterwards():
    with compat.install(backend="aot_eager"):
        assert of_transformers.fully_shard is fsdp.fully_shard is composable.fully_shard
        assert fsdp.fully_shard.__module__.startswith("fsdp_compile.")
        assert ImportedBefore is fully_sharded_data_parallel.FullyShardedDataParallel
        assert ImportedBefore.__module__.startswith("fsdp_compile.")
        model = fsdp.fully_shard(nn.Linear(2, 2))
        assert isinstance(model, fsdp.FSDPModule) and model.explain() is not None
        assert ImportedBefore(nn.Linear(2, 2)).explain() is not None
        assert not isinstance(model, fsdp.FullyShardedDataParallel)  # whose `.module` frameworks would follow for ever
        assert not isinstance(nn.Linear(2, 2), fsdp.FSDPModule)


def test_what_is_imported_meanwhile_gets_torchs_back(monkeypatch):
    module = types.ModuleType("imported_meanwhile")
    with compat.install():
        exec("from torch.distributed.fsdp import fully_shard as renamed", vars(module))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        kept = vars(module)["renamed"]
        assert kept.__module__.startswith("fsdp_compile.")
    assert vars(module)["renamed"] is fsdp.fully_shard
    with pytest.raises(TypeError, match="backend"):
        kept(nn.Linear(2, 2), backend="aot_eager")  # torch's


def test_the_last_installation_decides_and_names_stay_until_all_are_undone():
    outer, inner = compat.install(backend="aot_eager"), compat.install(backend="inductor")
    assert backend_of(fsdp.fully_shard(nn.Linear(2, 2))) == "inductor"
    assert backend_of(fsdp.fully_shard(nn.Linear(2, 2), backend="aot_eager")) == "aot_eager"
    outer.uninstall()
    outer.uninstall()
    assert backend_of(fsdp.fully_shard(nn.Linear(2, 2))) == "inductor"
    inner.uninstall()


def test_an_exception_undoes_it():
    with pytest.raises(KeyError), compat.install():
        raise KeyError


def test_an_unknown_backend_replaces_nothing():
    with pytest.raises(ConfigError, match="backend"):
        compat.install(backend="nothing")


def test_threads_install_and_undo_at_the_same_time():
    def often() -> None:
        for _ in range(3):
            with compat.install(backend="aot_eager"):
                seen.append(fsdp.fully_shard.__module__)

    seen: list[str] = []
    threads = [threading.Thread(target=often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(seen) == {"fsdp_compile.compat.install"} and len(seen) == 12


def backend_of(model: nn.Module) -> str:
    return vars(model)["_fsdp_sharding"].compile.config.backend
