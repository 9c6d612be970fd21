"""Requests of Claude Code, made with Anthropic's client, with all the fields that it sends besides the conversation."""

from __future__ import annotations

from typing import Any

import anthropic
from byte_model import qwen3
from clients import CALL, TOKENIZER, anthropic_client, chat_server

BETAS = ["claude-code-20250219", "interleaved-thinking-2025-05-14", "context-management-2025-06-27"]
CACHED: Any = {"type": "ephemeral", "ttl": "1h"}
IDENTITY = "You are Claude Code, Anthropic's official CLI for Claude."
TOOLS: Any = [
    {
        "name": name,
        "description": f"{name} something.",
        "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {"at": {"type": "string"}},
            "required": ["at"],
            "additionalProperties": False,
        },
        **more,
    }
    for name, more in (("look", {}), ("Bash", {"eager_input_streaming": True}), ("Edit", {"cache_control": CACHED}))
]


def system(nonce: str) -> list[Any]:
    billing = f"x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={nonce};"
    texts = [(billing, {}), (IDENTITY, {"cache_control": CACHED}), ("\n\n# Tone", {"cache_control": CACHED})]
    return [{"type": "text", "text": text, **more} for text, more in texts]


def text(said: str, **more: Any) -> Any:
    return {"type": "text", "text": said, **more}


def asked(nonce: str, messages: list[Any]) -> dict[str, Any]:
    return {
        "model": "claude-opus-4-6",
        "max_tokens": 32_000,
        "system": system(nonce),
        "messages": messages,
        "tools": TOOLS,
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "medium"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": '{"device_id":"d","account_uuid":"","session_id":"s"}'},
        "betas": BETAS,
        "extra_body": {"return_token_ids": True, "temperature": 1},
    }


async def turn(client: anthropic.AsyncAnthropic, nonce: str, messages: list[Any]) -> tuple[Any, list[int], list[int]]:
    """Stream an answer. Returns the message, the tokens of the prompt, and the tokens of the completion."""
    async with client.beta.messages.stream(**asked(nonce, messages)) as stream:
        (extra,) = [event.model_extra async for event in stream if event.type == "message_delta"]
        return await stream.get_final_message(), extra["prompt_token_ids"], extra["token_ids"]


async def test_session_keeps_its_tokens_despite_a_changing_system_prompt() -> None:
    opening = {"role": "user", "content": [text("<system-reminder>today</system-reminder>"), text("look")]}
    answers = {
        "<system-reminder>today</system-reminder>look": "I look." + CALL,
        "<tool_response>\nclear\n</tool_response>": "Done.",
    }
    async with (
        chat_server(qwen3(TOKENIZER), answers=answers, any_model=True) as stage,
        anthropic_client(stage) as client,
    ):
        quota = await client.beta.messages.create(
            model="claude-haiku-4-5", max_tokens=1, messages=[{"role": "user", "content": "quota"}], metadata={}
        )
        assert (len(quota.content), quota.stop_reason) == (1, "max_tokens")
        counted = await client.beta.messages.count_tokens(
            model="claude-opus-4-6", messages=[opening], system=system("0"), tools=TOOLS, betas=BETAS
        )
        first, first_prompt, first_tokens = await turn(client, "36ee5", [opening])
        assert counted.input_tokens == first.usage.input_tokens + (first.usage.cache_read_input_tokens or 0)
        assert [block.type for block in first.content] == ["text", "tool_use"]
        call = first.content[1]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [text("clear")], "is_error": False}
        said = [
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]},
            {"role": "user", "content": [{**result, "cache_control": CACHED}]},
        ]
        second, second_prompt, _ = await turn(client, "0aaa9", [opening, *said])
    assert [block.type for block in second.content] == ["text"]
    assert second.content[0].text == "Done."
    before = [*first_prompt, *first_tokens]
    assert second_prompt[: len(before)] == before
    prompt = TOKENIZER.decode(second_prompt)
    assert IDENTITY in prompt
    assert "billing" not in prompt
