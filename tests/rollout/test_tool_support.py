"""Renderers that do not show tools, or do not parse their calls, fail the first reset."""

from types import SimpleNamespace
from typing import Any

import pytest

from titan_rl.core.errors import ModelError
from titan_rl.rollout.environment.messages import MessageTokenEnv
from titan_rl.tasks import ToolEnv


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


class TextRenderer:
    """Renderer with a token for each character. Calls are written as `!name`, and parsed if `reads` is set."""

    def __init__(self, *, shows: bool = True, reads: bool = True) -> None:
        self.shows, self.reads, self.asked = shows, reads, 0

    def render_ids(self, messages: list[Any], *, tools: Any = None, add_generation_prompt: bool = False) -> list[int]:
        self.asked += 1
        text = "with tools;" if tools and self.shows else ""
        for message in messages:
            calls = "".join(f"!{call['function']['name']}" for call in message.get("tool_calls", ()))
            text += f"{message['role']}:{message['content']}{calls};"
        return [*map(ord, text + "assistant:" * add_generation_prompt)]

    def parse_response(self, token_ids: list[int], *, tools: Any = None, prompt_ids: Any = None) -> Any:
        text = "".join(map(chr, token_ids))
        calls = [SimpleNamespace(name=text, arguments={}, status="ok", id=None)] if "!" in text and self.reads else []
        return SimpleNamespace(content=text, reasoning_content=None, reasoning_complete=True, tool_calls=calls)

    def get_stop_token_ids(self) -> list[int]:
        return [0]

    def bridge_to_next_turn(self, prompt: Any, completion: Any, new: Any, *, tools: Any = None) -> Any: ...


async def test_renderer_with_tool_support_is_checked_once() -> None:
    renderer = TextRenderer()
    for _ in range(2):
        observation = await MessageTokenEnv(ToolEnv("1 + 1?", add), renderer).reset()
        asked, renderer.asked = renderer.asked, 0
    assert (asked, bytes(observation.prompt_token_ids)) == (1, b"with tools;user:1 + 1?;assistant:")


@pytest.mark.parametrize(
    ("renderer", "problem"),
    [
        (TextRenderer(shows=False), "TextRenderer does not show the model the environment's 1 tools"),
        (TextRenderer(reads=False), "TextRenderer does not parse tool calls, but the environment has 1 tools"),
    ],
)
async def test_renderer_without_tool_support_fails_the_reset_with_the_fix(renderer: TextRenderer, problem: str) -> None:
    with pytest.raises(ModelError, match=rf'{problem}; set model.renderer = "auto"'):
        await MessageTokenEnv(ToolEnv("1 + 1?", add), renderer).reset()
    await MessageTokenEnv(ToolEnv("1 + 1?"), renderer).reset()


async def test_renderer_that_declares_no_tool_support_is_believed() -> None:
    renderer: Any = TextRenderer()
    renderer.reads_tool_calls = False
    with pytest.raises(ModelError, match="does not parse tool calls"):
        await MessageTokenEnv(ToolEnv("1 + 1?", add), renderer).reset()
