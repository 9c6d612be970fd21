"""Chat templates of model families, with byte tokenizers that have the special tokens of each family.

Templates come from trl or are written here in the format of the family. For families not listed here no template is
installed, and the renderer is chosen when a model folder is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.byte_tokenizer import byte_tokenizer

_SPECIAL = re.compile(r"<[|｜][^<>'\"\s]+?[|｜]>|<(?:start|end)_of_turn>|\[/?[A-Z_]{3,}\]|\[gMASK\]|<sop>|</?s>")

MISTRAL = (
    "{{- bos_token -}}{%- set users = messages | selectattr('role', 'equalto', 'user') | list -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'user' -%}"
    "{%- if tools and m == users[-1] -%}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' -}}"
    "{%- endif -%}"
    "{{- '[INST]' + m.content + '[/INST]' -}}"
    "{%- elif m.role == 'tool' -%}"
    "{%- if m.tool_call_id | length != 9 -%}{{- raise_exception('Tool call IDs have 9 letters') -}}{%- endif -%}"
    "{{- '[TOOL_RESULTS]' + {'content': m.content, 'call_id': m.tool_call_id} | tojson + '[/TOOL_RESULTS]' -}}"
    "{%- elif m.tool_calls -%}{{- '[TOOL_CALLS][' -}}{%- for call in m.tool_calls -%}"
    "{{- {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson -}}"
    "{{- '' if loop.last else ', ' -}}{%- endfor -%}{{- ']' + eos_token -}}"
    "{%- elif m.role == 'assistant' -%}{{- m.content + eos_token -}}"
    "{%- endif -%}{%- endfor -%}"
)
"""Mistral's template, without a system message: tools are shown before the last user message."""

OLMO3 = (
    "{%- for m in messages -%}{{- '<|im_start|>' + ('environment' if m.role == 'tool' else m.role) + '\n' -}}"
    "{%- if loop.first and tools -%}{{- '<functions>' + tools | tojson + '</functions>' -}}{%- endif -%}"
    "{{- m.content or '' -}}"
    "{%- if m.tool_calls -%}{{- '<function_calls>' -}}{%- for call in m.tool_calls -%}"
    "{{- call.function.name + '(' -}}{%- for key, value in call.function.arguments | items -%}"
    "{{- key + '=' + value | tojson -}}{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}{%- endfor -%}{{- ')' -}}"
    "{%- if not loop.last -%}{{- '\n' -}}{%- endif -%}{%- endfor -%}{{- '</function_calls>' -}}{%- endif -%}"
    "{{- '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)

GLM4 = (
    "{{- '[gMASK]<sop>' -}}{%- if tools -%}{{- '<|system|>\n' + tools | tojson -}}{%- endif -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'tool' -%}{{- '<|observation|>\n' + m.content -}}"
    "{%- elif m.tool_calls -%}{%- for call in m.tool_calls -%}"
    "{{- '<|assistant|>' + call.function.name + '\n' + call.function.arguments | tojson -}}{%- endfor -%}"
    "{%- else -%}{{- '<|' + m.role + '|>\n' + m.content -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


@dataclass(frozen=True, slots=True)
class Chat:
    """Chat template of a family.

    Args:
        template: name of a file of trl, or the text of a template.
        eos: end of sequence of the tokenizer.
        stops: tokens in `eos_token_id` of generation_config.json.
        special: special tokens of the vocabulary that are missing from the template.
        folder: name of the model's folder.
    """

    template: str
    eos: str
    stops: Sequence[str]
    special: Sequence[str] = ()
    folder: str = "model"

    @property
    def is_installed(self) -> bool:
        """Whether the template is one of trl's."""
        return self.template.endswith(".jinja")

    @property
    def text(self) -> str:
        if not self.is_installed:
            return self.template
        found = find_spec("trl")
        assert found is not None
        assert found.origin is not None
        return (Path(found.origin).parent / "chat_templates" / self.template).read_text(encoding="utf-8")

    def write(self, parent: Path) -> Path:
        """Write a model's folder with the tokenizer, the template and a generation_config.json."""
        from transformers import AddedToken

        folder = parent / self.folder
        special = sorted({*_SPECIAL.findall(self.text), self.eos, *self.stops, *self.special})
        tokenizer = byte_tokenizer(self.text, special=special, eos=self.eos)
        tokenizer.bos_token = AddedToken(next((each for each in _FIRST if each in special), special[0]), special=True)
        tokenizer.save_pretrained(folder)
        stops: Any = tokenizer.convert_tokens_to_ids(list(self.stops))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}), encoding="utf-8")
        return folder


_FIRST = ("<bos>", "<s>", "<|begin_of_text|>", "<BOS_TOKEN>", "<｜begin▁of▁sentence｜>", "<|endoftext|>")

_QWEN = {"eos": "<|im_end|>", "stops": ("<|im_end|>", "<|endoftext|>")}
_GEMMA = {"eos": "<eos>", "stops": ("<eos>", "<end_of_turn>"), "special": ("<bos>",)}
_COHERE = {"eos": "<|END_OF_TURN_TOKEN|>", "stops": ("<|END_OF_TURN_TOKEN|>",), "special": ("<BOS_TOKEN>",)}
_MISTRAL = Chat(MISTRAL, "</s>", ("</s>",), ("<s>",))
_ARGUMENT_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_GLM = {"eos": "<|endoftext|>", "stops": ("<|endoftext|>", "<|user|>", "<|observation|>")}

CHATS: Mapping[str, Chat] = {
    "qwen2": Chat("qwen2_5.jinja", **_QWEN),
    "qwen3": Chat("qwen3.jinja", **_QWEN),
    "qwen3_moe": Chat("qwen3.jinja", **_QWEN),
    "llama": Chat(
        "llama3_2.jinja",
        "<|eot_id|>",
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        ("<|begin_of_text|>", "<|python_tag|>"),
    ),
    "gemma": Chat("gemma.jinja", **_GEMMA),
    "gemma2": Chat("gemma.jinja", **_GEMMA),
    "gemma3_text": Chat("gemma3.jinja", **_GEMMA),
    "phi3": Chat("phi3_5.jinja", "<|endoftext|>", ("<|end|>", "<|assistant|>", "<|endoftext|>")),
    "cohere": Chat("cohere.jinja", **_COHERE),
    "cohere2": Chat("cohere2.jinja", **_COHERE),
    "glm4_moe": Chat("glm4moe.jinja", **_GLM, special=("<|system|>", "<|assistant|>", *_ARGUMENT_TAGS)),
    "glm4": Chat(GLM4, **_GLM, special=("<|system|>", "<|assistant|>")),
    "deepseek_v3": Chat(
        "deepseekv3.jinja", "<｜end▁of▁sentence｜>", ("<｜end▁of▁sentence｜>",), ("<｜begin▁of▁sentence｜>",)
    ),
    "mistral": _MISTRAL,
    "mixtral": _MISTRAL,
    "olmo3": Chat(OLMO3, "<|im_end|>", ("<|im_end|>", "<|endoftext|>")),
}
"""Chats by `model_type`."""

GPT_OSS = Chat("gptoss.jinja", "<|return|>", ("<|return|>", "<|endoftext|>", "<|call|>"))
"""Refused as a template; GptOssRenderer needs a vocabulary file that the package openai_harmony downloads."""
