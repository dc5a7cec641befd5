"""Reading parameters: inside a forward, `module.weight` is the full tensor; elsewhere it is the sharded Parameter.

Each module with parameters becomes an instance of a generated subclass of its class, with a property for each of those
that it owns. Dynamo traces the property to one `fsdp::unshard` of the bucket's shard, a plain tensor; the kernel of
that operator makes the same read work where nothing is compiled.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch.compiler import is_compiling

from ..layout.buckets import Layout
from ..runtime.gradients import in_backward
from ..runtime.meta import off_meta
from ..runtime.modules import CalledByItself, Recurrent, not_captured
from ..runtime.reads import LocalRead, Read, StandIn, read_parameter
from ..runtime.recomputation import checkpoint_in_forward
from ..runtime.residuals import no_residual
from ..runtime.wrappers import RefusesWrappers
from .loading import shard_state


@dataclasses.dataclass
class Running:
    """Whether parameters read as full tensors: in a forward of the model, and while a backward recomputes it.

    Attributes:
        prepare: called before the outermost forward, with the module that is called.
        finish: called after it.
        module: what is called, while it runs.
        depth: how many forwards, and methods registered as such, are running.
        num_calls: how many of them are calls of modules, which also list their parameters as full tensors.
        with_grad: whether the outermost began with gradients. What a forward does without them then (a moving average,
            say) may be meant to write to parameters; it gets the sharded ones listed.
        is_listing_sharded: whether parameters are listed as they are outside of a forward, wherever that is.
    """

    prepare: Callable[[nn.Module], None] | None = None
    finish: Callable[[], None] | None = None
    module: nn.Module | None = None
    depth: int = 0
    num_calls: int = 0
    with_grad: bool = True
    is_listing_sharded: bool = False

    def __bool__(self) -> bool:
        return self.depth > 0 or in_backward()

    @property
    def lists_full(self) -> bool:
        if self.is_listing_sharded:
            return False
        if self.num_calls == 0:  # no forward; or one without a call of a module, which is computed again in a backward
            return torch.is_grad_enabled() and not is_compiling() and in_backward()
        return torch.is_grad_enabled() or not self.with_grad

    @not_captured
    def run(
        self,
        module: nn.Module,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *,
        is_call: bool = True,
        is_step: bool = False,
    ) -> Any:
        """`function(*args, **kwargs)`, of `module`, in which parameters read as full tensors.

        Args:
            is_call: whether it is a call of a module.
            is_step: whether it begins a step, even in a method registered as a forward.
        """
        is_traced = is_compiling()
        if is_traced and not is_step:
            return function(*args, **kwargs)
        if not self.depth:
            self.with_grad = torch.is_grad_enabled()
        if (is_step or not self.depth) and self.prepare is not None and not (is_traced or in_backward()):
            self.prepare(module)
        if not self.depth and not is_traced:
            self.module = module
        self.depth += 1
        self.num_calls += is_call
        try:
            return function(*args, **kwargs)
        finally:
            self.depth -= 1
            self.num_calls -= is_call
            if not self.depth and not is_traced:
                self.module = None
                if self.finish is not None and not in_backward():
                    self.finish()

    @contextmanager
    def listing_sharded(self) -> Iterator[None]:
        """Parameters are listed as they are outside of a forward."""
        before, self.is_listing_sharded = self.is_listing_sharded, True
        try:
            yield
        finally:
            self.is_listing_sharded = before


def install_reads(
    model: nn.Module, read_of_parameter: Mapping[nn.Parameter, Read | LocalRead], running: Running
) -> None:
    """Make every module of `model` read its parameters as `read_of_parameter` says."""
    for module in model.modules():
        if not any(parameter in read_of_parameter for parameter in module.parameters()):
            continue
        before = vars(module).get("_fsdp_reads", {})
        reads = {
            name: read_of_parameter[parameter]
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter in read_of_parameter
        }
        if not is_reading(module) or reads.keys() - before.keys():
            module.__class__ = _reading_class(type(module), tuple(reads))  # type: ignore[arg-type]  # a class is hashable
        vars(module).update(_fsdp_reads=before | reads, _fsdp_running=running)
        if isinstance(module, nn.RNNBase):
            vars(module)["_flat_weights"] = []  # hidden by the property of its new class


def local_reads(model: nn.Module, *, recurse: bool = True) -> list[tuple[nn.Parameter | None, LocalRead]]:
    """What a single rank reads in another dtype, or on another device, with how it does.

    Args:
        recurse: whether in modules below, too.
    """
    return [
        (module._parameters[name], read)
        for module in (model.modules() if recurse else [model])
        for name, read in vars(module).get("_fsdp_reads", {}).items()
        if isinstance(read, LocalRead)
    ]


@contextmanager
def reading_parts(module: ReadingModule) -> Iterator[None]:
    """Inside, what a module reads of its own distributed parameters is this rank's part, as a plain tensor."""
    before = module._fsdp_reads_parts
    module._fsdp_reads_parts = True
    try:
        yield
    finally:
        module._fsdp_reads_parts = before


def is_reading(module: nn.Module) -> bool:
    """Whether there are parameters at or below `module` that it reads in another form than it holds them."""
    return "_fsdp_running" in vars(module)


def reading_copy(model: nn.Module, layouts: Sequence[Layout], of_meta: str | torch.device = "cpu") -> nn.Module:
    """The module tree anew, with the tensors of `model`, reading from shards of these layouts that are never touched.

    Tensors on the meta device become tensors of the device `of_meta`, whose memory is never touched either: tracing on
    the meta device differs from tracing on a real one.
    """
    is_read = {slot.parameter for layout in layouts for slot in layout.slots}
    held = [parameter for name, parameter in model.named_parameters() if name not in is_read]
    memo: dict[int, Any] = {id(tensor): tensor for tensor in model.parameters()}
    memo |= {id(tensor): off_meta(tensor, of_meta) for tensor in [*held, *model.buffers()]}
    read_of_parameter = {}
    parameter_of_name = dict(model.named_parameters())
    for layout in layouts:
        is_offloaded = layout.compute_device is not None
        device = layout.device if layout.device.type != "meta" else "cpu" if is_offloaded else of_meta
        data = nn.Parameter(torch.empty(layout.numel, dtype=layout.dtype, device=device), layout.requires_grad)
        shard = StandIn(data, fed_back=no_residual(layout, data) if layout.feeds_back else None)
        for slot in layout.slots:
            read = Read.of(shard, layout, slot, is_frozen=not layout.requires_grad)
            read_of_parameter[parameter_of_name[slot.parameter]] = read
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        vars(module).update(
            {name: off_meta(value, of_meta) for name, value in vars(module).items() if torch.is_tensor(value)}
        )
    install_reads(copied, read_of_parameter, Running(num_calls=1))
    checkpoint_in_forward(copied)
    return copied


class Generated:
    """Mixed into classes that are generated."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Without arguments, as copies are made; with some, a slice of a container: of the class that was written."""
        return original_class(cls)(*args, **kwargs) if args or kwargs else object.__new__(cls)


class ReadingModule(Generated, CalledByItself, RefusesWrappers):
    """Mixed into every module with sharded parameters: it lists them as its properties read them."""

    _fsdp_running: Running
    _fsdp_reads_parts: bool = False

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module; in a forward, full tensors."""
        if not self._fsdp_running.lists_full:
            yield from super().named_parameters(prefix, recurse, remove_duplicate)  # type: ignore[misc]
            return
        # By name: Dynamo would take the sharded parameters for inputs of the graph, and cannot take those of a part.
        listed: set[int] = set()
        modules: Any = [(prefix, self)]
        if recurse:
            modules = self.named_modules(prefix=prefix, remove_duplicate=remove_duplicate)  # type: ignore[attr-defined]
        for module_name, module in modules:
            reads = module._fsdp_reads if isinstance(module, ReadingModule) else {}  # type: ignore[attr-defined]
            for name in list(module._parameters):
                parameter = getattr(module, name)
                key = id(reads.get(name, parameter))
                if parameter is not None and not (remove_duplicate and key in listed):
                    listed.add(key)
                    yield f"{module_name}.{name}" if module_name else name, parameter

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        with self._fsdp_running.listing_sharded():
            return super().requires_grad_(requires_grad)  # type: ignore[misc]

    def zero_grad(self, set_to_none: bool = True) -> None:
        with self._fsdp_running.listing_sharded():
            super().zero_grad(set_to_none)  # type: ignore[misc]

    def _load_from_state_dict(self, state_dict: MutableMapping[str, Any], prefix: str, *args: Any) -> None:
        """What load_state_dict calls for every module, the one that is loaded before those below it."""
        shard_state(self, state_dict, prefix)  # type: ignore[arg-type]
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]


class RecurrentReadingModule(Recurrent, ReadingModule):
    pass


@functools.cache
def _reading_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    properties = {name: property(_getter(name)) for name in names}
    if issubclass(base, ReadingModule):  # reads others already: of its parameters, some were sharded before
        return generated_subclass(base, properties)
    mixin = RecurrentReadingModule if issubclass(base, nn.RNNBase) else ReadingModule
    return generated_subclass(base, {"__reduce_ex__": _reduce_ex, **properties}, mixin)


def _reduce_ex(module: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """As the class that the user wrote, but with the reads first: shards refuse to be copied or pickled by them."""
    cls = type(module)
    reduce: Any = original_class(cls).__reduce_ex__
    function, arguments, *rest = reduce(module, protocol)
    generated = _Generated(cls, tuple(vars(module)["_fsdp_reads"]))
    arguments = [generated if argument is cls else argument for argument in arguments]
    return _remake, (module._fsdp_reads, function, *arguments), *rest


def _remake(reads: dict[str, Any], function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*[argument.cls if isinstance(argument, _Generated) else argument for argument in arguments])


@dataclasses.dataclass(frozen=True)
class _Generated:
    """A generated class: a copy of its instance shares it; in a file it is the user's class, to be generated anew."""

    cls: type[nn.Module]
    names: tuple[str, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Generated:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _generated, (original_class(self.cls), self.names)


def _generated(base: type[nn.Module], names: tuple[str, ...]) -> _Generated:
    return _Generated(_reading_class(base, names), names)  # type: ignore[arg-type]  # a class is hashable


def generated_subclass(
    base: type[nn.Module], namespace: Mapping[str, Any], mixin: type | None = None, kind: type | None = None
) -> type[nn.Module]:
    """A subclass, with the methods of `mixin` before those of `base`, that prints and documents itself as `base`.

    For isinstance it is a `kind`, too, whose methods come last.
    """
    names: dict[str, Any] = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    names["_fsdp_base"] = base
    bases = tuple(each for each in (mixin, base, kind) if each is not None)
    return type(base.__name__, bases, {**names, **namespace})


def original_class(generated: type) -> type:
    """The class that the user wrote, of one that was generated from it; of others, the class itself."""
    base = vars(generated).get("_fsdp_base")
    return generated if base is None else original_class(base)


def _getter(name: str) -> Any:
    def get(module: nn.Module) -> torch.Tensor | None:
        read = module._fsdp_reads.get(name)  # type: ignore[union-attr,operator]
        if read is None or not (is_compiling() or module._fsdp_running):
            if name not in module._parameters:
                raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")
            return module._parameters[name]
        return read_parameter(read, module, name)

    return get
