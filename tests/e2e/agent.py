"""An agent as others write them."""

from typing import Any

import openai


class Agent:
    """A program with an openai client that asks, and asks again, and knows of nothing else."""

    def __init__(self, client: openai.AsyncOpenAI, number: int) -> None:
        self._client = client
        self._questions = [f"Sort: {number} b a", f"And {number}?", "Why?", "Again!"]
        self.said: list[str] = []
        self.token_ids: list[list[int]] = []  # of each turn: prompt and completion
        self.sampled: list[list[int]] = []
        self.versions: set[str] = set()

    async def run(self) -> list[str]:
        messages: list[dict[str, str]] = []
        for question in self._questions:
            messages.append({"role": "user", "content": question})
            stream: Any = await self._client.chat.completions.create(
                model="policy",
                messages=messages,  # pyright: ignore[reportArgumentType]
                max_tokens=40,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            said, prompt, sampled = "", list[int](), list[int]()
            async for event in stream:
                (choice,) = event.choices
                said += choice.delta.content or ""
                prompt += getattr(event, "prompt_token_ids", None) or []
                sampled += getattr(choice, "token_ids", None) or []
                self.versions |= {span["version"] for span in getattr(choice, "weight_versions", None) or ()}
            assert choice.finish_reason == "length"
            messages.append({"role": "assistant", "content": said})
            self.said.append(said)
            self.sampled.append(sampled)
            self.token_ids.append(prompt + sampled)
        return self.said
