"""docs/passes.md says what the passes say."""

import re

from docs.generate_passes import PASSES, ROOT, TARGET, render


def test_the_page_is_fresh():
    assert TARGET.read_text() == render(), "run: python docs/generate_passes.py"


def test_every_pass_is_on_the_page():
    files = {path.stem for path in (ROOT / "passes").glob("*.py") if "    Before   " in path.read_text()}
    files |= {path.stem for path in (ROOT / "passes").glob("*.py") if "\nBefore   " in path.read_text()}
    assert files == set(PASSES)


def test_every_pass_has_its_tests():
    assert [name for name in PASSES if not (ROOT / "tests" / "passes" / f"test_{name}.py").exists()] == []


def test_options_are_in_words_and_none_is_for_debugging_only():
    options = [line for line in render().splitlines() if line.startswith("Options: ")]
    assert options
    for line in options:
        assert "poison" not in line and not re.search(r"\w+\(\w+: '", line), line
