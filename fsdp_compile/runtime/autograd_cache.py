"""Compiled calls in torch's cache of what AOTAutograd makes, each with what we keep beside it.

Who finds a call there neither traces nor rewrites it. Torch's entry names the code of forward and backward in
Inductor's cache, and a file of ours by the digest of its content. Where no code is generated, the graphs in that file
run. Entries and files are pickles, so code, and are read only where nobody else can write.

Private torch API, as of torch 2.13: how entries are keyed, looked up, read and made. With another version nothing is
kept.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._functorch.config
from torch._functorch._aot_autograd import autograd_cache
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch._inductor import config
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.distributed.device_mesh import DeviceMesh

_IS_KNOWN = torch.__version__.startswith("2.13.")
if _IS_KNOWN:
    from torch._functorch._aot_autograd.aot_autograd_result import FxGraphCacheLoadable

Compiled = Callable[[list[Any]], Any]

_FILE = "file of fsdp_compile: "  # begins the line of an entry that names it
_OTHERS_WRITE = 0o022  # in the mode of a file


def keeps_calls(inputs: Sequence[Any]) -> bool:
    """Whether what AOTAutograd makes of a graph with these inputs is kept here, and found again.

    A mesh, which DTensors are made on, is pickled for torch's key with the number of a thread: that of another process
    has another key.
    """
    if any(isinstance(value, DeviceMesh) for value in inputs):
        return False
    is_kept = torch._functorch.config.enable_autograd_cache and config.fx_graph_cache
    is_bundled = torch._functorch.config.bundled_autograd_cache
    return _IS_KNOWN and is_kept and not is_bundled and not config.force_disable_caches and os.name == "posix"


@contextmanager
def finding(
    conditions: str,
    takes: Callable[[bytes], bool],
    wrap: Callable[[Compiled, bool], Any],
    await_others: Callable[[str], bool],
    graph: Callable[[bool], Compiled] | None,
) -> Iterator[None]:
    """Inside, AOTAutograd finds calls that were kept, and makes an entry of one that was not.

    Args:
        conditions: what the compiled call follows from, besides what torch knows of.
        takes: whether what was kept beside a call says that it is the one; what this raises ends the compilation.
        wrap: what is done to the code of a forward, or (True) of a backward.
        await_others: of a call that was not found, by name: whether another process has compiled it meanwhile.
        graph: what runs without generated code: the graph of a forward that was taken, or (True) of a backward. None:
            their code is in Inductor's cache.
    """
    key_of, lookup = autograd_cache.autograd_cache_key, AOTAutogradCache._lookup
    load, post_compile = FxGraphCacheLoadable.load, FxGraphCacheLoadable.post_compile

    def with_conditions(*args: Any, **kwargs: Any) -> tuple[str, list[str]]:
        key, lines = key_of(*args, **kwargs)
        everything = f"{key} {sys.version} {conditions}"
        return f"a{hashlib.sha256(everything.encode()).hexdigest()}", lines

    def look(key: str, local: bool, remote: bool, *args: Any) -> tuple[Any, bytes | None]:
        if not _is_ours(Path(AOTAutogradCache._get_tmp_dir_for_key(key))):
            return None, None
        found = lookup(key, local, False, *args)
        return found, None if found is None else _beside(found[0])

    def if_taken(key: str, *args: Any) -> Any:
        try:
            found, data = look(key, *args)
            if data is None and await_others(key):
                found, data = look(key, *args)
            return found if data is not None and takes(data) else None
        except Exception as e:
            raise _PastTorch(e) from None

    @functools.wraps(load)
    def loaded(self: Any, *args: Any) -> Any:
        return load(self, *args) if graph is None else graph(self._is_backward())

    @functools.wraps(post_compile)
    def wrapped(self: Any, code: Any, *args: Any) -> Any:
        return wrap(post_compile(self, code, *args) if graph is None else code, self._is_backward())

    with ExitStack() as patched:
        # Torch would make the entry when the first backward runs, for which the other ranks would have to wait.
        patched.enter_context(torch._functorch.config.patch(force_non_lazy_backward_lowering=True))
        patched.enter_context(patch.object(autograd_cache, "autograd_cache_key", with_conditions))
        patched.enter_context(patch.object(AOTAutogradCache, "_lookup", staticmethod(if_taken)))
        patched.enter_context(patch.object(FxGraphCacheLoadable, "load", loaded))
        patched.enter_context(patch.object(FxGraphCacheLoadable, "post_compile", wrapped))
        try:
            yield
        except _PastTorch as e:
            raise e.error from None


class _PastTorch(BaseException):
    """Carries an error through torch's cache, which would go on after any `Exception`."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def make_known(run: Any, compiled: Any, file: str) -> bool:
    """Let torch make an entry of `run`, which runs what was compiled; whether Inductor has kept its code.

    Args:
        compiled: by Inductor; None: no code was generated.
        file: what `keep_beside` returned.
    """
    if (key := "" if compiled is None else getattr(compiled, "_fx_graph_cache_key", None)) is None:
        return False
    run._fx_graph_cache_key = key
    run._fx_graph_cache_debug_lines = [f"{_FILE}{file}"]
    run.guards_expr = getattr(compiled, "guards_expr", None)
    return True


def keep_beside(data: bytes) -> str | None:
    """Write a file to be kept beside a call; its name. None where it cannot be written."""
    name = hashlib.sha256(data).hexdigest()
    path = _folder() / name
    with suppress(OSError):
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                made = Path(scratch) / name
                made.write_bytes(data)
                made.replace(path)
        return name
    return None


def _beside(entry: Any) -> bytes | None:
    """What was kept beside the call of an entry; None where it cannot be trusted, or is another."""
    lines = entry.compiled_fw.fx_graph_cache_info[1]
    names = [line.removeprefix(_FILE) for line in lines if line.startswith(_FILE)]
    if not names or not _is_ours(_folder() / names[0]):
        return None
    with suppress(OSError):
        data = (_folder() / names[0]).read_bytes()
        return data if hashlib.sha256(data).hexdigest() == names[0] else None
    return None


def _folder() -> Path:
    return Path(cache_dir()) / "fsdp_compile"


def _is_ours(path: Path) -> bool:
    """Whether this file or folder, what is in it, and the folders that lead to it are this user's alone to write."""
    try:
        inside = list(path.iterdir()) if path.is_dir() else []
        above = [parent for parent in path.parents if parent.is_relative_to(cache_dir())]
        found = [each.stat() for each in (*inside, path, *above)]
    except OSError:
        return False
    return all(each.st_uid == os.getuid() and not each.st_mode & _OTHERS_WRITE for each in found)
