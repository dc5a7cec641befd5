"""The wheel holds the passes under fsdp_compile only, and torch finds the backend in it without an import."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD_WHEEL = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "."]


def copy_checkout(place: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place / name)
    for name in ("fsdp_compile", "passes"):
        shutil.copytree(ROOT / name, place / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))


def build_wheel(checkout: Path) -> Path:
    subprocess.run([*BUILD_WHEEL, "--wheel-dir", "dist"], cwd=checkout, check=True)
    (wheel,) = (checkout / "dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkout = tmp_path_factory.mktemp("checkout")
    copy_checkout(checkout)
    return build_wheel(checkout)


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as an installer unpacks it, in a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def run_python(code: str, site: Path) -> str:
    """What a fresh process prints that finds the wheel before any installation of this checkout."""
    environment = dict(os.environ, PYTHONPATH=str(site))
    process = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=site, check=True, stdout=subprocess.PIPE, text=True
    )
    return process.stdout.strip()


def test_passes_are_in_the_wheel_once_and_not_at_top_level(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for folder, package in (
        ("passes", "fsdp_compile/passes"),
        ("fsdp_compile/runtime", "fsdp_compile/runtime"),
    ):
        for file in (ROOT / folder).glob("*.py"):
            assert names.count(f"{package}/{file.name}") == 1
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"fsdp_compile"}


def test_checkout_that_lost_the_symlink_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    copy_checkout(tmp_path)
    link = tmp_path / "fsdp_compile" / "passes"
    assert os.readlink(link) == "../passes"
    link.unlink()
    link.write_text("../passes")  # what git leaves where it may not make links
    assert sorted(zipfile.ZipFile(build_wheel(tmp_path)).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


def test_entry_point_names_the_backend(site: Path) -> None:
    (distribution,) = importlib.metadata.distributions(path=[str(site)])
    assert {(e.group, e.name, e.value) for e in distribution.entry_points} == {
        ("console_scripts", "fsdp-compile", "fsdp_compile.cli.main:main"),
        ("torch_dynamo_backends", "fsdp", "fsdp_compile.backend:fsdp"),
    }


def test_torch_lists_the_backend_without_an_import(site: Path) -> None:
    code = "import sys, torch._dynamo as d; print('fsdp' in d.list_backends(), 'fsdp_compile' in sys.modules)"
    assert run_python(code, site) == "True False"


def test_backend_comes_from_the_wheel(site: Path) -> None:
    code = "import sys, torch._dynamo as d; d.lookup_backend('fsdp'); print(sys.modules['fsdp_compile'])"
    assert str(site / "fsdp_compile" / "__init__.py") in run_python(code, site)


def test_no_module_of_the_wheel_is_imported_as_passes(site: Path) -> None:
    found = "print('fsdp_compile.passes' in sys.modules, 'passes' in sys.modules)"
    code = f"import sys; from fsdp_compile import rewrite; {found}"
    assert run_python(code, site) == "True False"
