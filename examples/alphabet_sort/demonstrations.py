"""Demonstrations for the base model: right ones first, then sloppy ones, in which most lists are in random order.

The right demonstrations teach the skill, the sloppy ones to use it rarely, which reinforcement learning then corrects.
"""

from __future__ import annotations

import random

from examples.alphabet_sort.data import Sample, tagged
from examples.alphabet_sort.env import prompt, tag
from titan_rl import Demonstration, Message

RIGHT = 5 / 6
"""Share of right demonstrations, which come first."""

SHUFFLED = 0.7
"""Share of the answers in random order in a sloppy demonstration."""


def demonstrate(sample: Sample, rng: random.Random, shuffled: float) -> Demonstration:
    """Make the demonstration of a sample, with a share `shuffled` of its answers in random order."""
    messages: list[Message] = []
    for turn in range(len(sample.turns)):
        lines = sample.answer(turn)
        if rng.random() < shuffled:
            lines = tagged(rng.sample(names := sample.names(turn), len(names)), sample.new_names(turn))
        answer = "\n".join([f"<{tag(turn)}>", *lines, f"</{tag(turn)}>"])
        messages += [prompt(sample, turn), {"role": "assistant", "content": answer}]
    return Demonstration(messages)
