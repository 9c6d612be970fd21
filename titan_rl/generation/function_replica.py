"""A `GenerateFn` as a replica of a router, and the check of its tokens against a vocabulary."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from inspect import isawaitable
from pathlib import Path
from typing import Any

from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.calls.plain import safe_text
from titan_rl.core.calls.user_code import place_of
from titan_rl.generation.types import PauseMode
from titan_rl.types import Completion, GenerateFn, SamplingParams, VersionSpan


class FunctionReplica:
    """For a function that has no weights to load, or gets them by a way of its own. Pulling a version only notes it:
    what is asked for from then on counts as its tokens. A pause holds up the requests that come meanwhile; those that
    are under way run to their end.

    Example:

        router = GeneratorRouter([FunctionReplica(my_generate)])
    """

    def __init__(self, generate: GenerateFn, name: str = "generate") -> None:
        self.name = name
        self._generate = generate
        self._version = 0
        self._going = asyncio.Event()
        self._going.set()

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> Completion:
        await self._going.wait()
        version = self._version
        answer: Any = self._generate(prompt_token_ids, request_id=request_id, session_id=session_id, sampling=sampling)
        if not isawaitable(answer):
            raise TypeError(f"{self._what} gave a {type(answer).__name__} that cannot be awaited; write async def")
        completion: Any = await answer
        if not isinstance(completion, Completion):
            raise TypeError(f"{self._what} gave a {type(completion).__name__}; a Completion is expected")
        return replace(completion, version_spans=(VersionSpan(version, len(completion.token_ids)),))

    @property
    def _what(self) -> str:
        return f"generate of {place_of(self._generate) or safe_text(self._generate, repr)}"

    async def pull(self, version: int) -> int:
        self._version = max(version, self._version)
        return self._version

    async def pause(self, mode: PauseMode) -> None:
        self._going.clear()

    async def resume(self) -> None:
        self._going.set()

    async def abort(self, request_ids: Sequence[str]) -> None: ...

    async def close(self) -> None: ...


def within_vocabulary(generate: GenerateFn, model: str) -> GenerateFn:
    """Fails where it gives a token that the model has not: a tokenizer makes nothing of it without a word, and such a
    completion would be scored.

    Args:
        model: a Hugging Face folder; where there is none, `generate` is given back as it is.
    """
    size = _vocabulary_size(Path(model))
    if size is None:
        return generate

    async def checked(
        prompt_token_ids: Sequence[int], *, request_id: str, session_id: str | None = None, sampling: SamplingParams
    ) -> Completion:
        completion = await generate(prompt_token_ids, request_id=request_id, session_id=session_id, sampling=sampling)
        tokens = getattr(completion, "token_ids", ())  # who asked says what is wrong with another answer
        if len(tokens) and max(tokens) >= size:
            raise ValueError(f"generate gave token {max(tokens)}; the model in {model!r} has tokens below {size}")
        return completion

    return checked


def _vocabulary_size(folder: Path) -> int | None:
    try:
        size = parse_json((folder / "config.json").read_text()).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return size if isinstance(size, int) else None
