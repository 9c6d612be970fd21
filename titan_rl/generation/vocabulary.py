"""A `GenerateFn` that is held to the tokens that a model has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from titan_rl.core.calls.parsing import parse_json
from titan_rl.types import Completion, GenerateFn, SamplingParams


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
