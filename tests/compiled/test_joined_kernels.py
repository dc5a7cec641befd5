"""Kernels of one file compute what each would by itself."""

from unittest.mock import patch

import pytest
import torch
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.exc import CppCompileError

from fsdp_compile.runtime import joined_kernels
from fsdp_compile.runtime.joined_kernels import _MOST, _File

ARGUMENTS = ["const float*", "float*", "const int64_t"]
HEADER = "\n#include <torch/csrc/inductor/cpp_prefix.h>\n"


def adding(number, header=HEADER):
    return (
        f'{header}extern "C"  void  kernel(const float* in_ptr0, float* out_ptr0, const int64_t ks0)\n'
        f"{{\n    for (int64_t x0 = 0; x0 < ks0; ++x0) out_ptr0[x0] = in_ptr0[x0] + {number}.0f;\n}}\n"
    )


def loaded(*sources):
    """The functions of a generated module, and how many files they were compiled in."""
    compiler = AsyncCompile()
    with patch.object(_File, "load_async", wraps=_File.load_async) as compiled, joined_kernels.joined_kernels():
        scope = {f"kernel_{n}": compiler.cpp_pybinding(ARGUMENTS, source) for n, source in enumerate(sources)}
        compiler.wait(scope)
    return list(scope.values()), compiled.call_count


def is_added(kernel, number):
    out = torch.zeros(3)
    kernel(torch.arange(3.0), out, 3)
    return torch.equal(out, torch.arange(3.0) + number)


@pytest.mark.parametrize("threads", [1, 2])
def test_many_kernels_are_few_files(threads):
    numbers = [number + 1000 * threads for number in range(_MOST + 1)]
    with torch._inductor.config.patch("compile_threads", threads):
        kernels, num_files = loaded(*map(adding, numbers))
    assert num_files == 2
    assert all(map(is_added, kernels, numbers))


def test_kernels_of_other_forms_are_compiled_one_by_one():
    """What includes or defines something for itself might not go along with others."""
    cmath, macro = HEADER + "#include <cmath>\n", HEADER + "#define ONE 1\n"
    kernels, num_files = loaded(adding(1, cmath), adding(2, macro), adding(3))
    assert num_files == 1
    assert all(map(is_added, kernels, (1, 2, 3)))


def test_a_kernel_that_is_there_twice_is_compiled_once():
    with patch.object(joined_kernels._Kernel, "part", autospec=True, side_effect=joined_kernels._Kernel.part) as parts:
        kernels, num_files = loaded(adding(7), adding(8), adding(7))
    assert (num_files, parts.call_count) == (1, 2)
    assert all(map(is_added, kernels, (7, 8, 7)))


def test_kernels_are_compiled_while_others_are_asked_for():
    """As those of a forward while the code of its backward is generated; what fails is known when all are loaded."""
    broken = adding(10).replace("+ 10.0f", "+ nothing")
    with pytest.raises(CppCompileError, match="nothing"), joined_kernels.joined_kernels():
        scopes = []
        for source in (adding(9), broken, adding(11)):
            with joined_kernels.joined_kernels():
                compiler = AsyncCompile()
                scopes.append({"kernel": compiler.cpp_pybinding(ARGUMENTS, source)})
                compiler.wait(scopes[-1])
            assert not callable(scopes[-1]["kernel"])
    assert is_added(scopes[0]["kernel"], 9) and is_added(scopes[2]["kernel"], 11)


def test_a_module_without_kernels_compiles_nothing():
    assert loaded() == ([], 0)


def test_torch_logs_show_every_kernel(caplog):
    with caplog.at_level("INFO", logger="torch._inductor.async_compile.__kernel_code"):
        loaded(adding(3), adding(1))
    assert [adding(3) in caplog.text, adding(1) in caplog.text] == [True, True]
