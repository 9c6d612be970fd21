"""Environment of alphabet-sort: the user's message of each turn."""

from __future__ import annotations

from examples.alphabet_sort.data import Sample
from titan_rl import Message, MessageObservation, MessageStep, RolloutStatus

FIRST_TAG = "alphabetical_sorted"
COMBINED_TAG = "combined_alphabetical_sorted"

FIRST_PROMPT = """\
Sort these names alphabetically by {sort_by} name:
{names}

Use exactly this format:
<alphabetical_sorted>
Name1
Name2
</alphabetical_sorted>"""

LATER_PROMPT = """\
Now sort these names together with all the earlier ones by {sort_by} name:
{names}

Mark each name that is new in this turn with `// new name!`. Use exactly this format:
<combined_alphabetical_sorted>
Name1
Name2 // new name!
</combined_alphabetical_sorted>"""


def tag(turn: int) -> str:
    """Tag around the answer of turn `turn`."""
    return COMBINED_TAG if turn else FIRST_TAG


def prompt(sample: Sample, turn: int) -> Message:
    text = LATER_PROMPT if turn else FIRST_PROMPT
    return {"role": "user", "content": text.format(sort_by=sample.sort_by, names="\n".join(sample.turns[turn]))}


class AlphabetSortEnv:
    """A `MessageEnv` that asks to sort new names in each turn of its sample, independent of the answers."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._turn = 0

    async def reset(self) -> MessageObservation:
        return MessageObservation([prompt(self._sample, 0)])

    async def step(self, message: Message) -> MessageStep:
        self._turn += 1
        if self._turn == len(self._sample.turns):
            return MessageStep(status=RolloutStatus.COMPLETED)
        return MessageStep([prompt(self._sample, self._turn)])

    async def close(self) -> None:
        pass
