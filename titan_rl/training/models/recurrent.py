"""Recurrent layers of transformers in packed rows: the gated delta rule, Mamba and short convolutions.

The layer of a block that mixes tokens, the mixer, passes a state from each token to the next, so in a packed row the
state of one document would leak into the next one. Here transformers' own mixer computes each document as a separate
sequence, together with its shared prompt if it has one, and everything else in the model computes packed rows. The
mixers of a family are named in `families.RECURRENT`; a model with any other sign of a recurrent state is
refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from titan_rl.core.errors import ModelError
from titan_rl.training.attention.attention import CurrentLayout
from titan_rl.training.decoder_interface import READS_PARTS
from titan_rl.training.models.families import RECURRENT

_POSITIONS = frozenset({"position_ids", "position_embeddings", "cache_position"})
"""Arguments that restate the positions of tokens, which mixers do not use: each sequence begins at position 0."""

_STATES = ("cache_params", "cache_param", "conv_state", "recurrent_state", "ssm_state")
"""Arguments by which modules receive a state of earlier tokens."""

_PARAMETERS = ("A_log", "dt_bias")
"""Parameters of modules that compute a recurrent state."""


class RecurrentMixer:
    """Replaces the forward pass of a mixer by one that computes each document of the batch separately.

    Args:
        mixer: Mixer of transformers, which computes outputs from `hidden_states` of [num_sequences, length,
            hidden_size].
        current_layout: Documents of the batch that is being computed.
    """

    def __init__(self, mixer: Any, current_layout: CurrentLayout) -> None:
        self._name = type(mixer).__name__
        self._forward = mixer.forward
        self._current_layout = current_layout
        setattr(mixer, READS_PARTS, True)  # for example, of its convolution
        mixer.forward = torch.compiler.disable(self.forward)  # the shapes depend on the documents

    def forward(self, hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:
        """Compute the outputs of packed rows.  # [B, L, D]

        Raises:
            ModelError: The model's code passes another argument with a value for each token, or ranks share the rows.
        """
        unknown = [name for name, value in given.items() if name not in _POSITIONS and _is_given(value)]
        if unknown:
            raise ModelError(
                f"transformers passes {', '.join(unknown)} to {self._name}, which the library does not divide into "
                "documents; this family cannot be trained"
            )
        layout = self._current_layout.get()
        if layout.share is not None:
            raise ModelError(f"{self._name} needs all tokens of a document; set training.context_parallel = 1")
        return layout.sequences.apply(self._forward, hidden_states)


def divide_mixers(causal: Any, current_layout: CurrentLayout) -> None:
    """Make all mixers of a model compute each document separately.

    Raises:
        ModelError: A module shows a sign of a recurrent state, but is not known as a mixer of the family.
    """
    family = causal.config.model_type
    modules: Mapping[str, nn.Module] = dict(causal.named_modules())
    mixers = {name: each for name, each in modules.items() if type(each).__name__ == RECURRENT.get(family)}
    for name, module in modules.items():
        is_known = any(f"{name}.".startswith(f"{mixer}.") or f"{mixer}.".startswith(f"{name}.") for mixer in mixers)
        if name and not is_known and (sign := _sign(module)) is not None:
            raise ModelError(
                f"{name} of model_type {family!r}, a {type(module).__name__}, {sign}, so it may carry a state from one "
                "packed sequence to the next; titan_rl does not know this module, so the family cannot be trained"
            )
    if family not in RECURRENT and getattr(causal, "_is_stateful", False):
        raise ModelError(
            f"transformers says that {type(causal).__name__} has a recurrent state, and titan_rl does not know the "
            f"modules that compute it in model_type {family!r}; this family cannot be trained"
        )
    for mixer in mixers.values():
        RecurrentMixer(mixer, current_layout)


def _sign(module: nn.Module) -> str | None:
    """Sign that a module passes a state from token to token, or None."""
    if isinstance(module, nn.Conv1d):
        return "is a convolution"
    if found := [name for name in _PARAMETERS if name in module._parameters]:
        return f"has a parameter {found[0]}"
    if found := [name for name in _STATES if name in inspect.signature(module.forward).parameters]:
        return f"has an argument {found[0]}"
    return None


def _is_given(value: Any) -> bool:
    """Whether an argument may have values for tokens: it is neither absent nor a plain value, such as a flag."""
    return value is not None and not isinstance(value, bool | int | float | str)
