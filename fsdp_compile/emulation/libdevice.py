"""The functions of CUDA's libdevice that generated kernels call, for Triton's interpreter, which has none of them.

Triton looks them up while it compiles; interpreted, a kernel would call the stubs of `triton.language.extra.libdevice`,
which return None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime.interpreter import TensorHandle

_SAME_NAME = [
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "ceil",
    "copysign",
    "cos",
    "cosh",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "fmod",
    "hypot",
    "isinf",
    "isnan",
    "ldexp",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "nextafter",
    "pow",
    "rsqrt",
    "signbit",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
    "trunc",
]

_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {name: getattr(torch, name) for name in _SAME_NAME}
_FUNCTIONS |= {"fast_tanhf": torch.tanh, "nearbyint": torch.round, "rint": torch.round}
_FUNCTIONS["llrint"] = lambda x: torch.round(x).to(torch.int64)
_FUNCTIONS["fma"] = lambda x, y, z: (x.double() * y.double() + z.double()).to(x.dtype)
_FUNCTIONS["div_rn"] = torch.div
_FUNCTIONS["sqrt_rn"] = torch.sqrt

_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64, torch.int64: tl.int64, torch.int32: tl.int32}


def install() -> None:
    for name in vars(libdevice):
        if name in _FUNCTIONS:
            setattr(libdevice, name, _interpreted(_FUNCTIONS[name]))
        elif callable(getattr(libdevice, name)):
            setattr(libdevice, name, _missing(name))


def _interpreted(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """`function` of torch, on the values of Triton's interpreter: it broadcasts them, and returns one."""

    def call(*arguments: Any) -> Any:
        result = function(*map(_tensor_of, arguments))
        if result.dtype == torch.bool:  # libdevice's predicates return int32
            result = result.to(torch.int32)
        dtype = _TYPES[result.dtype]
        kind = tl.block_type(dtype, list(result.shape)) if result.dim() and _is_block(arguments) else dtype
        return tl.tensor(TensorHandle(result.numpy(), dtype), kind)

    return call


def _is_block(arguments: Any) -> bool:
    return any(isinstance(argument, tl.tensor) and argument.type.is_block() for argument in arguments)


def _tensor_of(argument: Any) -> torch.Tensor:
    if isinstance(argument, tl.tensor):
        return torch.from_numpy(np.ascontiguousarray(argument.handle.data))
    return torch.tensor(argument.value if isinstance(argument, tl.constexpr) else argument)


def _missing(name: str) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        raise NotImplementedError(f"libdevice.{name} has no counterpart in fsdp_compile/emulation/libdevice.py")

    return call
