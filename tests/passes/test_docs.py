"""docs/passes.md says what the passes say."""

from docs.generate_passes import PASSES, ROOT, TARGET, render


def test_the_page_is_fresh():
    assert TARGET.read_text() == render(), "run: python docs/generate_passes.py"


def test_every_pass_is_on_the_page():
    files = {path.stem for path in (ROOT / "passes").glob("*.py") if "    Before   " in path.read_text()}
    files |= {path.stem for path in (ROOT / "passes").glob("*.py") if "\nBefore   " in path.read_text()}
    assert files == set(PASSES)


def test_every_pass_has_its_tests():
    assert [name for name in PASSES if not (ROOT / "tests" / "passes" / f"test_{name}.py").exists()] == []
