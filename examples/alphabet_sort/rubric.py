"""Reward of alphabet-sort: similarity of the answers to the sorted lists."""

from __future__ import annotations

import re
from difflib import SequenceMatcher

from examples.alphabet_sort.data import Sample
from examples.alphabet_sort.env import tag
from titan_rl.rollout.rewards.reward import Reward
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.types import Rollout


def alphabet_sort_rubric(power: float) -> Rubric:
    """Make the rubric: the mean over the turns of similarity ** power. A turn without an answer counts as 0."""

    def sorted_lists(rollout: Rollout) -> float:
        sample: Sample = rollout.sample
        answers = [str(message["content"]) for message in rollout.messages if message["role"] == "assistant"]
        scores = [similarity(sample, turn, text) ** power for turn, text in enumerate(answers[: len(sample.turns)])]
        return sum(scores) / len(sample.turns)

    return Rubric([Reward(sorted_lists)])


def similarity(sample: Sample, turn: int, answer: str) -> float:
    """Similarity of the answer's last block to the right lines, in [0, 1], with 1 only for equal texts.

    It is the ratio of `difflib`: twice the number of matching characters over the number of all characters, ignoring
    case and blanks around lines. An answer without the block has 0.

    Example: for ["AdaWolf", "BenHill"], the block "BenHill\\nAdaWolf" has 0.47.
    """
    blocks = re.findall(rf"<{tag(turn)}>(.*?)</{tag(turn)}>", answer, re.DOTALL)
    if not blocks:
        return 0.0
    given = "\n".join(line.strip() for line in blocks[-1].strip().splitlines())
    right = "\n".join(sample.answer(turn))
    return SequenceMatcher(None, given.lower(), right.lower(), autojunk=False).ratio()
