"""What readers of a published version have, computed as exactly as can be: by that they are checked."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


@contextmanager
def rounded_weights(model: nn.Module, dtype: torch.dtype) -> Generator[None]:
    """Within the block the model computes in float32 with weights that are rounded to `dtype`. Without gradients.

    Rounding what is computed in between, as training does, hides how a step of a small learning rate changes logprobs.
    One module's weights are there twice at a time.
    """
    with ExitStack() as undone, torch.compiler.set_stance("force_eager"):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                undone.callback(_keep_inputs(module))
            if module._parameters:
                rounded = _Rounded(dtype)
                # Behind the hook that gathers the module's parameters, and ahead of the one that lets go of them.
                undone.callback(module.register_forward_pre_hook(rounded.enter).remove)
                undone.callback(module.register_forward_hook(rounded.leave, prepend=True, always_call=True).remove)
        yield


class _Rounded:
    """The hooks of a module."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._own: dict[str, Any] = {}

    def enter(self, module: nn.Module, _: Any) -> None:
        self._own = dict(module._parameters)
        for name, parameter in self._own.items():
            if parameter is not None:
                module._parameters[name] = parameter.detach().to(self._dtype).float()  # pyright: ignore[reportArgumentType]

    def leave(self, module: nn.Module, *_: Any) -> None:
        module._parameters.update(self._own)
        self._own = {}


def _keep_inputs(module: FSDPModule) -> Any:
    """FSDP casts what each of its modules is given to the dtype that it gathers parameters in."""
    state: Any = module._get_fsdp_state()
    policy = state._mp_policy
    state._mp_policy = replace(policy, cast_forward_inputs=False)

    def undo() -> None:
        state._mp_policy = policy

    return undo
