"""An agent written with an OpenAI client."""

from typing import Any

import openai


class Agent:
    """A multi-turn chat program that knows only its OpenAI client."""

    def __init__(self, client: openai.AsyncOpenAI, number: int) -> None:
        self._client = client
        self._questions = [f"Sort: {number} b a", f"And {number}?", "Why?", "Again!"]
        self.answers: list[str] = []
        self.token_ids: list[list[int]] = []  # prompt and completion of each turn
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
            answer, prompt, sampled = "", list[int](), list[int]()
            async for event in stream:
                (choice,) = event.choices
                answer += choice.delta.content or ""
                prompt += getattr(event, "prompt_token_ids", None) or []
                sampled += getattr(choice, "token_ids", None) or []
                self.versions |= {span["version"] for span in getattr(choice, "weight_versions", None) or ()}
            assert choice.finish_reason == "length"
            messages.append({"role": "assistant", "content": answer})
            self.answers.append(answer)
            self.sampled.append(sampled)
            self.token_ids.append(prompt + sampled)
        return self.answers
