"""The sharded root module: what a model gains by being sharded."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..costs import Explanation, Hardware, explain
from ..costs.explain import hardware_is_missing
from ..errors import ConfigError
from ..graphs import RewrittenGraphs
from ..report import Comparison, Schedule, measured_schedule, page
from ..runtime.clipping import clip_gradients
from ..runtime.compilations import Compilations
from ..runtime.modules import not_captured
from ..runtime.recomputation import checkpoint_in_forward
from ..runtime.views import without_offset
from . import saving
from .fsdp_module import FSDPMethods
from .full_parameters import SummonOptions, summon
from .loading import shard_state
from .optimizer_in_backward import OptimizerInBackward, step_in_backward
from .own_units import OwnUnits, own_units_below
from .pretrained import outermost_pretrained, saving_whole
from .reading import Generated, generated_subclass, is_reading, original_class
from .sharding import Sharding, note_sharding, sharding_of
from .unit_state import note_state

_SAVING = "save_pretrained"  # of models of transformers, and of peft


def become_sharded(model: nn.Module) -> None:
    """Give a model whose parameters are sharded its new class."""
    gained = _gained(model, ShardedMethods, FSDPMethods)
    if is_reading(model):
        gained["forward"] = _within(type(model).forward, is_call=True)
    written: Any = type(model)
    if hasattr(written, _SAVING):
        gained[_SAVING] = saving_whole(getattr(written, _SAVING))
    model.__class__ = generated_subclass(type(model), gained, ShardedModule, FSDPModule)
    for module in outermost_pretrained(model):
        if module is not model and _SAVING not in vars(type(module)).get("_fsdp_methods", {}):
            gain_methods(module, {_SAVING: saving_whole(getattr(type(module), _SAVING))})
    note_state(model)


def _gained(model: nn.Module, *sources: type) -> dict[str, Any]:
    return {
        name: value
        for source in sources
        for name, value in vars(source).items()
        if not name.startswith("__") and not has_itself(model, name)
    }


def has_itself(module: nn.Module, name: str) -> bool:
    """Whether the module itself has this: those of torch.compile and peft also give what the one inside has."""
    held = (vars(module), module._parameters, module._buffers, module._modules)
    return hasattr(type(module), name) or any(name in each for each in held)


def become_sharded_together(modules: Sequence[nn.Module], sharding: Sharding) -> None:
    """Give each of the modules whose parameters are sharded as one unit its new class; they share the sharding."""
    sharding.together = tuple(modules)
    [own] = sharding.owns[:1]
    own.modules = sharding.together
    own.note()
    for module in modules:
        vars(module)["_fsdp_sharding"] = sharding
        become_sharded(module)


def become_part(model: nn.Module) -> None:
    """Take from a model what `become_sharded` gave it, except for FSDP2's methods and those registered since."""

    def without(cls: type[nn.Module]) -> type[nn.Module]:
        base, methods = vars(cls)["_fsdp_base"], vars(cls).get("_fsdp_methods")
        return base if methods is None else _with_methods(without(base), methods)

    model.__class__ = without(type(model))
    become_unit(model)


def become_unit(module: nn.Module) -> None:
    """Give a sharded module of a larger one the class with FSDP2's methods."""
    module.__class__ = generated_subclass(type(module), _gained(module, FSDPMethods), PartModule, FSDPModule)
    note_state(module)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method other than `forward` one in which parameters read as full tensors, as `forward` is.

    Args:
        module: a sharded model or a part of one, or what torch.compile returned for it; with any other there is
            nothing to do.
        method_name: of a method that the class of `module` defines. It runs without being compiled; the compiled model
            may be called within it.

    Raises:
        ConfigError: the class defines no such method.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"module is an nn.Module, not {type(module).__name__}")
    module = inside(module)
    method = inspect.getattr_static(type(module), method_name, None)
    if not inspect.isfunction(method):
        raise ConfigError(f"{type(module).__name__} defines no method {method_name!r}")
    if is_reading(module):
        gain_methods(module, {method_name: _within(method, is_call=False)})


def inside(module: nn.Module) -> nn.Module:
    """The module that torch.compile returned this for, whose methods it calls; without one, the module itself."""
    found: nn.Module = getattr(module, "_orig_mod", module)
    return found


def gain_methods(module: nn.Module, methods: Mapping[str, Callable[..., Any]]) -> None:
    """Give a module methods, in the place of those that it has; they stay when a model around it is sharded."""
    module.__class__ = _with_methods(type(module), methods)


def _with_methods(base: type[nn.Module], methods: Mapping[str, Callable[..., Any]]) -> type[nn.Module]:
    return generated_subclass(base, {**methods, "_fsdp_methods": methods})


def _within(method: Callable[..., Any], *, is_call: bool) -> Callable[..., Any]:
    """The method, in which parameters read as full tensors."""

    @not_captured
    @functools.wraps(method)
    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        return module._fsdp_running.run(module, method, (module, *args), kwargs, is_call=is_call)

    return run


class Reshards(Generated):
    """Mixed into the classes of modules that were sharded: what needs sharded parameters brings them back first."""

    def _fsdp_reshard(self) -> None:
        for own in own_units_below(self):  # type: ignore[arg-type]
            own.reshard()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._fsdp_reshard()
        return super()._apply(*args, **kwargs)  # type: ignore[misc]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._fsdp_reshard()
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._fsdp_reshard()
        return super().state_dict(*args, **kwargs)  # type: ignore[misc,no-any-return]

    def _load_from_state_dict(self, state_dict: MutableMapping[str, Any], prefix: str, *args: Any) -> None:
        """What load_state_dict calls for every module, this one before those below it."""
        self._fsdp_reshard()
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]


class PartModule(Reshards):
    """Mixed into the class of a sharded module of a larger one."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """A copy of it, or one from a file, is of the class that the user wrote, or refused where it has shards."""
        reduced: Any = super().__reduce_ex__(protocol)
        function, arguments, *rest = reduced
        written = original_class(type(self))
        return _made, (function, *[written if each is type(self) else each for each in arguments]), *rest


class ShardedModule(Reshards):
    """Mixed into the class of a sharded root module: during its call, parameters read as full tensors."""

    _fsdp_sharding: Sharding

    @not_captured
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sharding = self._fsdp_sharding
        sharding.come_back()
        if not torch.compiler.is_compiling() and not sharding.made:
            checkpoint_in_forward(self)  # type: ignore[arg-type]  # added since it was sharded, before it is compiled
        try:
            return sharding.running.run(self, super().__call__, args, kwargs, is_step=True)  # type: ignore[misc,arg-type]
        except Exception as e:
            with suppress(RuntimeError):  # the process group may be gone, and that is not what is wrong
                sharding.tell(e)
            raise

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As of any module, of a model of `shard`; one of `fsdp_compile` is compiled, and stays so.

        Raises:
            ConfigError: there are options, for one that is compiled.
        """
        if self._fsdp_sharding.compile is None:
            super().compile(*args, **kwargs)  # type: ignore[misc]
        elif args or kwargs:
            raise ConfigError(
                f"the {type(self).__name__} is compiled already: give fsdp_compile the options of compile(), or call "
                'fsdp_compile.shard(model) and then compile(backend="fsdp")'
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for shard in sharding_of(self).shards:  # type: ignore[arg-type]
            if shard.accumulation is not None:
                shard.accumulation.clear()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """This rank's part, for torch.save; torch.load makes the same model of it on the same rank."""
        self._refuse_if_together("pickle")
        sharding_of(self).reshard()  # type: ignore[arg-type]
        return load_sharded, saving.save(self, protocol)  # type: ignore[arg-type]

    def __copy__(self) -> NoReturn:
        raise ConfigError("a shallow copy of a sharded model would share its shards: use copy.deepcopy")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Another model, sharded and compiled like this one, with shards of its own; process groups are shared."""
        sharding = sharding_of(self)  # type: ignore[arg-type]
        sharding.refuse_if_summoned("copy.deepcopy of the model")
        sharding.reshard()
        self._refuse_if_together("copy")
        memo |= {id(mesh): mesh for mesh in sharding.meshes()}
        memo[id(sharding.compilations)] = Compilations()
        memo |= {id(sharding.watched): set(), id(sharding.looked): weakref.WeakKeyDictionary()}
        memo |= {id(sharding.owns): [], id(sharding.schedules): [], id(sharding.post_optim_event): None}
        memo[id(sharding.schedule)] = sharding.schedule.without_updates()
        copies = [shard.copy_into(memo) for shard in sharding.shards]
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        for shard, original in zip(copies, sharding.shards, strict=True):
            # of a module that was taken out of the model, too
            shard.owners = [(copy.deepcopy(module, memo), name) for module, name in original.owners]
            shard.reads = [memo[id(read)] for read in original.reads]
        note_sharding(copied, sharding_of(copied))
        for own in sharding.owns:
            take_own_units(sharding_of(copied), own.copied(memo))
        if sharding.compile is not None:
            sharding.compile(copied)
        return copied

    def _refuse_if_together(self, what: str) -> None:
        if self._fsdp_sharding.together:
            raise ConfigError(f"this module was sharded together with others: {what} the model that holds all of them")

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """DTensors around the memory of the parameters, which torch.save and copy.deepcopy take, and buffers."""
        state: dict[str, Any] = super().state_dict(*args, **kwargs)
        for name, value in state.items():
            if isinstance(value, DTensor) and not value.requires_grad:
                state[name] = without_offset(value)
        return state

    def _load_from_state_dict(self, state_dict: MutableMapping[str, Any], prefix: str, *args: Any) -> None:
        """What load_state_dict calls for every module, the root before those below it."""
        if not (sharding := sharding_of(self)).is_summoned:  # type: ignore[arg-type]
            sharding.reshard()
            sharding.check()
        shard_state(self, state_dict, prefix)  # type: ignore[arg-type]
        super()._load_from_state_dict(state_dict, prefix, *args)


def _made(function: Callable[..., Any], *arguments: Any) -> Any:
    """pickle does not let a reducer that it knows by name, such as `copyreg.__newobj__`, make another class."""
    return function(*arguments)


def take_own_units(sharding: Sharding, own: OwnUnits) -> None:
    """Make these a model's that was copied or loaded; their modules, except for the model itself, become units."""
    sharding.owns.append(own)
    own.note()
    for module in own.modules:
        if "_fsdp_sharding" not in vars(module) and not isinstance(module, FSDPModule):
            become_unit(module)
        else:
            note_state(module)


def load_sharded(*saved: Any) -> nn.Module:
    """What `ShardedModule.__reduce_ex__` pickled; files name this function."""
    model, owns = saving.load(*saved)
    for own in owns:
        take_own_units(sharding_of(model), own)
    become_sharded(model)
    compile_as = sharding_of(model).compile
    if compile_as is not None:
        compile_as(model)
    return model


class ShardedMethods(nn.Module):
    """What a model gains by being sharded; a name that it has of its own is not replaced."""

    @property
    def module(self) -> nn.Module:
        """The model itself, as scripts written for DistributedDataParallel expect."""
        return self

    @property
    def graphs(self) -> list[RewrittenGraphs]:
        """The rewritten graphs, one for each set of guards that was compiled."""
        return sharding_of(self).graphs

    def explain(
        self,
        hardware: Hardware | str | None = None,
        *,
        optimizer: str = "adam",
        html: str | Path | None = None,
        schedule: str | Path | None = None,
        measured: torch.profiler.profile | None = None,
    ) -> Explanation:
        """What was decided in the graphs compiled so far, what a step is predicted to cost, what could be changed.

        Args:
            hardware: of every rank: "h100" or another of `fsdp_compile.costs.HARDWARE`, a file that
                `fsdp-compile calibrate` wrote, or a `Hardware`; None is what the schedule was planned for, or else the
                GPU at hand. Where there is neither, nothing is said in seconds.
            optimizer: "adam", "sgd" or "momentum".
            html: a file to write the schedules of all graphs to, as a page for a browser.
            schedule: a file to write the schedule of the last graph to, for `fsdp-compile report`.
            measured: a profiler that has recorded steps of the last graph, and nothing else; the one of median length
                is compared with the plan.

        Raises:
            ConfigError: no such hardware or optimizer; nothing was compiled that could be written or compared, or no
                hardware is known to write or compare it for; the profile is not of steps of the last graph.
        """
        sharding = sharding_of(self)
        compiler: Any = sharding.compile.config.backend if sharding.compile is not None else "inductor"
        explanation = explain(
            sharding.graphs,
            sharding.schedule.hardware if hardware is None else hardware,
            optimizer=optimizer,
            compiler=compiler,
            units=sharding.units if sharding.shards else (),
            reason=sharding.reason,
            compilations=str(sharding.compilations),
        )
        if html is None and schedule is None and measured is None:
            return explanation
        if not sharding.made:
            raise ConfigError("nothing was compiled so far: call the model once")
        planned = [Schedule.of(prediction) for prediction in explanation.predictions]
        if not planned:
            raise hardware_is_missing()
        compared = None if measured is None else Comparison(planned[-1], measured_schedule(planned[-1], measured))
        if html is not None:
            Path(html).write_text(page(planned if compared is None else [*planned, compared.measured]))
        if schedule is not None:
            Path(schedule).write_text(planned[-1].to_json())
        return explanation if compared is None else dataclasses.replace(explanation, comparison=str(compared))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards inside keep the gradients of their backwards, wherever those run, for one outside.

        `set_requires_gradient_sync` says what keeping means.
        """
        sharding = sharding_of(self)
        before, sharding.keeps_gradients = sharding.keeps_gradients, True
        try:
            yield
        finally:
            sharding.keeps_gradients = before

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`; every rank calls it.

        As `torch.nn.utils.clip_grad_norm_`, with one all-reduce over all ranks that hold parts of the model.
        Parameters that are not sharded count once.

        Args:
            norm_type: 1, 2, any other positive number, or inf.

        Returns:
            The norm from before: a plain 0-d tensor, float32, or float64 if a parameter is.

        Raises:
            RuntimeError: the norm is not finite, and `error_if_nonfinite`; the gradients are unchanged.
        """
        sharding = sharding_of(self)
        sharding.refuse_if_summoned("clip_grad_norm_")
        sharding.reshard()
        return clip_gradients(
            self.parameters(),
            sharding.holders,
            [] if sharding.mesh is None else [parameter for _, parameter in sharding.whole.values()],
            max_norm=max_norm,
            norm_type=norm_type,
            error_if_nonfinite=error_if_nonfinite,
        )

    def optimizer_in_backward(
        self,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        *,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scaler: torch.amp.GradScaler | None = None,
    ) -> OptimizerInBackward:
        """From now on, backwards make the step of an optimizer: each unit's parameters are updated as its gradient is
        there.

        Every backward but those of forwards inside `no_sync` ends with a step, by the learning rates of that moment,
        and with no gradients. `optimizer.step()` and `zero_grad()` then find nothing to do. The numbers are those of a
        step after the backward. With `max_norm` or `scaler`, parameters are updated at the end of the backward, since
        both need all gradients; so are those of torch.optim.Muon, those that more than one graph reads in a step, and
        all of them with CUDA graphs, which replay no step.

        Args:
            optimizer: one of torch's that treat every element by itself, or torch.optim.Muon; or several, of different
                parameters. Its parameters are sharded parameters of this model.
            max_norm, norm_type: gradients are clipped before the step, as by `clip_grad_norm_`.
            scaler: scales the loss; it unscales the gradients, and skips a step as ever. `scaler.update()` is left to
                you.

        Returns:
            What has the `norm` of the gradients that were clipped last, and can `remove()` the optimizer.

        Raises:
            ConfigError: the optimizer cannot step in the backward, or holds parameters that are not the model's;
                nothing is changed.
        """
        return step_in_backward(self, optimizer, max_norm, norm_type, scaler)

    def summon_full_params(
        self,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> AbstractContextManager[None]:
        """A context in which all parameters are full, plain nn.Parameters; every rank enters and leaves it.

        They are gathered bucket by bucket, and are in memory together. When the block ends, by an exception too, the
        sharded parameters are back.

        Args:
            writeback: write the values in the full parameters to the sharded ones at the end; otherwise they are
                dropped.
            rank0_only: only the first rank of the mesh gets full parameters; the others keep their shards.
            offload_to_cpu: put the full parameters into the CPU's memory.
            with_grads: full parameters have full gradients, which are written back too.

        Raises:
            ConfigError: `rank0_only` together with `writeback`.
            RuntimeError: inside another one, or in a forward or backward. Inside the block the model cannot be called,
                copied or pickled.
        """
        options = SummonOptions(writeback, rank0_only, offload_to_cpu, with_grads)
        return summon(self, options, sharding_of(self))
