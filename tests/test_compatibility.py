"""docs/compatibility.md says what its generator says, and every test that it names exists."""

from docs import generate_compatibility
from docs.generate_compatibility import SECTIONS, TARGET, YES, Case, missing_tests, render


def test_the_page_is_fresh():
    assert TARGET.read_text() == render(), "run: python docs/generate_compatibility.py"


def test_every_named_test_exists():
    assert missing_tests() == []


def test_whatever_works_is_shown_by_a_test():
    assert [case.name for cases in SECTIONS.values() for case in cases if case.result == YES and not case.tests] == []


def test_a_test_that_is_gone_is_found(monkeypatch):
    gone = ("test_compatibility.py::test_that_is_gone", "test_of_no_file.py::test_of_no_file")
    monkeypatch.setattr(generate_compatibility, "SECTIONS", {"": [Case("", YES, YES, gone)]})
    assert missing_tests() == list(gone)
