"""A chat template that renders the conversations of which training makes its prompts."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_rl.rollout.renderer.registry import find_renderer
from titan_rl.rollout.renderer.tokenizer import load_tokenizer
from titan_rl.rollout.renderer.types import Renderer
from titan_rl.rollout.types import Message

logger = logging.getLogger(__name__)

_IS_BEHIND_LAST_QUESTION = re.compile(r"loop\.index0 *>=? *(\w+\.)?last_(query|user)_(index|idx)\b")
_IS_BEFORE_LAST_QUESTION = re.compile(r"loop\.index0 *<=? *(\w+\.)?last_(query|user)_(index|idx)\b")
"""The conditions under which templates of Qwen, GLM and Nemotron show or drop the reasoning of a message."""


@dataclass(frozen=True, slots=True)
class TemplateFit:
    """How a model's chat template fits the prompts of a renderer that extends conversations.

    Attributes:
        drops: the template leaves out earlier reasoning, which those prompts keep.
        template: what renders those prompts in its place, if such a template was found.
    """

    drops: bool = False
    template: str | None = None

    def told(self, renderer: str) -> str | None:
        """What to say of it to a person; None where there is nothing to say."""
        if not self.drops:
            return None
        begun = (
            f"model.renderer = {renderer!r} keeps earlier reasoning in the prompt, which the model's own chat template "
            "drops; "
        )
        if self.template is not None:
            return f"{begun}the chat template of the exported folder keeps it, too"
        return (
            f"{begun}no chat template was found that keeps it, and the exported folder has the model's own: serve it "
            "with titan-rl serve, whose prompts are those of training"
        )


def fit_template(folder: str | Path, renderer: str) -> TemplateFit:
    """Compare the chat template of a model's folder with the renderer that settings name, on conversations with
    reasoning; where it drops some, look for one that does not by changing its conditions, and try it on the same.

    Nothing is raised: what cannot be compared counts as fitting.
    """
    try:
        tokenizer = load_tokenizer(folder)
        return _fit(tokenizer, find_renderer(renderer)(tokenizer))
    except Exception as error:
        logger.info("the chat template of %s cannot be compared with what is trained: %r", folder, error)
        return TemplateFit()


def _fit(tokenizer: Any, renderer: Renderer) -> TemplateFit:
    own = tokenizer.chat_template
    tried = [each for each in map(_Tried.of(tokenizer, renderer), _CONVERSATIONS) if each is not None]
    if not isinstance(own, str) or all(each.is_rendered_by(own) for each in tried):
        return TemplateFit()
    for template in _keeping(own):
        if all(each.is_rendered_by(template) for each in tried):
            return TemplateFit(True, template)
    return TemplateFit(any(each.is_dropped_by(own) for each in tried))


def _keeping(template: str) -> Iterator[str]:
    changed = _IS_BEFORE_LAST_QUESTION.sub("false", _IS_BEHIND_LAST_QUESTION.sub("true", template))
    if changed != template:
        yield changed


@dataclass(frozen=True, slots=True)
class _Tried:
    """A conversation, and the text of the prompt that a renderer makes by extending it turn by turn."""

    tokenizer: Any
    messages: Sequence[Message]
    tools: list[Any] | None
    prompt: str

    @staticmethod
    def of(tokenizer: Any, renderer: Renderer) -> Callable[[tuple[Message, ...]], _Tried | None]:
        """Makes one of a conversation; None where the renderer does not extend it."""

        def make(conversation: tuple[Message, ...]) -> _Tried | None:
            tools = list(_TOOLS) if any("tool_calls" in message for message in conversation) else None
            ids = _extended(renderer, conversation, tools)
            return None if ids is None else _Tried(tokenizer, conversation, tools, tokenizer.decode(ids))

        return make

    def is_rendered_by(self, template: str) -> bool:
        return self._rendered(template) == self.prompt

    def is_dropped_by(self, template: str) -> bool:
        thoughts = [str(message["reasoning_content"]) for message in self.messages if "reasoning_content" in message]
        rendered = self._rendered(template) or ""
        return any(thought in self.prompt and thought not in rendered for thought in thoughts)

    def _rendered(self, template: str) -> str | None:
        try:
            ids = self.tokenizer.apply_chat_template(
                copy.deepcopy(list(self.messages)),
                tools=self.tools,
                chat_template=template,
                add_generation_prompt=True,
                return_dict=False,
            )
        except Exception as error:
            logger.debug("a chat template cannot be tried: %s", error)
            return None
        return self.tokenizer.decode(ids)


def _extended(renderer: Renderer, conversation: Sequence[Message], tools: list[Any] | None) -> list[int] | None:
    """The prompt behind a conversation whose replies were sampled as the renderer writes the last one of each."""
    stops = set(renderer.get_stop_token_ids())
    replies = [place for place, message in enumerate(conversation) if message["role"] == "assistant"]
    ends = [*replies[1:], len(conversation)]
    prompt = list(renderer.render_ids(list(conversation[: replies[0]]), tools=tools, add_generation_prompt=True))
    for reply, end in zip(replies, ends, strict=True):
        asked = list(renderer.render_ids(list(conversation[:reply]), tools=tools, add_generation_prompt=True))
        whole = list(renderer.render_ids(list(conversation[: reply + 1]), tools=tools))
        if whole[: len(asked)] != asked:
            return None
        said = whole[len(asked) :]
        said = said[: 1 + next((at for at, token in enumerate(said) if token in stops), len(said))]
        following = list(conversation[reply + 1 : end])
        extended = renderer.bridge_to_next_turn(prompt, said, following, tools=tools)
        if extended is None:
            return None
        prompt = list(extended.token_ids)
    return prompt


_TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look up a word.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
        },
    },
)
_CALL: Message = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "Which word is that?",
    "tool_calls": [{"type": "function", "id": "call_1", "function": {"name": "look_up", "arguments": {"word": "it"}}}],
}
_TALK: tuple[Message, ...] = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Define it."},
    {"role": "assistant", "content": "A word.", "reasoning_content": "That is short."},
    {"role": "user", "content": "Longer."},
    {"role": "assistant", "content": "A pronoun.", "reasoning_content": "Not much longer."},
    {"role": "user", "content": "Thanks."},
)
_CALLED: tuple[Message, ...] = (
    {"role": "user", "content": "Define it."},
    _CALL,
    {"role": "tool", "name": "look_up", "tool_call_id": "call_1", "content": "a pronoun"},
    {"role": "assistant", "content": "A pronoun.", "reasoning_content": "Found."},
    {"role": "user", "content": "Thanks."},
)
_CONVERSATIONS = (_TALK, _CALLED)
