"""Tokenizers that are a tokenizer.json and a chat template, by the package `tokenizers` alone: importing transformers
takes a second of processor time in every process that renders."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from titan_rl.core.calls.parsing import parse_json

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_SETTINGS = frozenset(
    {*NAMED_TOKENS, "backend", "chat_template", "clean_up_tokenization_spaces", "model_max_length", "tokenizer_class"}
)
"""Keys of a tokenizer_config.json that are understood here."""

_OTHER_TEMPLATES = ("chat_template.json", "additional_chat_templates", "special_tokens_map.json", "added_tokens.json")
_UNCHANGED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
"""An added token that transformers would add in the same way."""

LoadFull = Callable[[], Any]


def plain_tokenizer(folder: Path, load_full: LoadFull) -> PlainTokenizer | None:
    """The tokenizer of a folder; None if it may need transformers.

    Args:
        load_full: loads it with transformers, for whatever this class lacks.
    """
    config, file = folder / "tokenizer_config.json", folder / "tokenizer.json"
    if not (config.is_file() and file.is_file()) or any((folder / name).exists() for name in _OTHER_TEMPLATES):
        return None
    settings, tokenizer = parse_json(config.read_text()), parse_json(file.read_text())
    if not (isinstance(settings, dict) and isinstance(tokenizer, dict)):
        return None
    settings, tokenizer = cast("dict[str, Any]", settings), cast("dict[str, Any]", tokenizer)
    adds = tokenizer.get("post_processor")
    adds_nothing = not adds or (adds.get("type") == "TemplateProcessing" and not adds.get("special_tokens"))
    if settings.keys() - _SETTINGS or tokenizer.get("truncation") or tokenizer.get("padding") or not adds_nothing:
        return None
    template = settings.get("chat_template")
    if (own := folder / "chat_template.jinja").is_file():
        if template is not None:
            return None
        template = own.read_text()
    named = {name: settings[name] for name in NAMED_TOKENS if settings.get(name) is not None}
    added = {token["content"]: token for token in tokenizer.get("added_tokens") or ()}
    is_plain = (
        settings.get("tokenizer_class") == "TokenizersBackend"
        and settings.get("backend", "tokenizers") == "tokenizers"
        and settings.get("clean_up_tokenization_spaces") is False
        and (template is None or isinstance(template, str))
        and all(
            isinstance(token, str) and added.get(token, {}).items() >= _UNCHANGED.items() for token in named.values()
        )
        and len(tokenizer.get("model", {}).get("vocab", ())) < 100_000  # transformers changes some that are larger
    )
    return PlainTokenizer(folder, named, template, load_full) if is_plain else None


class PlainTokenizer:
    """A tokenizer with the part of transformers' interface that rendering needs. Whatever else is asked of it, it loads
    the tokenizer of transformers for, which does it.

    Attributes:
        name_or_path: The folder.
        chat_template: Template of conversations; None if the folder has none.

    Args:
        named: Special tokens by the names of transformers, such as "eos_token".
    """

    is_fast = True

    def __init__(self, folder: Path, named: Mapping[str, str], chat_template: str | None, load_full: LoadFull) -> None:
        from tokenizers import Tokenizer

        self.backend_tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.backend_tokenizer.no_truncation()
        self.name_or_path = str(folder)
        self.chat_template = chat_template
        self.special_tokens_map = dict(named)
        self._load_full = load_full
        self._full: Any = None
        for name in NAMED_TOKENS:
            token = named.get(name)
            setattr(self, name, token)
            setattr(self, f"{name}_id", None if token is None else self.backend_tokenizer.token_to_id(token))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._of_transformers(), name)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def __bool__(self) -> bool:
        return True

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary without added tokens."""
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=False)

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        return self.backend_tokenizer.get_added_tokens_decoder()

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def __call__(self, text: Any, *others: Any, **settings: Any) -> Any:
        wanted = settings.keys() == {"add_special_tokens", "return_offsets_mapping"}
        if others or not (wanted and settings["return_offsets_mapping"] is True and isinstance(text, str)):
            return self._of_transformers()(text, *others, **settings)
        encoded = self.backend_tokenizer.encode(text, add_special_tokens=settings["add_special_tokens"])
        return _Encoded(input_ids=encoded.ids, attention_mask=encoded.attention_mask, offset_mapping=encoded.offsets)

    def encode(self, text: Any, *others: Any, add_special_tokens: bool = True, **settings: Any) -> list[int]:
        if others or settings or not isinstance(text, str):
            return self._of_transformers().encode(text, *others, add_special_tokens=add_special_tokens, **settings)
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **settings: Any) -> Any:
        ids: Any = [token_ids] if isinstance(token_ids, int) else token_ids
        is_list = isinstance(ids, list | tuple) and all(isinstance(each, int) for each in cast("Any", ids))
        if not is_list or any(settings.values()) or settings.keys() - {"clean_up_tokenization_spaces"}:
            return self._of_transformers().decode(token_ids, skip_special_tokens=skip_special_tokens, **settings)
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if not isinstance(tokens, str):
            return self._of_transformers().convert_tokens_to_ids(tokens) if tokens is None else [*map(self._id, tokens)]
        return self._id(tokens)

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        if skip_special_tokens:
            return self._of_transformers().convert_ids_to_tokens(ids, skip_special_tokens=True)
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        return [self.backend_tokenizer.id_to_token(int(each)) for each in ids]

    def apply_chat_template(
        self,
        conversation: Any,
        tools: Any = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **settings: Any,
    ) -> Any:
        source = self.chat_template if chat_template is None else chat_template
        template = None if source is None else _compiled(source)
        is_plain = (
            template is not None
            and not (tokenize and return_dict)
            and not settings.keys() & _SETTINGS_OF_TEMPLATES
            and _are_dicts(conversation)
            and (tools is None or _are_dicts(tools) or tools == [])
        )
        if not is_plain:
            return self._of_transformers().apply_chat_template(
                conversation,
                tools,
                chat_template=source,
                add_generation_prompt=add_generation_prompt,
                tokenize=tokenize,
                return_dict=return_dict,
                **settings,
            )
        rendered = cast("Any", template).render(
            messages=conversation,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **{**self.special_tokens_map, **settings},
        )
        return self.encode(rendered, add_special_tokens=False) if tokenize else rendered

    def _id(self, token: str) -> int | None:
        found = self.backend_tokenizer.token_to_id(token)
        return self.special_id("unk_token") if found is None else found

    def special_id(self, name: str) -> int | None:
        """Id of a named special token; None if there is none."""
        return self.__dict__[f"{name}_id"]

    def _of_transformers(self) -> Any:
        if self._full is None:
            self._full = self._load_full()
        return self._full


class _Encoded(dict[str, Any]):
    """Encoding of a text, whose values are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


_SETTINGS_OF_TEMPLATES = frozenset(
    {
        "documents",
        "continue_final_message",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)
"""Arguments of transformers' `apply_chat_template` that are not passed on to the template."""


def _are_dicts(values: Any) -> bool:
    each: list[Any] = list(values) if isinstance(values, list | tuple) else [None]  # pyright: ignore[reportUnknownArgumentType]
    return bool(each) and all(isinstance(one, dict) for one in each)


@lru_cache(64)
def _compiled(source: str) -> Any:
    """A chat template in the environment that transformers gives it; None if it uses an extension of transformers or
    has an error, which transformers reports."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json  # jinja's own escapes characters of HTML
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except TemplateError:
        return None


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
