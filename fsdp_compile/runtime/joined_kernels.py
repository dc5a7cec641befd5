"""How the C++ kernels of generated code are compiled: many in a file.

Inductor compiles each kernel as a file of its own. Most of that time, the compiler reads the same headers and links
the same libraries, and most of a small model's first step on a CPU would be that. The files of a forward are compiled
while Inductor generates the code of its backward.

Private torch API, as of torch 2.11 to 2.15: how generated code asks for a kernel (`AsyncCompile.cpp_pybinding`), and
how Inductor builds and loads an extension module for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from torch._inductor.async_compile import AsyncCompile, get_compile_threads, kernel_code_log
from torch._inductor.codecache import CppPythonBindingsCodeCache

from ..progress import phase

_MOST = 16
"""Kernels in a file: they take the compiler about twice as long as the headers do. Files are compiled side by side."""

_PLAIN = re.compile(r'\s*#include [<"][^\n]*cpp_prefix\.h[>"]\s+extern "C"\s+void\s+kernel\(')


@contextlib.contextmanager
def joined_kernels() -> Iterator[None]:
    """Inside, generated code that is loaded has its C++ kernels compiled many in a file; it can run when this is left.

    Where this is inside itself, when the outermost is.
    """
    if _loading.get() is not None:
        yield
        return
    one_by_one, wait = AsyncCompile.cpp_pybinding, AsyncCompile.wait
    loading = ExitStack()

    @functools.wraps(one_by_one)
    def cpp_pybinding(self: AsyncCompile, argtypes: list[str], source_code: str, *others: Any, **named: Any) -> Any:
        if _is_plain(source_code) and not (others or named):
            kernel_code_log.info("CPP+Bindings Kernel:\n%s", source_code)  # for TORCH_LOGS=kernel_code
            return _Kernel(tuple(argtypes), source_code)
        return one_by_one(self, argtypes, source_code, *others, **named)

    @functools.wraps(wait)
    def wait_for_all(self: AsyncCompile, scope: dict[str, Any]) -> None:
        kernel_of_name = {name: value for name, value in scope.items() if isinstance(value, _Kernel)}
        functions_of = _compiling(sorted(set(kernel_of_name.values()), key=lambda kernel: kernel.name))

        def load() -> None:
            functions = functions_of()
            scope.update({name: functions[kernel] for name, kernel in kernel_of_name.items()})

        loading.callback(load)
        wait(self, scope)

    with patch.object(AsyncCompile, "cpp_pybinding", cpp_pybinding), patch.object(AsyncCompile, "wait", wait_for_all):
        token = _loading.set(loading)
        try:
            yield
        finally:
            _loading.reset(token)
            with phase("compiling the kernels"):
                loading.close()  # whatever has happened: Inductor keeps generated code that was loaded


_loading: ContextVar[ExitStack | None] = ContextVar("fsdp_compile_loading", default=None)


def _is_plain(source: str) -> bool:
    """Whether a file has a kernel and nothing besides, which could not be there twice."""
    return bool(_PLAIN.match(source)) and source.count("#include") == 1 and "#define" not in source


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """What generated code asks for: the C++ types of the arguments, and the source of `kernel`."""

    argtypes: tuple[str, ...]
    source: str

    @functools.cached_property
    def name(self) -> str:
        return f"kernel_{hashlib.sha256(repr((self.argtypes, self.source)).encode()).hexdigest()[:24]}"

    @functools.cached_property
    def binding(self) -> type[_Binding]:
        call = f"{self.name}({{}}); Py_RETURN_NONE;"
        return type("_Binding", (_Binding,), {"entry_function": self.name, "call_entry_function": call})

    def part(self) -> str:
        """The source of the kernel and of a Python module with it, both of its name, in a namespace of their own."""
        self.binding.load_pybinding_async(self.argtypes, self.source.replace("kernel(", f"{self.name}(", 1))
        return f"namespace of_{self.name} {{\n{self.binding.source}\n}}\n"


class _Binding(CppPythonBindingsCodeCache):
    """Keeps the source that Inductor would compile."""

    source = ""

    @classmethod
    def load_async(cls, main_code: str, *args: Any, **kwargs: Any) -> None:
        cls.source = main_code


class _File(CppPythonBindingsCodeCache):
    """Knows where a library is that holds the modules of several kernels."""

    @classmethod
    def _load_library_inner(cls, path: str, key: str) -> Any:
        return SimpleNamespace(path=path)


_HEADERS = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cerrno>
#include <cstdlib>
#include <sstream>
#include <torch/csrc/inductor/cpp_prefix.h>
"""
"""What every part includes, too. It is included here first, or a part would have it inside its namespace."""


def _compiling(kernels: Sequence[_Kernel]) -> Callable[[], dict[_Kernel, Callable[..., None]]]:
    """Begin to compile kernels; what is returned waits for them."""
    num_files = -(-len(kernels) // _MOST)
    files = [kernels[first::num_files] for first in range(num_files)]
    sources = [_HEADERS + "".join(kernel.part() for kernel in file) for file in files]
    submit = AsyncCompile.submit if get_compile_threads() > 1 else None  # in this thread, it would wait for itself
    loading = [_File.load_async(source, submit_fn=submit) for source in sources]

    def functions() -> dict[_Kernel, Callable[..., None]]:
        found = {}
        for file, load in zip(files, loading, strict=True):
            library = load()
            for kernel in file:
                module = kernel.binding._load_library_inner(library.path, library.key)
                found[kernel] = getattr(module, kernel.name)
        return found

    return functions
