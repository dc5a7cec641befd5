"""The python of README and docs, as a reader would type it: the blocks of a page run one after another."""

import doctest
import re
from pathlib import Path

import pytest

from docs.generate_figures import FIGURES, TARGET, render
from tests.programs import Program, run_text

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# What a page takes for granted, where it shows a call rather than a program.
GIVEN = {
    "integrations.md": """
import os
os.environ["ACCELERATE_USE_CPU"] = "true"
from tests.integrations.frameworks import Rows, llama
llama().save_pretrained("checkpoint")
dataset = Rows(8)
""",
    "planning.md": """
from tests.models import build
from fsdp_compile import fsdp_compile, rewrite
def make_model():
    return build("gpt")
model = make_model()
tokens, targets = model.inputs(4, seed=0)
""",
}


def python_of(text):
    """The blocks, each at the lines that it has on the page."""
    lines, inside = [], False
    for line in text.split("\n"):
        if line.startswith("```"):
            inside, line = line == "```python", ""
        lines.append(line if inside else "")
    return "\n".join(lines)


def test_blocks_keep_their_lines():
    assert (
        python_of("a\n```python\nx = 1\n```\n```text\nno\n```\n```python\ny = 2\n```") == "\n\nx = 1\n\n\n\n\n\ny = 2\n"
    )


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_python_of_a_page_runs(path, tmp_path):
    program = python_of(path.read_text())
    if not program.strip():
        pytest.skip("has none")
    given = GIVEN.get(path.name, "")
    Program(run_text, ("given", given), (str(path), program), cwd=tmp_path).wait()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_what_a_page_says_that_is_printed_is_printed(path):
    found = doctest.testfile(str(path), module_relative=False)
    assert found.failed == 0
    assert (found.attempted > 0) == ("```pycon" in path.read_text())


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_fresh(name):
    assert (TARGET / f"{name}.svg").read_text() == render(name), "run: python docs/generate_figures.py"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_of_a_page_lead_somewhere(path):
    prose = re.sub(r"```.*?```|`[^`]*`", "", path.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", prose):
        assert target.startswith(("http://", "https://")) or (path.parent / target).exists(), target
