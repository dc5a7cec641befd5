"""Which module may import what: read from the source, nothing is imported."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from docs.generate_rooms import TARGET, arrows_up, circles, imports_of, render

ROOT = Path(__file__).parent.parent
PASSES = sorted((ROOT / "passes").glob("**/*.py"))
FRONT_END = sorted(path for path in (ROOT / "fsdp_compile").glob("**/*.py") if "passes" not in path.parts)
OTHERS = [path for folder in ("tests", "examples", "benchmarks", "docs") for path in (ROOT / folder).glob("**/*.py")]

# What passes/ may not know: processes, the clock, chance, the machine.
WORLD = {"os", "platform", "random", "secrets", "socket", "subprocess", "sys", "threading", "time", "uuid"}
DEVICES = {"torch.distributed", "torch.cuda", "torch.xpu", "torch.mps", "torch.accelerator"}
PRIVATE_TORCH = {"torch._dynamo", "torch._functorch", "torch._inductor"}
WITHOUT_A_PUBLIC_NAME = {  # as of torch 2.11 to 2.15
    "torch.utils._pytree.tree_map_only",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
}


def in_repository(path):
    return str(path.relative_to(ROOT))


def imported(path):
    """Every module or name that a file imports, in full; relative ones begin with dots."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            separator = "" if module.endswith(".") else "."
            found += [f"{module}{separator}{alias.name}" for alias in node.names]
    return found


def attributes(path):
    """Every dotted name that a file reads, such as `os.environ`."""
    return [ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]


def is_within(name, modules):
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def is_private_torch(name):
    return name.startswith("torch.") and any(part.startswith("_") for part in name.split("."))


def test_the_files_are_found():
    assert {path.name for path in PASSES} >= {"__init__.py", "ops.py", "pipeline.py", "verifier.py"}
    assert {path.name for path in FRONT_END} >= {"api.py", "capture.py", "units.py", "kernels.py"}


@pytest.mark.parametrize("path", PASSES, ids=in_repository)
def test_a_pass_knows_no_process_no_clock_no_device(path):
    names = [*imported(path), *attributes(path)]
    assert [name for name in names if is_within(name, WORLD | DEVICES)] == []


@pytest.mark.parametrize("path", PASSES, ids=in_repository)
def test_a_pass_imports_its_neighbours_relatively_and_nothing_of_the_front_end(path):
    names = imported(path)
    assert [name for name in names if is_within(name, {"fsdp_compile", "passes"})] == []
    assert [name for name in names if name.startswith("..")] == []


@pytest.mark.parametrize("path", [*PASSES, *FRONT_END], ids=in_repository)
def test_private_parts_of_torch_are_imported_where_they_are_driven_or_emulated_only(path):
    names = imported(path) + [name for name in attributes(path) if is_within(name, PRIVATE_TORCH)]
    is_allowed = path.name == "policies.py" or path.parent.name in ("compiler", "runtime", "emulation")
    private = [name for name in names if is_private_torch(name) and name not in WITHOUT_A_PUBLIC_NAME]
    assert is_allowed or private == []


@pytest.mark.parametrize("path", [*PASSES, *FRONT_END], ids=in_repository)
def test_the_environment_is_read_by_the_entry_points_only(path):
    names = [*imported(path), *attributes(path)]
    read = [name for name in names if is_within(name, {"os.environ", "os.getenv", "os.environb"})]
    assert path.name in ("environment.py", "launch.py") or path.parent.name == "cli" or read == []


@pytest.mark.parametrize("path", [*FRONT_END, *OTHERS], ids=in_repository)
def test_passes_are_imported_as_fsdp_compile_passes(path):
    assert [name for name in imported(path) if is_within(name, {"passes"})] == []


def test_imports_lead_down_and_never_in_circles():
    imports = imports_of(ROOT)
    assert imports["module/sharding"] >= {"module/newcomers", "runtime/flat_shard", "passes/pipeline"}
    assert circles(imports) == [] == arrows_up(imports)


def test_circles_and_arrows_up_are_found(tmp_path):
    """Local imports and those for types, too."""
    files = {
        "layout/units": "def f():\n    from ..module.sharding import g\n",
        "module/sharding": "if TYPE_CHECKING:\n    from fsdp_compile.layout import units\n",
    }
    for name, text in files.items():
        path = tmp_path / "fsdp_compile" / f"{name}.py"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    imports = imports_of(tmp_path)
    assert circles(imports) == [set(files)] and arrows_up(imports) == [("layout", "module")]


def test_the_drawing_of_the_rooms_is_fresh():
    assert TARGET.read_text() == render(), "run: python docs/generate_rooms.py"


def test_the_link_leads_to_the_passes():
    assert (ROOT / "fsdp_compile" / "passes").resolve() == ROOT / "passes"


def test_importing_the_package_loads_the_passes_once_and_creates_no_process_group():
    program = (
        "import sys, torch.distributed as dist\n"
        "from fsdp_compile import fsdp_compile\n"
        "assert 'fsdp_compile.passes.ops' in sys.modules\n"
        "assert 'passes' not in sys.modules\n"
        "assert not dist.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
