"""Renderers by name, the choice of one for a model, its fit with the model's chat template, and their chat support."""

from __future__ import annotations

import copy
import logging
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from titan_rl.core.calls.imports import find_function
from titan_rl.core.errors import RequestError
from titan_rl.rollout.renderer.chat_template import ChatTemplateRenderer
from titan_rl.rollout.renderer.renderers_package import (
    WithStopTokens,
    renderer_of_class,
    renderer_of_name,
    renderers_module,
    template_keywords,
)
from titan_rl.rollout.renderer.tokenizer import load_tokenizer, load_transformers_tokenizer
from titan_rl.rollout.renderer.types import Renderer, require_tool_support
from titan_rl.rollout.types import Message

logger = logging.getLogger(__name__)

_HUB_FOLDER = re.compile(r"models--.+--(.+)")
"""Folder of a model in the cache of the Hugging Face hub: `models--Qwen--Qwen3-0.6B/snapshots/c1899de2`."""


@dataclass(frozen=True, slots=True)
class ChosenRenderer:
    """A renderer, and the reason for it."""

    renderer: Renderer
    reason: str


def choose_renderer(tokenizer: Any, *, single_turn: bool = False) -> ChosenRenderer:
    """Choose a suitable renderer of the `renderers` package, which handles a model's reasoning; otherwise use
    `ChatTemplateRenderer`.

    A renderer is suitable if the model's folder has the name of one of its models, or if it renders conversations, with
    tools and without, exactly like the model's own chat template.

    Args:
        tokenizer: Tokenizer of the model.
        single_turn: Whether conversations have a single turn and are never extended; see `ChatTemplateRenderer`.

    Raises:
        ModelError: no renderer is suitable, and `ChatTemplateRenderer` refuses the tokenizer.
    """
    try:
        base = renderers_module("base")
    except ImportError:
        return _of_template(tokenizer, "the package renderers is not installed", single_turn)
    models: dict[str, str] = base.MODEL_RENDERER_MAP
    folders = Path(str(getattr(tokenizer, "name_or_path", ""))).parts
    names = {match[1] if (match := _HUB_FOLDER.fullmatch(part)) else part for part in folders[-3:]}
    for model, name in models.items():
        if model.rpartition("/")[2] in names and (renderer := renderer_of_name(name, tokenizer)) is not None:
            return ChosenRenderer(renderer, f"the folder has the name of {model}")
    of_text = {name for model, name in models.items() if model not in base.MULTIMODAL_MODELS}
    for name in sorted(of_text) if getattr(tokenizer, "chat_template", None) else ():
        if (renderer := renderer_of_name(name, tokenizer)) is not None and _renders_alike(renderer, tokenizer):
            logger.info("model.renderer: %s renders as the chat template does", type(renderer).__name__)
            return ChosenRenderer(renderer, "it renders as the model's chat template does")
    return _of_template(tokenizer, "no renderer of the package renders as the model's chat template does", single_turn)


def _of_template(tokenizer: Any, reason: str, single_turn: bool) -> ChosenRenderer:
    return ChosenRenderer(ChatTemplateRenderer(tokenizer, single_turn=single_turn), reason)


def suitable_renderer(tokenizer: Any, *, single_turn: bool = False) -> Renderer:
    """Choose the renderer of a tokenizer; see `choose_renderer`."""
    return choose_renderer(tokenizer, single_turn=single_turn).renderer


def _renders_alike(renderer: Renderer, tokenizer: Any) -> bool:
    """Whether a renderer produces the same text as the tokenizer's template. Tokens may differ, because a renderer
    tokenizes the text around a message separately."""
    keywords = template_keywords(renderer)
    try:
        for messages, tools in _COMPARED:
            given: Any = {"tools": tools, "add_generation_prompt": True}
            wanted: str = tokenizer.apply_chat_template(list(messages), tokenize=False, **given, **keywords)
            if wanted != tokenizer.decode(renderer.render_ids(list(messages), **given)):
                return False
    except Exception as error:
        logger.debug("renderer %s does not suit: %s", type(renderer).__name__, error)
        return False
    return True


_DATA: dict[str, Any] = tomllib.loads(
    files("titan_rl.rollout.renderer").joinpath("conversations.toml").read_text("utf-8")
)
TOOLS: Sequence[dict[str, Any]] = (_DATA["tool"],)
_OPENING: Sequence[Message] = _DATA["opening"]
_TALK: Sequence[Message] = _DATA["talk"]
_COMPARED: Sequence[tuple[Sequence[Message], list[Any] | None]] = (
    (_OPENING, list(TOOLS)),
    ([*_OPENING, *_DATA["called"]], list(TOOLS)),
    (_OPENING[1:], None),  # here the template of Qwen2.5 adds its own system message
)
"""Conversations and their tools, on which a renderer and a template are compared."""


RendererFn = Callable[[Any], Renderer]
"""Factory of a renderer from a Hugging Face tokenizer, such as a renderer class."""

BY_NAME: dict[str, RendererFn] = {"auto": suitable_renderer, "chat_template": ChatTemplateRenderer}
"""Built-in renderers that `model.renderer` can name."""


def find_renderer(name: str, *, single_turn: bool = False) -> RendererFn:
    """Look up the factory of the renderer that `model.renderer` names.

    Args:
        name: Value of `model.renderer`.
        single_turn: Whether built-in renderers accept chat templates that cannot be extended turn by turn.

    A class of the `renderers` package is configured to keep earlier reasoning, as with `auto`. By default these classes
    render a conversation again at a user's message, which drops sampled tokens.

    Raises:
        ConfigError: no renderer has that name.
    """
    make = find_function("model.renderer", name, BY_NAME)
    if single_turn and name in BY_NAME:
        return partial(cast("Any", make), single_turn=True)
    if not isinstance(make, type) or make.__module__.partition(".")[0] != "renderers":
        return make
    return partial(renderer_of_class, cast("Any", make))


def load_tokenizer_for(name: str, folder: str | Path) -> Any:
    """Load the tokenizer of a folder for the renderer that `model.renderer` names. One that is not built in may use
    everything that a tokenizer of transformers has.

    Raises:
        ModelError: the folder is missing, or has no tokenizer that can be loaded.
        MissingExtraError: tokenizers or transformers is not installed.
    """
    return load_tokenizer(folder) if name in BY_NAME else load_transformers_tokenizer(folder)


def with_template_kwargs(renderer: Renderer, kwargs: Mapping[str, Any], tokenizer: Any) -> Renderer:
    """Copy of a renderer with other template keywords. Renderers of the `renderers` package have them in their config.

    Raises:
        RequestError: the renderer does not accept a keyword or its value, or cannot extend conversations with it.
    """
    if isinstance(renderer, ChatTemplateRenderer):
        return renderer.with_template_kwargs(kwargs)
    if isinstance(renderer, WithStopTokens):
        return WithStopTokens(with_template_kwargs(renderer.renderer, kwargs, tokenizer), renderer.more)
    config: Any = getattr(renderer, "config", None)
    known: frozenset[str] = getattr(config, "_template_fields", frozenset())
    name = type(renderer).__name__
    if unknown := sorted(kwargs.keys() - known):
        takes = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
        raise RequestError(f"chat_template_kwargs has {unknown[0][:100]!r}, which {name} does not take; {takes}")
    try:
        given = {**config.model_dump(exclude_unset=True), **kwargs}
        kind, config_kind = cast("tuple[Any, Any]", (type(renderer), config.__class__))
        return kind(tokenizer, config_kind.model_validate(given))
    except Exception as error:  # a validation error, or any error of a renderer
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RequestError(f"chat_template_kwargs = {dict(kwargs)!r} is not what {name} takes: {first}") from error


_IS_BEHIND_LAST_QUESTION = re.compile(r"loop\.index0 *>=? *(\w+\.)?last_(query|user)_(index|idx)\b")
_IS_BEFORE_LAST_QUESTION = re.compile(r"loop\.index0 *<=? *(\w+\.)?last_(query|user)_(index|idx)\b")
"""Conditions under which templates of Qwen, GLM and Nemotron show or drop the reasoning of a message."""


@dataclass(frozen=True, slots=True)
class TemplateFit:
    """Fit of a model's chat template with the prompts of a renderer that extends conversations.

    Attributes:
        drops: Whether the template leaves out earlier reasoning, which these prompts keep.
        template: Changed template that renders these prompts, if one was found.
    """

    drops: bool = False
    template: str | None = None

    def message(self, renderer: str) -> str | None:
        """Message for the user; None if the template fits.

        Args:
            renderer: Value of `model.renderer`.
        """
        if not self.drops:
            return None
        difference = (
            f"model.renderer = {renderer!r} keeps earlier reasoning in the prompt, which the model's own chat template "
            "drops; "
        )
        if self.template is not None:
            return f"{difference}the chat template of the exported folder keeps it, too"
        return (
            f"{difference}no chat template was found that keeps it, and the exported folder has the model's own: serve "
            "it with titan-rl serve, whose prompts are those of training"
        )


def fit_template(folder: str | Path, renderer: str) -> TemplateFit:
    """Compare the chat template of a model's folder with the renderer that settings name, on conversations with
    reasoning. If the template drops reasoning, change its conditions and try the result on the same conversations.

    Raises nothing. A template that cannot be compared counts as fitting.
    """
    try:
        tokenizer = load_tokenizer_for(renderer, folder)
        return _fit(tokenizer, find_renderer(renderer)(tokenizer))
    except Exception as error:
        logger.info("the chat template of %s cannot be compared with what is trained: %r", folder, error)
        return TemplateFit()


def _fit(tokenizer: Any, renderer: Renderer) -> TemplateFit:
    own = tokenizer.chat_template
    tried: list[_Tried] = []
    for conversation in (_TALK, _DATA["talk_with_call"]):
        tools = list(TOOLS) if any("tool_calls" in message for message in conversation) else None
        if (ids := _extended_prompt(renderer, conversation, tools)) is not None:
            tried.append(_Tried(tokenizer, conversation, tools, tokenizer.decode(ids)))
    if not isinstance(own, str) or all(each.is_rendered_by(own) for each in tried):
        return TemplateFit()
    keeping = _IS_BEFORE_LAST_QUESTION.sub("false", _IS_BEHIND_LAST_QUESTION.sub("true", own))
    if keeping != own and all(each.is_rendered_by(keeping) for each in tried):
        return TemplateFit(True, keeping)
    return TemplateFit(any(each.is_dropped_by(own) for each in tried))


def _drops_reasoning(tokenizer: Any, renderer: Renderer) -> bool:
    """Check whether a chat template leaves out earlier reasoning, which the renderer keeps; False if they cannot be
    compared."""
    try:
        return _fit(tokenizer, renderer).drops
    except Exception as error:
        logger.info("a chat template cannot be compared with a renderer: %r", error)
        return False


@dataclass(frozen=True, slots=True)
class _Tried:
    """Conversation, with the text of the prompt that a renderer makes by extending it turn by turn."""

    tokenizer: Any
    messages: Sequence[Message]
    tools: list[Any] | None
    prompt: str

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


def _extended_prompt(renderer: Renderer, conversation: Sequence[Message], tools: list[Any] | None) -> list[int] | None:
    """Prompt that extends a conversation turn by turn, if each reply is sampled exactly as the renderer writes it as
    the last message. None if the renderer does not extend the conversation.  # [num_prompt_tokens]"""
    stops = set(renderer.get_stop_token_ids())
    replies = [index for index, message in enumerate(conversation) if message["role"] == "assistant"]
    ends = [*replies[1:], len(conversation)]
    prompt = list(renderer.render_ids(list(conversation[: replies[0]]), tools=tools, add_generation_prompt=True))
    for reply, end in zip(replies, ends, strict=True):
        before = list(renderer.render_ids(list(conversation[:reply]), tools=tools, add_generation_prompt=True))
        token_ids = list(renderer.render_ids(list(conversation[: reply + 1]), tools=tools))
        if token_ids[: len(before)] != before:
            return None
        completion = token_ids[len(before) :]
        last = next((at for at, token in enumerate(completion) if token in stops), len(completion))
        completion = completion[: last + 1]
        following = list(conversation[reply + 1 : end])
        extended = renderer.bridge_to_next_turn(prompt, completion, following, tools=tools)
        if extended is None:
            return None
        prompt = list(extended.token_ids)
    return prompt


_MOST_SHOWN = 8


@dataclass(frozen=True, slots=True)
class ChatSupport:
    """Chat support of a model.

    Attributes:
        renderer: Class of the renderer.
        reason: Reason for this renderer.
        extends: Whether each prompt begins with the tokens of the previous prompt and completion.
        extension: Evidence for this, or the reason why not.
        tool_calls: Format of tool calls; None if they are not parsed.
        tool_problem: Reason why tool calls are not parsed.
        stop_tokens: Texts of the tokens that end an answer.
    """

    renderer: str
    reason: str
    extends: bool
    extension: str
    tool_calls: str | None
    tool_problem: str | None
    stop_tokens: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """Lines of the dry run."""
        yield f"model.renderer is {self.renderer}: {self.reason}"
        yield f"turns extend token by token: {'yes' if self.extends else 'no'}, {self.extension}"
        yield f"tool calls: {self.tool_calls or f'not parsed, {self.tool_problem}'}"
        more = len(self.stop_tokens) - _MOST_SHOWN
        shown = " ".join(self.stop_tokens[:_MOST_SHOWN])
        yield f"stop tokens: {shown}{f' and {more} more' if more > 0 else ''}"


def chat_support(tokenizer: Any, chosen: ChosenRenderer) -> ChatSupport:
    """Describe the renderer of a tokenizer."""
    renderer = chosen.renderer
    extends, extension = _extension(renderer, tokenizer)
    tool_calls, tool_problem = _tool_calls(renderer)
    return ChatSupport(
        _class_name(renderer),
        chosen.reason,
        extends,
        extension,
        tool_calls,
        tool_problem,
        tuple(map(str, tokenizer.convert_ids_to_tokens(renderer.get_stop_token_ids()))),
    )


def _class_name(renderer: Any) -> str:
    """Name of the class of a renderer, without its further stop tokens."""
    return type(getattr(renderer, "renderer", renderer)).__name__


def _extension(renderer: Renderer, tokenizer: Any) -> tuple[bool, str]:
    """Extend a conversation of three questions, and compare its prompt with that of the model's own chat template."""
    if isinstance(renderer, ChatTemplateRenderer) and renderer.problem is not None:
        return False, renderer.problem
    plain = [{key: value for key, value in message.items() if key != "reasoning_content"} for message in _TALK]
    prompt, talk = None, plain
    for talk in (plain, plain[1:]):  # some templates have no system message
        try:
            prompt = _extended_prompt(renderer, talk, None)
        except Exception:  # a renderer may raise any error
            continue
        break
    if prompt is None:
        return True, "not compared with the chat template, whose answers do not begin where its prompts end"
    if _drops_reasoning(tokenizer, renderer):
        return True, "earlier reasoning stays, which the chat template drops"
    own = _template_prompt(tokenizer, talk, template_keywords(renderer))
    if own is None:
        return True, "not compared with a chat template, which the model lacks"
    if own == prompt:
        return True, "tested on three turns, with the tokens of the chat template"
    if tokenizer.decode(own) == tokenizer.decode(prompt):
        return True, "tested on three turns, with the text of the chat template"
    return True, "earlier answers stay as sampled, which the chat template writes in another way"


def _template_prompt(tokenizer: Any, talk: Sequence[Message], keywords: Mapping[str, Any]) -> list[int] | None:
    try:
        return list(
            tokenizer.apply_chat_template(list(talk), add_generation_prompt=True, return_dict=False, **keywords)
        )
    except Exception:  # there is no template, or it raises an error of any kind
        return None


def _tool_calls(renderer: Renderer) -> tuple[str | None, str | None]:
    if isinstance(renderer, ChatTemplateRenderer):
        found = renderer.call_format
        return None if found is None else found.name, renderer.call_problem
    for opening in (_OPENING, _OPENING[1:]):
        try:
            require_tool_support(renderer, opening, TOOLS)
        except Exception as error:  # a renderer may raise any error
            problem = str(error)
        else:
            return f"of {_class_name(renderer)}", None
    return None, problem
