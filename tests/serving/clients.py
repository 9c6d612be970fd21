"""Server of a scripted policy with known answers, and the official clients connected to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
from byte_model import VOCAB, byte_tokenizer, script
from served import Served, served

from titan_rl.rollout.renderer import ChatTemplateRenderer
from titan_rl.serving.http.exchange import ServerLimits
from titan_rl.serving.server import serve

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "ü"}}\n</tool_call>'
TOKENIZER = byte_tokenizer()
ANSWERS = {
    "hi": "  Grüße, 世界 🎉!\n",
    "think": "<think>\nhm\n</think>\n\nyes",
    "look": "I look." + CALL,
    "broken": 'So <tool_call>\n{"name": \n</tool_call>',
    "sky": "blue",
    "count": "1, 2, 3, stop, 4",
}


@asynccontextmanager
async def chat_server(
    renderer: Any = None,
    *,
    answers: dict[str, str] | None = None,
    engine: dict[str, Any] | None = None,
    **app: Any,
) -> AsyncIterator[Served]:
    """Serve two engines that give the answers of `ANSWERS`.

    Args:
        engine: Settings of `ScriptedEngine`.
        app: Settings of `make_app`.
    """
    known = answers or ANSWERS

    def answer(asked: str) -> str:
        return known.get(asked, f"you said {asked}")

    async with served(
        engine={"script": script(TOKENIZER, answer), "vocab_size": VOCAB, "max_context": 2048, **(engine or {})},
        **{
            "limits": ServerLimits(request_s=30.0),
            "max_context": 2048,
            "tokenizer": TOKENIZER,
            "renderer": renderer or ChatTemplateRenderer(TOKENIZER),
            **app,
        },
    ) as stage:
        yield stage


@asynccontextmanager
async def openai_client(stage: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serve(stage.app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@asynccontextmanager
async def anthropic_client(stage: Served) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with (
        serve(stage.app) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        yield client
