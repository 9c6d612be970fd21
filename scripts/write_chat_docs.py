"""Write docs/reference/chat.md from the chat templates in the tests: `python -m scripts.write_chat_docs`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.models.chats import CHATS, Chat
from tests.models.families import FAMILIES, model_type
from titan_rl.rollout.renderer.registry import ChatSupport, chat_support, choose_renderer
from titan_rl.rollout.renderer.tokenizer import load_tokenizer
from titan_rl.rollout.renderer.tool_calls import FORMATS

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "chat.md"

HEAD = """\
# Chats of model families

`model.renderer = "auto"` chooses the renderer of a model when its folder is read, in this order:

1. a renderer of the package [renderers](https://pypi.org/project/renderers/), if the folder has the name of a model
   that the package lists, also in the cache of the Hugging Face hub;
2. a renderer of the package that renders test conversations, with tools and without, exactly as the folder's chat
   template does;
3. `ChatTemplateRenderer`, which uses the chat template itself.

`titan-rl train --dry-run` shows the renderer and the reason, whether turns extend, the format of tool calls, and the
stop tokens.

**Turns.** No text is tokenized twice: each prompt begins with the tokens of the previous prompt and of the sampled
answer. `ChatTemplateRenderer` takes what follows an answer from two renderings with different answers. A template that
changes earlier messages when a new one is added cannot be used in this way. It is refused with the reason, by the dry
run and at the start of a run, unless every task is a `PromptTask` without tools and environment, or
`rollout.max_turns = 1`. Reasoning that a template drops from earlier turns stays in the prompts of a run. Mistral's
template shows tools before the last user's message only; here they stay where they were, and are shown again before
each further one.

**Tool calls.** `ChatTemplateRenderer` lets the template render the call `look_up(word="it", count=3)` and its result.
Calls are parsed if one of the [formats](#formats-of-tool-calls) reads exactly this call back, and if the result extends
the prompt. Otherwise a task with tools fails at its first reset, with the reason.

**Stop tokens** are those of the renderer, the tokenizer's end of sequence, the special token that closes an answer in
the template, and all tokens in `eos_token_id` of the folder's generation_config.json (of config.json if there is no
other), except words and parts of words.

## Families

The templates are those of real models, from the package trl, or where the last column says "written" a short one of the
same format. Tokenizers are of bytes, with the special tokens of the family. A model of the hub may have another
template, for which the rules above decide.

| family | renderer | turns extend | tool calls | stop tokens | template |
|---|---|---|---|---|---|
"""

OTHERS = """
`gpt_oss` writes several messages in an answer, the first of which would end it. `GptOssRenderer`, chosen by the names
of OpenAI's folders or set as `model.renderer = "renderers:GptOssRenderer"`, reads them. It needs a vocabulary file that
the package openai_harmony downloads, and is not part of these checks; its template is refused. `minimax_m2` has a
renderer of the package by the names of its folders. For these families no template is installed, and that of the
model's own folder decides:

{families}.

## Formats of tool calls

Formats that `ChatTemplateRenderer` parses, in the order in which they are tried. Line breaks are left out.

| format | example |
|---|---|
"""

END = """
This page is generated from `tests/models/chats.py` and `titan_rl/rollout/renderer/tool_calls.py` by
`scripts/write_chat_docs.py`.
"""


def page() -> str:
    """Make the text of the page."""
    rows = [row(name, chat) for name, chat in sorted(CHATS.items())]
    known = {*CHATS, "gpt_oss", "minimax_m2"}
    others = sorted({model_type(name) for name in FAMILIES} - known)
    formats = [f"| {each.name} | `{_in_table(each.example)}` |\n" for each in FORMATS]
    return "".join([HEAD, *rows, OTHERS.format(families=", ".join(f"`{name}`" for name in others)), *formats, END])


def row(family: str, chat: Chat) -> str:
    support = support_of(chat)
    extends = f"{'yes' if support.extends else 'no'}: {support.extension}"
    calls = f"yes: {support.tool_calls}" if support.tool_calls else f"no: {support.tool_problem}"
    stops = " ".join(f"`{_in_table(each)}`" for each in support.stop_tokens)
    template = chat.template if chat.is_installed else "written"
    return f"| `{family}` | {support.renderer} | {extends} | {calls} | {stops} | {template} |\n"


def support_of(chat: Chat) -> ChatSupport:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(chat.write(Path(folder)))
        return chat_support(tokenizer, choose_renderer(tokenizer))


def _in_table(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
