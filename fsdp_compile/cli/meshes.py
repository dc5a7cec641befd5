"""The meshes that `fsdp-compile plan --mesh` compares, on a process group of ranks that are not there."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from ..costs.predict import bytes_text, time_text
from ..errors import ConfigError

_NAMES = {"tp": "tensor", "ep": "expert"}  # of dimensions that a model is split over, and of their parallelism
_SIZE = re.compile(r"(\w+)=([1-9]\d*)(?:x([1-9]\d*))?")


@dataclasses.dataclass(frozen=True)
class MeshSizes:
    """How many ranks each dimension of a mesh has.

    Attributes:
        data: ranks with rows of their own, which parameters are sharded over.
        tensor: neighbours that split the model.
        experts: of the data ranks, how many neighbours split experts, which are sharded over the others.
        pipeline: how many neighbours, each with as many ranks as the other dimensions have, have stages of their own.
        stages_of_rank: how many stages each has.
    """

    data: int
    tensor: int = 1
    experts: int = 1
    pipeline: int = 1
    stages_of_rank: int = 1

    @classmethod
    def of(cls, text: str) -> MeshSizes:
        """As in "dp=32,tp=8", in "dp=32,ep=8" of as many ranks as dp, or in "dp=8,pp=4x2"; ConfigError for another."""
        matches = [_SIZE.fullmatch(part) for part in text.split(",")]
        sizes = {match[1]: int(match[2]) for match in matches if match is not None}
        times = {match[1]: int(match[3]) for match in matches if match is not None and match[3]}
        if len(sizes) < len(matches) or next(iter(sizes)) != "dp" or not set(sizes) <= {"dp", "pp", *_NAMES}:
            raise ConfigError(f"--mesh is auto, or sizes of dp, tp, ep and pp, as in dp=32,tp=8; not {text!r}")
        if not set(times) <= {"pp"} or (times and sizes["pp"] == 1):
            raise ConfigError(f"--mesh {text}: x has several stages on each rank of a pipeline, as in pp=4x2")
        found = cls(sizes["dp"], sizes.get("tp", 1), sizes.get("ep", 1), sizes.get("pp", 1), times.get("pp", 1))
        if found.data % found.experts:
            raise ConfigError(f"--mesh {text}: the ranks of ep are some of those of dp, whose number they divide")
        return found

    @property
    def ranks_of_stage(self) -> int:
        return self.data * self.tensor

    @property
    def num_ranks(self) -> int:
        return self.ranks_of_stage * self.pipeline

    @property
    def num_stages(self) -> int:
        return self.pipeline * self.stages_of_rank

    @property
    def by_name(self) -> dict[str, int]:
        """Without those of one rank, but for the data."""
        others = {"tp": self.tensor, "ep": self.experts, "pp": self.pipeline}
        return {"dp": self.data, **{name: size for name, size in others.items() if size > 1}}

    @property
    def splits_model(self) -> bool:
        return self.tensor > 1 or self.experts > 1

    def batches(self, global_batch: int) -> list[int]:
        """Rows of a data rank where all have as many; nothing otherwise."""
        return [] if global_batch % self.data else [global_batch // self.data]

    def __str__(self) -> str:
        return mesh_text(self.by_name, self.stages_of_rank)


def mesh_text(sizes: Mapping[str, int], stages_of_rank: int) -> str:
    """As `MeshSizes.of` reads it."""
    several = f"x{stages_of_rank}" if stages_of_rank > 1 else ""
    return ",".join(f"{name}={size}" + several * (name == "pp") for name, size in sizes.items())


def named_meshes(
    texts: Sequence[str], gpus: Sequence[int], ranks_per_node: int, *, has_stages: bool
) -> list[MeshSizes]:
    """What `--mesh` names.

    "auto" is every mesh of so many GPUs whose tensor parallelism stays within a node, and, if `has_stages`, each of
    them with pipelines of 2, 4, 8, ... stages that are whole nodes, too, one on each rank.
    """
    found = []
    for text in texts:
        if text == "auto":
            found += [mesh for each in gpus for mesh in _all_meshes(each, ranks_per_node, has_stages)]
        else:
            found.append(MeshSizes.of(text))
    return found


def _all_meshes(gpus: int, ranks_per_node: int, has_stages: bool) -> Iterator[MeshSizes]:
    num_stages = [1]
    while has_stages and gpus % (2 * num_stages[-1] * ranks_per_node) == 0:
        num_stages.append(2 * num_stages[-1])
    splits = [size for size in range(1, ranks_per_node + 1) if ranks_per_node % size == 0]
    for tensor, stages in itertools.product(splits, num_stages):
        if gpus % (tensor * stages) == 0:
            yield MeshSizes(gpus // (tensor * stages), tensor, pipeline=stages)


@contextmanager
def mesh_of_fakes(sizes: MeshSizes, shards: int | None) -> Iterator[tuple[DeviceMesh, DeviceMesh]]:
    """The mesh, and its part that parameters are sharded over; this process takes the place of its first rank.

    The group is torch's "fake" one, which sends nothing. A loss of logits that are split is computed in parts
    (torch's `loss_parallel`). Where experts are split, the mesh has the data ranks twice: as dp, and as (efsdp, ep).
    The ranks of a stage are neighbours.

    Args:
        shards: of the data ranks, how many share the parameters, which the others have copies of; None for all.
    """
    if dist.is_initialized():
        raise ConfigError("--mesh needs a process group of its own, and the file has initialised one")
    data = {"dp": sizes.data}
    if sizes.experts > 1:
        if shards is not None:
            raise ConfigError(f"HYBRID_SHARD is for models whose experts are not split, and the mesh is {sizes}")
        data = {"efsdp": sizes.data // sizes.experts, "ep": sizes.experts}
    elif shards is not None:
        data = {"dp_replicate": sizes.data // shards, "dp_shard": shards}
    sizes_of_dims = {"pp": sizes.pipeline, **data, "tp": sizes.tensor}
    dims = {name: size for name, size in sizes_of_dims.items() if size > 1 or name in data}
    dist.init_process_group("fake", rank=0, world_size=sizes.num_ranks)
    try:
        root = init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
        of_data = root[tuple(data)]
        with loss_parallel() if sizes.tensor > 1 else nullcontext():
            yield root, of_data if sizes.experts == 1 else of_data._flatten("dp")
    finally:
        dist.destroy_process_group()


def meshes_of_modules(model: nn.Module, root: DeviceMesh, data: DeviceMesh) -> DeviceMesh | dict[str, DeviceMesh]:
    """What to shard a model over that is split: the data ranks, and experts that are split over the others of these."""
    names = _names_of_experts(model)
    return {"": data, **dict.fromkeys(names, root["efsdp"])} if names else data


def refuse_unsplit(model: nn.Module, root: DeviceMesh) -> None:
    """ConfigError where nothing of the model is split over the experts' dimension of its mesh."""
    if "ep" in (root.mesh_dim_names or ()) and not _names_of_experts(model):
        raise ConfigError("no parameter is a DTensor on the dimension ep, so that nothing is split over it")


def _names_of_experts(model: nn.Module) -> set[str]:
    return {
        name.rpartition(".")[0]
        for name, parameter in model.named_parameters()
        if isinstance(parameter, DTensor) and "ep" in (parameter.device_mesh.mesh_dim_names or ())
    }


def dims_of_groups(root: DeviceMesh, data: DeviceMesh) -> dict[str, str]:
    """The names of the dimensions of a mesh, and of the data ranks in it, by those of their process groups."""
    return {mesh.get_group(dim).group_name: dim for mesh in (root, data) for dim in mesh.mesh_dim_names or ()}


def notes_on_meshes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each number of GPUs, a sentence on what splitting the model wins or loses; best rows come first."""
    found = []
    for gpus, of_gpus in itertools.groupby(rows, key=lambda row: row["gpus"]):
        best, *others = of_gpus
        other = next((row for row in others if row["mesh"].keys() != best["mesh"].keys()), None)
        if other is not None:
            found.append(f"{gpus} GPUs: {_text(best)}; {_text(other)}.")
    return found


def _text(row: Mapping[str, Any]) -> str:
    waits, own, all_seconds = row["exposed_seconds"], row["model_collectives_seconds"], row["seconds"]
    parts = [f"waits for gathers and reductions for {waits / all_seconds:.0%} of its {time_text(all_seconds)}"]
    if own:
        kinds = " and ".join(kind for name, kind in _NAMES.items() if name in row["mesh"])
        parts.append(f"spends {own / all_seconds:.0%} of it on collectives of {kinds} parallelism")
    if row["idle_seconds"]:
        parts.append(f"idles for {row['idle_seconds'] / all_seconds:.0%} of it in the pipeline")
    if not row["fits"]:
        parts.append(f"does not fit with {bytes_text(row['peak_bytes'])}")
    speed = f"{row['tokens_per_second_per_gpu']:.0f} tokens/s"
    return f"{mesh_text(row['mesh'], row['stages_of_rank'])} ({row['strategy']}, {speed}) " + ", ".join(parts)
