"""The model of a command: a function in a file of the user's, and another for its inputs."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..errors import CaptureError, ConfigError, one_line
from ..module.equal_layers import EqualLayers, calls_counted


@dataclasses.dataclass(frozen=True)
class Functions:
    """What a file of the user's has.

    Attributes:
        make_model, make_inputs: as the options `model` and `--inputs` say.
        parallelize: splits the model over the other dimensions of a mesh, as `--parallelize` says; None without meshes.
        stages: cuts it into the stages of a pipeline, as `--stages` says; None without those.
    """

    make_model: Callable[[], Any]
    make_inputs: Callable[[int, int], Any]
    parallelize: Callable[[torch.nn.Module, DeviceMesh], Any] | None = None
    stages: Callable[[torch.nn.Module, int], Any] | None = None


def made_on_meta(
    functions: Functions, batch: int, options: argparse.Namespace, mesh: DeviceMesh | None = None
) -> tuple[torch.nn.Module, Sequence[Any], EqualLayers | None]:
    """The model and its arguments on the meta device, where it has been called with them once; its equal layers.

    Args:
        mesh: that it is split over afterwards; None for a model that every rank has.
    """
    with torch.device("meta"):
        with naming(f"{options.model}()"):
            model = functions.make_model()
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"{options.model}() returns a model, not {type(model).__name__}")
        call = f"{options.inputs}({batch}, {options.seq})"
        with naming(call):
            inputs = functions.make_inputs(batch, options.seq)
        if not isinstance(inputs, (tuple, list)):
            raise ConfigError(f"{call} returns the arguments of the model as a tuple, not {type(inputs).__name__}")
        with (
            naming(f"the model, called with what {call} returned,"),
            torch.no_grad(),
            calls_counted(model) as num_calls,
        ):
            model(*inputs)
    if mesh is not None and functions.parallelize is not None:
        with naming(f"{options.parallelize}(), which splits the model over {mesh.mesh_dim_names},"):
            split = functions.parallelize(model, mesh)
        model = model if split is None else split
    return model, inputs, EqualLayers.of(model, num_calls)


def load(target: str, inputs: str, parallelize: str | None = None, stages: str | None = None) -> Functions:
    """The functions of a file; of those that are not asked for, no name is given."""
    path, _, name = target.rpartition(":")
    if not path:
        raise ConfigError(f"{target!r} is no FILE:FUNCTION: say which function of the file returns the model")
    if not Path(path).is_file():
        raise ConfigError(f"{target!r} is no FILE:FUNCTION: there is no file {path!r}")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(Path(path).parent))
    with naming(f"{path}, which is run for its functions,"):
        spec.loader.exec_module(module)
    names = {"make_model": name, "make_inputs": inputs, "parallelize": parallelize, "stages": stages}
    asked_for = {what: wanted for what, wanted in names.items() if wanted is not None}
    for wanted in asked_for.values():
        if not callable(getattr(module, wanted, None)):
            functions = ", ".join(key for key, value in vars(module).items() if inspect.isfunction(value)) or "none"
            raise ConfigError(f"{path} has no function {wanted!r}; it has {functions}")
    return Functions(**{what: getattr(module, wanted) for what, wanted in asked_for.items()})


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Inside, whatever code of the user raises is an error that says which code that was."""
    try:
        yield
    except (ConfigError, CaptureError):
        raise
    except (Exception, SystemExit) as e:
        raise ConfigError(f"{what} raised {one_line(e)} (--debug shows where)") from e
