"""Demonstrations in tokens, each turned into them when it is first asked for."""

from __future__ import annotations

from collections.abc import Sequence

from titan_rl.core.errors import DataError
from titan_rl.rollout.renderer import Renderer
from titan_rl.run.sft.sources import Found
from titan_rl.training.data.demonstrations import DemonstrationTokens, encode
from titan_rl.training.data.sample import TrainingSample


class TokenSource:
    """Demonstrations by their number. Those with more than `max_context` tokens are left out. Not thread-safe.

    Attributes:
        too_long: the numbers of those that were, as far as they were asked for.
    """

    def __init__(self, renderer: Renderer, found: Sequence[Found], max_context: int) -> None:
        self._renderer = renderer
        self._found = found
        self._max_context = max_context
        self._tokens: dict[int, DemonstrationTokens] = {}
        self.too_long: set[int] = set()

    def length(self, number: int) -> int:
        """In tokens."""
        return len(self._encoded(number).token_ids)

    def samples(self, numbers: Sequence[int]) -> list[TrainingSample]:
        """
        Raises:
            DataError: one cannot be rendered, or all are too long.
        """
        encoded = [(number, self._encoded(number)) for number in numbers]
        self.too_long |= {number for number, tokens in encoded if len(tokens.token_ids) > self._max_context}
        samples = [
            tokens.sample(f"{place}/{number}")
            for place, (number, tokens) in enumerate(encoded)
            if number not in self.too_long
        ]
        if not samples:
            names = ", ".join(self._found[number][0] for number in numbers[:3])
            raise DataError(
                f"all {len(numbers)} demonstrations of a step have more than model.max_context = {self._max_context} "
                f"tokens, such as {names}; raise model.max_context, or leave them out"
            )
        return samples

    def _encoded(self, number: int) -> DemonstrationTokens:
        if (tokens := self._tokens.get(number)) is None:
            name, demonstration = self._found[number]
            try:
                tokens = self._tokens[number] = encode(self._renderer, demonstration)
            except DataError as error:
                raise DataError(f"{name}: {error}") from error.__cause__
        return tokens
