"""What ranks are forked from: a process that has imported what they use, and has compiled a model.

What comes before a process's first graph takes longer than many tests: torch digests its own sources and Triton's for
the keys of its caches, and traces the patterns that Inductor replaces.
"""

import contextlib
import os

import torch
from torch import nn
from torch._inductor import config
from tqdm import tqdm

from fsdp_compile import fsdp_compile
from tests.distributed import training  # noqa: F401

tqdm.monitor_interval = 0  # threads would be missing in a fork: neither one that watches progress bars, nor compilers


@config.patch(compile_threads=1)
def compile_a_model() -> None:
    for backend in ("aot_eager", "inductor"):
        model = fsdp_compile(nn.Linear(4, 4), backend=backend)
        model(torch.ones(4, 4)).sum().backward()
    torch._dynamo.reset()


with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere), contextlib.suppress(Exception):
    compile_a_model()  # what fails here fails in a test as well, which says why
