"""What docs/compatibility.md says works is shown by a test: the link's text is the name of the test."""

import ast
import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "compatibility.md"


def missing_tests(text):
    """The tests that a page names and that do not exist, as `file::function`."""
    found = []
    for words, file in re.findall(r"\[([^]]+)\]\((\.\./tests/[^)]+)\)", text):
        path, name = PAGE.parent / file, f"test_{words.replace(' ', '_')}"
        tree = ast.parse(path.read_text() if path.exists() else "")
        if name not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
            found.append(f"{path.name}::{name}")
    return found


def test_every_named_test_exists():
    assert missing_tests(PAGE.read_text()) == []


def test_whatever_works_is_shown_by_a_test():
    ours = [line.rsplit("|", 2)[1].strip() for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert len(ours) > 50 and [cell for cell in ours if cell.startswith("yes") and "](../tests/" not in cell] == []


def test_a_test_that_is_gone_is_found():
    text = "[that is gone](../tests/test_compatibility.py) and [of no file](../tests/test_of_no_file.py)"
    assert missing_tests(text) == ["test_compatibility.py::test_that_is_gone", "test_of_no_file.py::test_of_no_file"]
