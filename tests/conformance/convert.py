"""PyTorch's own tests of FSDP, made to run on the CPU: "cuda" becomes "cpu", and the shim is imported first."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

FOLDERS = ("fsdp", "_composable/fsdp", "_composable/test_composability")  # of PyTorch's test/distributed
FIRST_LINE = "import tests.conformance.shim\n"
CHANGES = (
    (r"""(["'])cuda(:\d+)?\1""", r"\1cpu\1"),
    (r"""f(["'])cuda:\{[^}]*\}\1""", '"cpu"'),
    (r"\.cuda\((\w+(\.\w+)*)?\)", ".cpu()"),
    (r"""(["'])(?:cpu:gloo,cuda:)?nccl\1""", r"\1gloo\1"),
    (r",\s*device_id=[^,()]+(?=[,)])", ""),
    (r"((?:\.to\(|device=|^\s+))self\.device\b(?=[,)])", r'\1torch.device("cpu")'),
    (r"torch\.cuda\.is_available\(\)", "True"),
    (r'torch\.device\("cpu",\s*[\w.]+(\(\))?\)', 'torch.device("cpu")'),
)


def suites(sources: Path) -> Path:
    """The folder that is PyTorch's test/distributed: `sources`, or one in it.

    Raises:
        SystemExit: there is none.
    """
    candidates = [sources, *sorted(sources.glob("**/test/distributed")), *sorted(sources.iterdir())]
    for candidate in candidates:
        if any((candidate / folder).is_dir() for folder in FOLDERS):
            return candidate
    raise SystemExit(
        f"{sources} has no folder {' or '.join(FOLDERS)}: give PyTorch's test/distributed, or what holds it"
    )


def test_files(sources: Path, pattern: str) -> Iterator[tuple[str, Path]]:
    """Each file of tests, with its name below test/distributed."""
    root = suites(sources)
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("test_*.py")):
            name = file.relative_to(root).as_posix()
            if fnmatch(name, f"{pattern}*"):
                yield name, file


def convert(sources: Path, pattern: str, target: Path) -> list[str]:
    """Write the converted tests that `pattern` names into `target`; their names."""
    names = []
    for name, file in test_files(sources, pattern):
        text = file.read_text()
        for before, after in CHANGES:
            text = re.sub(before, after, text, flags=re.MULTILINE)
        (target / module_of(name)).with_suffix(".py").write_text(FIRST_LINE + text)
        names.append(name)
    return names


def module_of(name: str) -> str:
    """The Python module that a file becomes; names have to differ between folders."""
    return name.removesuffix(".py").replace("/", "__")


def name_of(module: str) -> str:
    """The other way: PyTorch's files have no double underscore in their names."""
    return module.replace("__", "/") + ".py"
