"""What must be known of torch's modules: where a call of one begins, and where recurrent ones keep their weights.

`_compiled_call_impl`, `_call_impl`, `skip_code` and what is used of `RNNBase` are private, as of torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._dynamo.eval_frame import skip_code

from ..layout.parts import Parts

_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_captured(function: _Function) -> _Function:
    """Have Dynamo begin with what `function` calls; within a frame that it captures, it captures `function` too."""
    skip_code(function.__code__)
    return function


class CalledByItself:
    """Mixed into a module with sharded parameters below it: calling it by itself is a forward, too."""

    _fsdp_running: Any

    @not_captured
    def _compiled_call_impl(self, *args: Any, **kwargs: Any) -> Any:
        """Where `nn.Module.__call__` goes. Dynamo takes the shorter way to `forward`, and pays nothing for this."""
        if isinstance(self, Parts):
            return self._call_impl(*args, **kwargs)
        return self._fsdp_running.run(self, self._call_impl, args, kwargs)  # type: ignore[attr-defined]


class Recurrent:
    """Mixed into LSTM, GRU and RNN. The list that they keep of their parameters, flattened for cuDNN, is read anew."""

    _flat_weights_names: list[str]

    @property
    def _flat_weights(self) -> list[torch.Tensor]:
        return [getattr(self, name) for name in self._flat_weights_names]

    @_flat_weights.setter
    def _flat_weights(self, _: list[torch.Tensor]) -> None:
        pass

    def _update_flat_weights(self) -> None:
        pass

    def flatten_parameters(self) -> None:
        """Nothing: full parameters do not live long enough for it to pay."""
