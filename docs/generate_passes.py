"""Write docs/passes.md from the docstrings of the passes: python docs/generate_passes.py."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
import textwrap
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "passes.md"

PASSES = (
    "merge_unshards",
    "commute_casts",
    "merge_gradients",
    "merge_all_reduces",
    "partition_joint",
    "decompose_collectives",
    "overlap_model_collectives",
    "commute_scales",
    "insert_all_gather",
    "insert_reduce_scatter",
    "insert_free",
    "prefetch_all_gather",
    "delay_reduce_scatter_wait",
    "overlap_copies",
    "update_in_backward",
    "end_lives",
    "compute_early",
    "lower_collectives",
    "pin_matmuls",
    "outline_blocks",
)

HEAD = """\
<!-- Generated from the docstrings by docs/generate_passes.py; a test keeps it fresh. -->

# The passes

Each is one file in `passes/`, and one file of pictures in `tests/passes/`. *Before* and *After* show what a pass does,
*Needs* what must hold before it, *Keeps* what it does not change, *Cost* what it takes.
"""


def render() -> str:
    """The text of docs/passes.md."""
    sections = [HEAD, _in_prose(_of("pipeline"), skip_title=True)]
    sections += [_pass_section(_of(name)) for name in PASSES]
    sections += ["## The operators of the dialect", _in_prose(_of("ops"))]
    sections += ["## The invariants", _in_prose(_of("verifier"))]
    for name in ("verify", "verify_crossing"):
        function = getattr(_of("verifier"), name)
        sections.append(f"`{name}`: {_paragraphs(inspect.getdoc(function))}")
    return "\n\n".join(section.strip("\n") for section in sections) + "\n"


def _of(name: str) -> ModuleType:
    return importlib.import_module(f"fsdp_compile.passes.{name}")


def _pass_section(module: ModuleType) -> str:
    [found] = [value for value in vars(module).values() if _is_pass(value, module)]
    parts = [f"## {found.__name__}", _in_prose(module)]
    if fields := [field for field in dataclasses.fields(found) if field.metadata.get("for") != "debugging"]:
        names = ", ".join(f"`{field.name}: {field.type} = {_default(field)}`" for field in fields)
        meaning = _paragraphs(inspect.getdoc(found)).replace("; see the module's text", "")
        parts.append(f"Options: {names}. {meaning}")
    return "\n\n".join(parts)


def _is_pass(value: object, module: ModuleType) -> bool:
    expected = module.__name__.rpartition(".")[2].replace("_", "")
    return inspect.isclass(value) and value.__name__.lower() == expected


def _default(field: dataclasses.Field[object]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _in_prose(module: ModuleType, *, skip_title: bool = False) -> str:
    text = inspect.getdoc(module) or ""
    return _paragraphs(text.partition("\n\n")[2] if skip_title else text)


def _paragraphs(text: str | None) -> str:
    """The paragraphs of a docstring; those that are set off, or tell before from after, as they stand.

    A "::" is what docstrings announce the former with, for Sphinx.
    """
    rendered = []
    for paragraph in (text or "").split("\n\n"):
        is_set_off = all(line.startswith(" ") for line in paragraph.splitlines())
        if is_set_off or paragraph.startswith("Before "):
            paragraph = f"```text\n{textwrap.dedent(paragraph)}\n```"
        rendered.append(paragraph[:-1] if paragraph.endswith("::") else paragraph)
    return "\n\n".join(rendered)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    TARGET.write_text(render())
