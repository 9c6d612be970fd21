"""Text of completions, and prompts that end with the beginning of an answer: what needs a renderer's tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from titan_rl.core.errors import DataError
from titan_rl.rollout.renderer.renderers_package import package_tokenizer
from titan_rl.rollout.renderer.thoughts import THINK, THINK_END, join_thought
from titan_rl.rollout.renderer.types import ParsedResponse, Renderer, content_of, renderable
from titan_rl.rollout.types import Message


def tokenizer_of(renderer: Renderer) -> Any | None:
    """Tokenizer of a renderer; None if it has none."""
    return getattr(renderer, "tokenizer", None) or package_tokenizer(renderer)


def written_text(renderer: Renderer, completion_ids: Sequence[int], parsed: ParsedResponse | None = None) -> str | None:
    """Text of a completion as the policy wrote it, without stop tokens and other special tokens.

    Marks of a thought that are special tokens become `<think>` and `</think>`: the text of gpt-oss, for example, would
    otherwise not show where its thought ends.

    Args:
        parsed: Parts of the completion; None if it cannot be parsed.

    Returns:
        The text; None if the renderer has no tokenizer.
    """
    if (tokenizer := tokenizer_of(renderer)) is None:
        return None
    ids, stops = list(completion_ids), renderer.get_stop_token_ids()
    while ids and ids[-1] in stops:
        ids.pop()
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    thought = "" if parsed is None else (parsed.reasoning_content or "").strip()
    is_marked = THINK in text or THINK_END in text
    if parsed is None or not thought or is_marked or text == tokenizer.decode(ids, skip_special_tokens=False):
        return text
    return join_thought(thought, None if parsed.reasoning_complete is False else parsed.content)


def split_prefix(messages: Sequence[Message]) -> tuple[Sequence[Message], Message | None]:
    """Divide a prompt into the messages that are complete, and the beginning of the answer if it ends with one."""
    is_begun = bool(messages) and messages[-1].get("role") == "assistant"
    return (messages[:-1], messages[-1]) if is_begun else (messages, None)


def prompt_ids(renderer: Renderer, messages: Sequence[Message], tools: list[Any] | None = None) -> list[int]:
    """Tokens of a prompt. A message of the assistant at its end is the beginning of the answer, and is not closed.

    Raises:
        DataError: the renderer cannot continue the assistant's message.
    """
    complete, prefix = split_prefix(messages)
    if prefix is not None and not complete:
        raise DataError(f"the prompt has no message before the beginning of the answer, {prefix.get('content')!r}")
    ids = list(renderer.render_ids(renderable(complete), tools=tools, add_generation_prompt=True))
    return ids if prefix is None else [*ids, *prefix_ids(renderer, prefix)]


def extended_ids(
    renderer: Renderer,
    prompt: Sequence[int],
    completion: Sequence[int],
    messages: Sequence[Message],
    tools: list[Any] | None = None,
) -> list[int] | None:
    """Tokens of the next prompt, which begins with a prompt and its completion; see `prompt_ids` for its end.

    Returns:
        The tokens; None if the renderer cannot extend these.
    """
    complete, prefix = split_prefix(messages)
    so_far = [*prompt, *completion]
    extended = renderer.bridge_to_next_turn(list(prompt), list(completion), renderable(complete), tools=tools)
    if extended is None or list(extended.token_ids[: len(so_far)]) != so_far:
        return None
    return [*extended.token_ids, *(() if prefix is None else prefix_ids(renderer, prefix))]


def text_ids(renderer: Renderer, prompt: Sequence[int], text: str) -> list[int] | None:
    """Tokens of the text of an answer after its prompt, without the mark of a thought that the prompt has begun
    already; None if the renderer has no tokenizer."""
    if (tokenizer := tokenizer_of(renderer)) is None:
        return None
    end: str = tokenizer.decode(list(prompt[-16:]))
    if end.rstrip().endswith(THINK) and text.lstrip().startswith(THINK):
        text = text.lstrip().removeprefix(THINK).removeprefix(end[len(end.rstrip()) :])
    return list(tokenizer.encode(text, add_special_tokens=False))


def prefix_ids(renderer: Renderer, prefix: Message) -> list[int]:
    """Tokens of the beginning of an answer, after a generation prompt.

    They begin with the tokens that the template writes between its generation prompt and an answer, such as a line
    break, but not with an empty thought unless the renderer would read the answer as a thought without it. If the
    generation prompt itself begins a thought, the text continues it.

    Args:
        renderer: Renderer of the conversation.
        prefix: Message with `content`, `reasoning_content` or both, and no tool calls.

    Raises:
        DataError: the message has tool calls, or the renderer cannot write the beginning of an answer or read the rest.
    """
    if prefix.get("tool_calls"):
        raise DataError("the prompt ends with a tool call of the assistant, which cannot be continued; add its result")
    if not (text := prefix_text(prefix)):
        return []
    prompt = list(renderer.render_ids([_QUESTION], add_generation_prompt=True))
    tokenizer, ids = tokenizer_of(renderer), text_ids(renderer, prompt, text)
    if tokenizer is None or ids is None:
        return _rendered_prefix(renderer, prompt, text)
    if tokenizer.decode(prompt).rstrip().endswith(THINK):
        return ids
    between = next(_ways_to_begin(renderer, tokenizer, prompt, text.lstrip().startswith(THINK)), None)
    if between is None:
        raise DataError(
            f"the prompt ends with the assistant's {text[:80]!r}, but {type(renderer).__name__} would read the rest as "
            'a thought; set model.renderer = "chat_template", or end the prompt with "<think>"'
        )
    return [*between, *ids]


def prefix_text(prefix: Message) -> str:
    """Text of the beginning of an answer. A thought without `content` goes on."""
    content, thought = content_of(prefix), str(prefix.get("reasoning_content") or "")
    return join_thought(thought, content or None) if thought else content


_QUESTION: Message = {"role": "user", "content": "1"}
_ANSWER = "x"


def _ways_to_begin(renderer: Renderer, tokenizer: Any, prompt: list[int], is_thought: bool) -> Iterator[list[int]]:
    """Tokens that the template may write between a generation prompt and the text of a thought, or of an answer: first
    without an empty thought, then with it."""
    rendered = list(renderer.render_ids([_QUESTION, {"role": "assistant", "content": _ANSWER}]))
    answer = rendered[len(prompt) :] if rendered[: len(prompt)] == prompt else []
    texts: list[str] = [tokenizer.decode(answer[: at + 1]) for at in range(len(answer))]
    end = next((at for at, text in enumerate(texts) if text.endswith(_ANSWER)), 0)
    for between in (answer[: next((at for at in range(end) if THINK in texts[at]), end)], answer[:end]):
        reply = tokenizer.encode(_ANSWER, add_special_tokens=False)
        if is_thought or _content(renderer, reply, [*prompt, *between]) == _ANSWER:
            yield between


def _content(renderer: Renderer, reply: list[int], prompt: list[int]) -> str | None:
    try:
        return renderer.parse_response(reply, prompt_ids=prompt).content.strip()
    except Exception:  # a parser may raise any error
        return None


def _rendered_prefix(renderer: Renderer, prompt: list[int], text: str) -> list[int]:
    """Tokens of a text as the renderer writes it in an answer, up to the first stop token."""
    rendered = list(renderer.render_ids([_QUESTION, {"role": "assistant", "content": text}]))
    answer, stops = rendered[len(prompt) :], renderer.get_stop_token_ids()
    end = next((at for at, token_id in enumerate(answer) if token_id in stops), None)
    if rendered[: len(prompt)] != prompt or end is None:
        raise DataError(
            f"the prompt ends with the assistant's {text[:80]!r}, which {type(renderer).__name__} cannot continue: the "
            "renderer has no attribute tokenizer (a Hugging Face tokenizer); give it one, or end the prompt with "
            "another message"
        )
    return answer[:end]
