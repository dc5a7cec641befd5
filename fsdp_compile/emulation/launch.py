"""Runs a module or a script as on a machine with a GPU: `python -P launch.py [--run] GPU MODULE [ARGUMENT ...]`.

torch looks for CUDA once, while it is imported. So this is a script of its own, run by its path. It imports nothing of
the package before it has loaded the library of device.cpp into the process.
With `--run`, Triton is imported as its interpreter, and compiled graphs run (run.py).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")


def main() -> None:
    runs = sys.argv[1] == "--run"
    gpu, module, *arguments = sys.argv[1 + runs :]
    if runs:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it while it is imported
    found = find_spec("torch")
    if found is None or not found.submodule_search_locations:
        sys.exit("error: torch is not installed")
    torch = Path(found.submodule_search_locations[0])
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU that is there is not touched
    # libtorch.so brings the rest along. A CUDA build of torch registers its CUDA then, and ours comes in its place.
    for library in (torch / "lib/libtorch.so", _compiled(torch)):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)

    import runpy

    from fsdp_compile.emulation import device

    device.emulate(gpu)
    if runs:
        from fsdp_compile.emulation import run

        run.install()
    sys.argv = [module, *arguments]
    if module.endswith(".py"):
        sys.path.insert(0, str(Path(module).parent))
        runpy.run_path(module, run_name="__main__")
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def _compiled(torch: Path) -> Path:
    """The library of device.cpp for this version of torch, in the user's cache; compiled once, in some 5 seconds."""
    version = (torch / "version.py").read_bytes()
    key = hashlib.sha256(SOURCE.read_bytes() + version + bytes(torch)).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fsdp_compile"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    library = cache / f"device-{key}.so"
    if library.exists() and library.stat().st_uid == os.getuid() and not library.stat().st_mode & 0o022:
        return library
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        made = Path(scratch) / library.name
        libraries = [f"-L{torch}/lib", "-lc10", "-ltorch_cpu"]
        command = [os.environ.get("CXX", "g++"), "-std=c++20", "-shared", "-fPIC", "-w", f"-I{torch}/include"]
        try:
            subprocess.run(
                [*command, str(SOURCE), "-o", str(made), *libraries], check=True, capture_output=True, text=True
            )
        except FileNotFoundError:
            sys.exit(f"error: emulation compiles {SOURCE.name} with {command[0]}, which is not installed (or set CXX)")
        except subprocess.CalledProcessError as e:
            sys.exit(f"error: {SOURCE.name} does not compile against torch {torch}:\n{e.stderr[-2000:]}")
        made.chmod(0o700)
        made.replace(library)
    return library


if __name__ == "__main__":
    main()
