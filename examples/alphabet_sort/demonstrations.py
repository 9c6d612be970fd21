"""What the base model learns from: right demonstrations, then imperfect ones, a share of which list names in random
order.

The first part brings the skill, the second has the model sort about as rarely as the demonstrations do, which leaves
the skill for reinforcement learning to bring out.
"""

from __future__ import annotations

import random

from examples.alphabet_sort.data import Sample, tagged
from examples.alphabet_sort.env import prompt, tag
from titan_rl import Demonstration, Message

RIGHT = 5 / 6
"""Share of the demonstrations that come first, all of them right."""

SHUFFLED = 0.7
"""Share of the answers of the others that are in random order."""


def demonstrate(sample: Sample, rng: random.Random, shuffled: float) -> Demonstration:
    """The conversation with answers of which the share `shuffled` is in random order."""
    messages: list[Message] = []
    for turn in range(len(sample.turns)):
        lines = sample.answer(turn)
        if rng.random() < shuffled:
            lines = tagged(rng.sample(names := sample.names(turn), len(names)), sample.new_names(turn))
        answer = "\n".join([f"<{tag(turn)}>", *lines, f"</{tag(turn)}>"])
        messages += [prompt(sample, turn), {"role": "assistant", "content": answer}]
    return Demonstration(messages)
