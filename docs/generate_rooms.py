"""Draw the rooms of the code in docs/architecture.md, from what files import: python docs/generate_rooms.py.

A room is a folder of fsdp_compile/, or a file beside them. All imports count: local ones, and those for types only.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- rooms: drawn by docs/generate_rooms.py -->\n", "<!-- end of rooms -->\n"
PACKAGE = "fsdp_compile"

FROM_THE_TOP = (
    "emulation",
    "cli",
    "integrations",
    "compat",
    "api",
    "rewriting",
    "traced_call",
    "backend",
    "module",
    "report",
    "compiler",
    "options",
    "planning",
    "costs",
    "runtime",
    "layout",
    "graphs",
    "dependence",
    "checks",
    "progress",
    "cache",
    "environment",
    "errors",
    "passes",
)
"""A room imports only rooms that stand behind it here."""

Imports = Mapping[str, set[str]]
"""By file, without `.py`, what it imports: the same, and names of folders that hold such files."""


def imports_of(root: Path) -> Imports:
    """What every file of a checkout imports of the others; what only hands names on is left out."""
    package = root / PACKAGE
    files = {path.relative_to(package).with_suffix("").as_posix(): path for path in package.glob("**/*.py")}
    files |= {f"passes/{path.stem}": path for path in (root / "passes").glob("*.py")}
    return {
        name: {found for found in _imported(name, path, files) if found != name}
        for name, path in sorted(files.items())
        if name not in ("__init__", "__main__")
    }


def _imported(name: str, path: Path, files: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            above = name.split("/")[: -node.level] if node.level else []
            parts = [*above, *(node.module or "").split(".")] if node.module else above
            if not node.level:
                if parts[0] != PACKAGE:
                    continue
                parts = parts[1:]
            for alias in node.names:
                found = ["/".join([*parts, alias.name]), "/".join(parts), "/".join([*parts, "__init__"])]
                yield from [each for each in found if each in files][:1]


def circles(imports: Imports) -> list[set[str]]:
    """Files that import each other, directly or through others."""

    @cache
    def reached(name: str) -> frozenset[str]:
        seen, open_ = set[str](), [name]
        while open_:
            new = imports.get(open_.pop(), set()) - seen
            seen |= new
            open_ += new
        return frozenset(seen)

    found = {frozenset(each for each in imports if name in reached(each) and each in reached(name)) for name in imports}
    return sorted((set(each) for each in found if len(each) > 1), key=sorted)


def room_of(name: str) -> str:
    return name.split("/")[0]


def arrows(imports: Imports) -> set[tuple[str, str]]:
    """From each room to those that it imports."""
    pairs = {(room_of(name), room_of(found)) for name, others in imports.items() for found in others}
    return {(room, other) for room, other in pairs if room != other}


def arrows_up(imports: Imports) -> list[tuple[str, str]]:
    """Those that do not lead to a room behind, by `FROM_THE_TOP`."""
    place = {room: index for index, room in enumerate(FROM_THE_TOP)}
    return [(room, other) for room, other in sorted(arrows(imports)) if place[room] >= place[other]]


def drawing(root: Path) -> str:
    """Each room, with the rooms that it imports and that none of those imports."""
    imports = imports_of(root)
    below: dict[str, set[str]] = {}
    for room, other in arrows(imports):
        below.setdefault(room, set()).add(other)
    rooms = [room for room in FROM_THE_TOP if room in {room_of(name) for name in imports}]
    lines = []
    for room in rooms:
        direct = below.get(room, set())
        shown = [
            other for other in rooms if other in direct and not any(other in below.get(each, ()) for each in direct)
        ]
        lines.append(f"{room:<11} {_title(root, room)}")
        lines += [f"{'':<11}     ─► {', '.join(shown)}"] if shown else []
    return "\n".join(lines)


def _paths(root: Path, room: str) -> list[Path]:
    folder = root / "passes" if room == "passes" else root / PACKAGE / room
    return sorted(folder.glob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def _title(root: Path, room: str) -> str:
    """The first sentence of its docstring."""
    path = next((path for path in _paths(root, room) if path.stem == "__init__"), _paths(root, room)[0])
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    sentence = re.split(r"(?<=\.)\s", " ".join(text.split()))[0].rstrip(".")
    return sentence.partition(": ")[2] or sentence


def render() -> str:
    """The text of docs/architecture.md with the drawing anew."""
    before, _, rest = TARGET.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n```text\n{drawing(ROOT)}\n```\n\n{END}{after}"


if __name__ == "__main__":
    TARGET.write_text(render())
