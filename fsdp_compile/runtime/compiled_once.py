"""Compiled once: processes that share Inductor's cache do not make the same at the same time.

All ranks come to the same call at about the same time. One of those on a host traces it, rewrites it and generates its
code, while the others wait; they find it in the cache then. What is not kept as a whole they trace and rewrite
themselves, and wait for the code of each graph.

The cache and its locks are private, as of torch 2.11 to 2.15.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from torch._inductor import config
from torch._inductor.codecache import LOCK_TIMEOUT, get_lock_dir


@contextmanager
def one_at_a_time(what: str) -> Iterator[bool]:
    """Inside, no process with the same cache is where `what` is the same; yields whether one was a moment ago.

    A process waits for one other only, and no longer than Inductor's `file_lock_timeout`: what is not found after
    that, the others make side by side.
    """
    by_another = False
    with ExitStack() as held:
        try:
            lock = FileLock(Path(get_lock_dir()) / f"fsdp_compile_{hashlib.sha256(what.encode()).hexdigest()}.lock")
            held.enter_context(lock.acquire(blocking=False))
        except Timeout:
            by_another = True
            with suppress(Timeout), lock.acquire(timeout=LOCK_TIMEOUT):
                pass
        except OSError:  # nothing can be written there: Inductor finds what it needs, or says so
            pass
        yield by_another


@contextmanager
def compiled_once(graph: torch.fx.GraphModule) -> Iterator[bool]:
    """Inside, no process with the same cache compiles an equal graph; yields whether one did a moment ago."""
    with one_at_a_time(graph.code) if _is_found_by_others() else nullcontext(False) as by_another:
        yield by_another


def _is_found_by_others() -> bool:
    """Whether processes find what one compiles, and do not tune kernels together meanwhile."""
    is_kept = config.fx_graph_cache and not config.force_disable_caches
    return is_kept and not config.distributed_max_autotune_gemm
