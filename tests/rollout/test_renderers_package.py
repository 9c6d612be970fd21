"""The `renderers` package works unchanged, and agrees with the chat-template renderer."""

from typing import Any

import pytest

from titan_rl import Completion, FinishReason, Message, MessageObservation, MessageStep, RolloutStatus, VersionSpan
from titan_rl.core.errors import DataError
from titan_rl.rollout.environment.messages import MessageTokenEnv
from titan_rl.rollout.renderer import ChatTemplateRenderer, Renderer

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

from byte_tokenizer import byte_tokenizer

renderers_qwen3 = pytest.importorskip("renderers.qwen3")
configs = pytest.importorskip("renderers.configs")

TEMPLATE = (  # Qwen3's without tools and with thinking off
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' -}}"
    "{%- if m.role == 'assistant' -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}"
    "{{- m.content + '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' -}}{%- endif -%}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer(TEMPLATE)


class Two:
    """Environment of two turns."""

    def __init__(self) -> None:
        self.heard: list[Message] = []

    async def reset(self) -> MessageObservation:
        return MessageObservation([{"role": "system", "content": "be brief"}, {"role": "user", "content": "a?"}])

    async def step(self, message: Message) -> MessageStep:
        self.heard.append(message)
        if len(self.heard) == 2:
            return MessageStep(status=RolloutStatus.COMPLETED)
        return MessageStep([{"role": "user", "content": "b?"}])

    async def close(self) -> None: ...


def completion(tokenizer: Any, text: str) -> Completion:
    ids = tokenizer.encode(text + "<|im_end|>", add_special_tokens=False)
    return Completion("r", ids, [0.0] * len(ids), FinishReason.STOP, (VersionSpan(0, len(ids)),))


async def play(tokenizer: Any, renderer: Renderer) -> tuple[list[list[int]], list[Message]]:
    env = Two()
    tokens = MessageTokenEnv(env, renderer)
    prompts = [list((await tokens.reset()).prompt_token_ids)]
    step = await tokens.step(completion(tokenizer, "yes"))
    assert step.prompt_token_ids is not None
    prompts.append(list(step.prompt_token_ids))
    assert (await tokens.step(completion(tokenizer, "no"))).status is RolloutStatus.COMPLETED
    return prompts, env.heard


async def test_renderer_of_the_package_gives_the_same_conversation(tokenizer: Any) -> None:
    package: Renderer = renderers_qwen3.Qwen3Renderer(tokenizer, configs.Qwen3RendererConfig(enable_thinking=False))
    own = ChatTemplateRenderer(tokenizer)
    prompts, heard = await play(tokenizer, package)
    assert heard == [{"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "no"}]
    assert (prompts, heard) == await play(tokenizer, own)
    assert set(own.get_stop_token_ids()) <= set(package.get_stop_token_ids())


async def test_error_of_a_renderer_that_drops_reasoning_names_the_setting(tokenizer: Any) -> None:
    package = renderers_qwen3.Qwen3Renderer(tokenizer, configs.Qwen3RendererConfig(enable_thinking=True))
    with pytest.raises(DataError, match="thinking_retention='all'"):
        await play(tokenizer, package)
