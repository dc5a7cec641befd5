"""What a GPU would run for five models, sharded and not: kernels, copies, and bytes beside those of the cost model.

    fsdp-compile emulate --hardware h100 benchmarks/gpu_programs.py
    fsdp-compile emulate --hardware h100 benchmarks/gpu_programs.py --models gpt conv --gpus 64

No GPU is needed (docs/gpu.md). Figures of forward and backward are written `forward + backward`. `sharded` is a rank's
program with grouped collectives, `alone` that of the same model on one GPU, where nothing is gathered. Bytes are read
and written by all that is no matmul, convolution or attention: as Inductor counts them in the kernels that it made, and
as the cost model estimates them from the graphs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import harness
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map_only
from transformers import BertConfig, BertForMaskedLM
from workloads import Workload, conv, gpt, llama

from finetune_lora import new_base_model, with_adapters
from fsdp_compile.costs.hardware import Hardware, hardware_of_gpu
from fsdp_compile.costs.predict import time_text
from fsdp_compile.emulation.build import Program, build
from fsdp_compile.emulation.checks import check
from fsdp_compile.emulation.command import COPIES
from fsdp_compile.emulation.kernels import kernels_of
from fsdp_compile.emulation.prediction import predict_built
from fsdp_compile.emulation.wrapper import Step, steps_of
from fsdp_compile.options import Options

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def bert() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    config = BertConfig(num_hidden_layers=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    tokens = torch.randint(config.vocab_size, (8, 512))
    return BertForMaskedLM(config), (), {"input_ids": tokens, "labels": tokens}


def lora() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    tokens = torch.randint(256, (8, 512))
    return with_adapters(new_base_model(4)), (), {"input_ids": tokens, "labels": tokens, "use_cache": False}


def _of(workload: Workload) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return workload.build(), workload.inputs(), {}


LLAMA = {"layers": 4, "dim": 4096, "heads": 32, "kv_heads": 8, "ffn_dim": 14336, "vocab": 128256}  # of the 8B
MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "gpt": (lambda: _of(gpt()), {}),
    "llama, bf16 gathers": (lambda: _of(llama(1, 2048, **LLAMA)), {"mp_policy": BF16}),
    "bert": (bert, {}),
    "lora": (lora, {}),
    "conv": (lambda: _of(conv()), {}),
}
"""By name, what builds the model and its arguments, and the options of its sharding."""


def measure(name: str, gpus: int, hardware: Hardware) -> dict[str, str]:
    make, options = MODELS[name]
    torch._dynamo.reset()
    model, args, kwargs = make()
    model, args, kwargs = model.to("meta"), *tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
    begin = time.perf_counter()
    sharded = build(model, args, kwargs, Options(collective_lowering="grouped", **options), gpus)
    seconds = time.perf_counter() - begin
    torch._dynamo.reset()
    alone = build(model, args, kwargs, Options(), 1)
    problems = check(sharded)
    prediction = predict_built(sharded, kernels_of(sharded, hardware), hardware)
    return {
        "model": name,
        "kernels": _calls(sharded, is_kernel),
        "kernels alone": _calls(alone, is_kernel),
        "copies": _calls(sharded, is_copy),
        "copies alone": _calls(alone, is_copy),
        "collectives": _calls(sharded, lambda step: step.kind == "collective"),
        "built MB": f"{prediction.built_bytes / 1e6:,.1f}",
        "estimated MB": f"{prediction.estimated_bytes / 1e6:,.1f}",
        "estimated/built": f"{prediction.estimated_bytes / prediction.built_bytes:.2f}",
        "built step": time_text(prediction.built.seconds),
        "estimated step": time_text(prediction.estimate.seconds),
        "checks": "hold" if not problems else problems[0],
        "compiled in": f"{seconds:.0f} s",
    }


def is_kernel(step: Step) -> bool:
    return step.kind == "kernel"


def is_copy(step: Step) -> bool:
    return step.kind == "extern" and step.name in COPIES


def _calls(program: Program, is_wanted: Callable[[Step], bool]) -> str:
    return " + ".join(str(sum(map(is_wanted, steps_of(half.wrapper)))) for half in program.halves)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--gpus", type=int, default=8, help="ranks (default: 8)")
    options = parser.parse_args()
    hardware = hardware_of_gpu()
    if hardware is None:
        raise SystemExit("error: run it with `fsdp-compile emulate`, for a GPU that the cost model knows")
    rows = [measure(name, options.gpus, hardware) for name in options.models]
    harness.show(f"{options.gpus} x {hardware.name}: programs of forward and backward", rows, {})


if __name__ == "__main__":
    main()
