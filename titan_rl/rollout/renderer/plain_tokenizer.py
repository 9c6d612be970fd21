"""Tokenizer of a folder that needs no class of transformers, such as that of a model that `titan-rl sft` has made.

It loads in milliseconds. Importing transformers takes more than half a second in every process that renders: it reads
all of its own models, and the metadata of every installed package.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from titan_rl.core.calls.parsing import parse_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_WITHOUT_EFFECT = ("backend", "is_local", "local_files_only", "model_max_length", "tokenizer_class")
"""Entries of tokenizer_config.json that change neither tokens nor texts."""

_OTHER_FILES = (
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.json",
    "additional_chat_templates",
    "chat_templates",
)
"""Files that change a tokenizer of transformers."""

_OTHER_ARGUMENTS = {
    "continue_final_message",
    "documents",
    "max_length",
    "padding",
    "return_assistant_tokens_mask",
    "return_tensors",
    "tokenizer_kwargs",
    "truncation",
}
"""Arguments of transformers that must not become keywords of a template."""

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\b")
"""Tag of an extension of transformers, which marks the model's own tokens."""


class PlainTokenizer:
    """Subset of the interface of transformers' tokenizers that renderers use, with the same results.

    Args:
        tokenizer: Content of tokenizer.json.
        folder: Folder of the tokenizer.
        named: Texts of special tokens by their names in transformers, such as "eos_token".
        chat_template: Text of the chat template; None if there is none.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, folder: str, named: Mapping[str, str], chat_template: str | None
    ) -> None:
        self.backend_tokenizer = tokenizer
        self.name_or_path = folder
        self.special_tokens_map = dict(named)
        self.chat_template = chat_template

    @classmethod
    def of_folder(cls, folder: Path) -> PlainTokenizer | None:
        """Load the tokenizer of a folder; None if only transformers can load it, or if its files are damaged.

        Raises:
            ImportError: tokenizers is not installed.
        """
        from tokenizers import Tokenizer

        config, vocabulary = folder / CONFIG, folder / "tokenizer.json"
        if not (config.is_file() and vocabulary.is_file()) or any((folder / name).exists() for name in _OTHER_FILES):
            return None
        try:
            settings: Any = parse_json(config.read_text(encoding="utf-8"))
            if (named := _named_tokens(settings)) is None:
                return None
            template = folder / TEMPLATE
            text = template.read_text(encoding="utf-8") if template.is_file() else settings.get("chat_template")
            tokenizer: Any = Tokenizer.from_file(str(vocabulary))
        except Exception:  # transformers reports what is wrong
            return None
        special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        if not special.issuperset(named.values()) or tokenizer.padding or tokenizer.truncation:
            return None
        if not (text is None or (isinstance(text, str) and _GENERATION_TAG.search(text) is None)):
            return None
        return cls(tokenizer, folder=str(folder), named=named, chat_template=text)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    def __call__(self, text: str, *, add_special_tokens: bool = True, return_offsets_mapping: bool = False) -> Any:
        """Encode a text; return its tokens, and the range of characters of each if that is asked for."""
        if not return_offsets_mapping:
            return {"input_ids": self.encode(text, add_special_tokens=add_special_tokens)}
        (encoding,) = self.backend_tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return {"input_ids": encoding.ids, "offset_mapping": encoding.offsets}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        # Other threads run meanwhile; `encode` of tokenizers holds the GIL, for seconds if the text has a megabyte.
        (encoding,) = self.backend_tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(
        self,
        token_ids: int | Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        if clean_up_tokenization_spaces:
            raise TypeError("clean_up_tokenization_spaces cannot be set here; load the tokenizer with transformers")
        found = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self.backend_tokenizer.decode(found, skip_special_tokens=skip_special_tokens)

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab()

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        return self.backend_tokenizer.get_added_tokens_decoder()

    @property
    def all_special_tokens(self) -> list[str]:
        return list(dict.fromkeys(self.special_tokens_map.values()))

    @property
    def eos_token_id(self) -> int | None:
        return self._id_of("eos_token")

    @property
    def unk_token_id(self) -> int | None:
        return self._id_of("unk_token")

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self.backend_tokenizer.token_to_id(token)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        token_id = self.backend_tokenizer.token_to_id(tokens)
        return self.unk_token_id if token_id is None else token_id

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        if not isinstance(ids, int):
            return [self.backend_tokenizer.id_to_token(each) for each in ids]
        return self.backend_tokenizer.id_to_token(ids)

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **keywords: Any,
    ) -> Any:
        """Render one conversation with the chat template.

        Raises:
            ValueError: The conversation is empty, there is no template, or a tool is no dictionary.
            TypeError: A keyword is an argument of transformers.
            jinja2.TemplateError: The template is wrong, or refuses the conversation.
        """
        template = self.chat_template if chat_template is None else chat_template
        if template is None:
            raise ValueError(f"the tokenizer of {self.name_or_path!r} has no chat template")
        if other := sorted(keywords.keys() & _OTHER_ARGUMENTS):
            raise TypeError(f"{other[0]} cannot be given here; load the tokenizer with transformers")
        if not conversation:
            raise ValueError("Cannot apply chat template to an empty conversation. Provide at least one message.")
        if tools is not None and not all(isinstance(tool, dict) for tool in tools):
            raise ValueError("a tool must be a dictionary, its JSON schema")
        text: str = compiled(template).render(
            messages=conversation,
            tools=None if tools is None else list(tools),
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **{**self.special_tokens_map, **keywords},
        )
        if not tokenize:
            return text
        encoded = self(text, add_special_tokens=False)
        return encoded if return_dict else encoded["input_ids"]


def _named_tokens(settings: Any) -> dict[str, str] | None:
    """Special tokens that tokenizer_config.json names; None if it has settings that only transformers knows."""
    if settings.get("tokenizer_class") != "TokenizersBackend" or settings.get("clean_up_tokenization_spaces"):
        return None
    known = {*_NAMED, *_WITHOUT_EFFECT, "chat_template", "clean_up_tokenization_spaces"}
    named = {name: settings[name] for name in _NAMED if settings.get(name) is not None}
    if not (settings.keys() <= known and all(isinstance(token, str) for token in named.values())):
        return None
    return named


@lru_cache
def compiled(template: str) -> Any:
    """Compile a chat template in the environment that transformers has for it."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(style: str) -> str:
        return datetime.now().strftime(style)

    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment.from_string(template)
