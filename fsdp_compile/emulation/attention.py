"""Fused attention of a GPU, on CPU tensors: the same results, by the formulas of flash attention, without its tiles.

Softmax is P = exp(scale q k^T + bias - logsumexp). Its gradient, with D the row sums of grad_out * out, is
dS = P * (grad_out v^T - D); then grad_q = scale dS k, grad_k = scale dS^T q, grad_v = P^T grad_out. See Dao et al.,
FlashAttention, arXiv:2205.14135, appendix B.

torch has no kernels of these operators for the CPU, so these are registered. Dropout is refused: its mask would depend
on the GPU's generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_LIBRARY = torch.library.Library("aten", "IMPL")
_aten = torch.ops.aten


def install() -> None:
    kernels: dict[str, Callable[..., Any]] = {
        "_scaled_dot_product_flash_attention": _flash,
        "_scaled_dot_product_flash_attention_backward": _flash_backward,
        "_scaled_dot_product_efficient_attention": _efficient,
        "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    }
    for name, kernel in kernels.items():
        _LIBRARY.impl(name, kernel, "CPU")


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    like = _aten._scaled_dot_product_flash_attention.default(
        *_on_meta((q, k, v)), dropout_p, is_causal, return_debug_mask, scale=scale
    )
    out, logsumexp = _forward(q, k, v, None, dropout_p, is_causal, scale)
    # The random state and the debug mask are empty; what lies between is for nested tensors, and sizes.
    return (*_filled(like[:2], out, logsumexp), *_real(like[2:]))


def _flash_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    sizes = (max_q, max_k, dropout_p, is_causal, *_on_meta((philox_seed, philox_offset)))
    like = _aten._scaled_dot_product_flash_attention_backward.default(
        *_on_meta((grad_out, q, k, v, out, logsumexp)), None, None, *sizes, scale=scale
    )
    return _filled(like, *_backward(grad_out, q, k, v, None, out, logsumexp, dropout_p, is_causal, scale)[:3])


def _efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    like = _aten._scaled_dot_product_efficient_attention.default(
        *_on_meta((q, k, v, bias)), compute_log_sumexp, dropout_p, is_causal, scale=scale
    )
    out, logsumexp = _forward(q, k, v, bias, dropout_p, is_causal, scale)
    rows = like[1].shape[-1]  # padded to a multiple of 32, or none
    padded = torch.nn.functional.pad(logsumexp, (0, rows - logsumexp.shape[-1]), value=math.inf)
    return (*_filled(like[:2], out, padded), *_real(like[2:]))


def _efficient_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    on_meta = _on_meta((grad_out, q, k, v, bias, out, logsumexp, philox_seed, philox_offset))
    like = _aten._scaled_dot_product_efficient_attention_backward.default(
        *on_meta, dropout_p, grad_input_mask, is_causal, scale=scale
    )
    rows = logsumexp[..., : q.shape[-2]]
    *gradients, of_bias = _backward(grad_out, q, k, v, bias, out, rows, dropout_p, is_causal, scale)
    if not grad_input_mask[3] or bias is None:
        return (*_filled(like[:3], *gradients), None)
    return _filled(like, *gradients, of_bias.sum_to_size(bias.shape))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """(out, logsumexp), in f32; logsumexp has a number for each row of q."""
    scores = _scores(q, k, bias, dropout_p, is_causal, scale)
    logsumexp = scores.logsumexp(-1)
    return (scores - logsumexp[..., None]).exp() @ _for_heads_of(q, v), logsumexp


def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, and of the bias before it was broadcast, in f32."""
    p = (_scores(q, k, bias, dropout_p, is_causal, scale) - logsumexp[..., None]).exp()
    grad_out = grad_out.float()
    of_p = grad_out @ _for_heads_of(q, v).mT
    of_scores = p * (of_p - (grad_out * out.float()).sum(-1, keepdim=True))
    factor = _scale(q, scale)
    of_k, of_v = factor * of_scores.mT @ q.float(), p.mT @ grad_out
    of_q = factor * of_scores @ _for_heads_of(q, k)
    heads = (k.shape[1], -1)
    return of_q, of_k.unflatten(1, heads).sum(2), of_v.unflatten(1, heads).sum(2), of_scores


def _scores(
    q: Tensor, k: Tensor, bias: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None
) -> Tensor:
    if dropout_p:
        raise NotImplementedError("attention with dropout has a GPU's random numbers: emulation does not run it")
    scores = _scale(q, scale) * q.float() @ _for_heads_of(q, k).mT
    if bias is not None:
        scores = scores + bias
    if is_causal:
        is_later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(is_later, -math.inf)
    return scores


def _scale(q: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def _for_heads_of(q: Tensor, x: Tensor) -> Tensor:
    """Keys or values in f32, repeated for every head of the queries that shares them."""
    return x.float().repeat_interleave(q.shape[1] // x.shape[1], 1)


def _on_meta(values: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to("meta"), values)


def _real(values: Any) -> Any:
    """Zeros of the shapes of meta tensors."""
    return tree_map_only(Tensor, lambda like: torch.zeros_like(like, device="cpu"), values)


def _filled(like: Any, *values: Tensor) -> tuple[Tensor, ...]:
    """The values, with dtypes and strides of what a GPU returns."""
    return tuple(_real(one).copy_(value) for one, value in zip(like, values, strict=True))
