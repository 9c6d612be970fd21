"""A policy without a model: for looking at a task before there are engines."""

from __future__ import annotations

from collections.abc import Sequence

from titan_rl.types import Completion, FinishReason, SamplingParams, VersionSpan

ECHOED = 8


class MockPolicy:
    """A `GenerateFn` for one group, whose id has no slash. It gives what policies give that have learned nothing:
    siblings in turn say what they are shown, the end of the prompt, nothing at all, and more than they may.

    Args:
        shown: answers to the first request of a rollout, to its second, and so on, each with its stop token; the last
            one is given again. Without them the end of the prompt is said instead.  # [num_turns][num_tokens]
        stop_token_id: ends the other answers.
    """

    def __init__(self, shown: Sequence[Sequence[int]], stop_token_id: int) -> None:
        self._shown = shown
        self._stop = stop_token_id

    async def __call__(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> Completion:
        _, sibling, *_, turn = request_id.split("/")
        answer = self._answer(int(sibling) % 4, int(turn), prompt_token_ids, sampling.max_tokens)
        ends = FinishReason.STOP if len(answer) <= sampling.max_tokens else FinishReason.LENGTH
        answer = answer[: sampling.max_tokens]
        return Completion(request_id, answer, [0.0] * len(answer), ends, [VersionSpan(0, len(answer))])

    def _answer(self, way: int, turn: int, prompt: Sequence[int], max_tokens: int) -> list[int]:
        plain = [token for token in prompt if token != self._stop][-ECHOED:]
        if way == 0 and self._shown:
            return list(self._shown[min(turn, len(self._shown) - 1)])
        if way == 2:
            return [self._stop]
        return plain[-1:] * (max_tokens + 1) if way == 3 else [*plain, self._stop]
