"""Random agents: every trained token is a sampled token, exactly once and in the context in which it was sampled.

Agents of several episodes continue, retry, edit and compact their histories, start sub-agents, choose one of several
completions, and send replies back in the forms that clients use. Completions are random tokens, so tokenizing their
text again hardly ever gives the same tokens.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from byte_model import byte_tokenizer, qwen3
from conversation_fakes import SAMPLING, Forgetful, chat_template_renderer, user
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.rollout.renderer import Renderer
from titan_rl.rollout.types import Rollout, RolloutGroup
from titan_rl.serving.conversations.identity import identity_of
from titan_rl.serving.conversations.reply import reply_from
from titan_rl.serving.conversations.tree import Prompt, TurnNode
from titan_rl.serving.episode import Episode
from titan_rl.serving.episode_store import EpisodeStore
from titan_rl.training.data.packing import find_families
from titan_rl.training.data.sample_builder import build_samples
from titan_rl.types import Completion, FinishReason, VersionSpan

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
TEXTS = ["a", "b a", "sort: b, a", " a", ""]


@cache
def qwen3_of_the_package() -> Renderer:
    return qwen3(byte_tokenizer())


RENDERERS = {
    "chat template": (chat_template_renderer, range(5, 500)),
    "history-dependent": (Forgetful, range(33, 120)),
    "renderers package": (qwen3_of_the_package, range(265)),
}


@dataclass
class Asked:
    """Request of an agent, with its completions."""

    messages: list[Any]
    prompt: Prompt
    prompt_token_ids: list[int]  # as the engine got them
    choices: list[tuple[TurnNode, Completion]] = field(default_factory=list[tuple[TurnNode, Completion]])


@dataclass
class Conversation:
    """Conversation of a client: its messages, and the turn of the last reply if nothing was changed since."""

    messages: list[Any]
    tools: list[Any] | None
    last: TurnNode | None = None


class Agent:
    def __init__(
        self,
        episode: Episode,
        renderer: Renderer,
        vocabulary: range,
        data: st.DataObject,
        *,
        always_extends: bool,
    ) -> None:
        self.episode = episode
        self._renderer = renderer
        self.asked: list[Asked] = []
        self._vocabulary = vocabulary
        self._stop = renderer.get_stop_token_ids()[0]
        self._always_extends = always_extends
        self._draw = data.draw
        self._conversations: list[Conversation] = []
        self._waiting: list[tuple[Asked, Conversation]] = []

    def act(self) -> None:
        acts = [self._begin]
        if self._conversations:
            acts += [
                self._take_turns,
                self._take_turns,
                self._continue,
                self._ask_again,
                self._edit,
                self._compact,
                self._fork,
            ]
        if self._waiting:
            acts += [self._answer, self._answer]
        self._draw(st.sampled_from(acts))()

    def finish(self) -> None:
        while self._waiting:
            self._answer()

    def _begin(self) -> None:
        system = self._draw(st.sampled_from([[], [{"role": "system", "content": "Sort."}]]))
        conversation = Conversation([*system, self._user()], self._draw(st.sampled_from([None, TOOLS])))
        self._conversations.append(conversation)
        self._ask(conversation)

    def _take_turns(self) -> None:
        self.finish()
        conversation = self._one()
        for _ in range(self._draw(st.integers(1, 4))):
            self._say_more(conversation)
            self._answer()

    def _continue(self) -> None:
        self._say_more(self._one())

    def _say_more(self, conversation: Conversation) -> None:
        role = self._draw(st.sampled_from(["user", "user", "tool"]))
        new = [self._user() | {"role": role} for _ in range(self._draw(st.integers(1, 2)))]
        conversation.messages += new
        asked = self._ask(conversation)
        if conversation.last is not None and (asked.prompt.parent is not None or self._always_extends):
            assert asked.prompt.parent is not None
            assert identity_of(asked.prompt.parent.message).digest == identity_of(conversation.last.message).digest
        conversation.last = None

    def _ask_again(self) -> None:
        conversation = self._one()
        if conversation.messages[-1]["role"] == "assistant":
            conversation.messages.pop()
        conversation.last = None
        if conversation.messages:
            self._ask(conversation)

    def _edit(self) -> None:
        conversation = self._one()
        at = self._draw(st.integers(0, len(conversation.messages) - 1))
        conversation.messages[at] = {**conversation.messages[at], "content": self._draw(st.sampled_from(TEXTS))}
        conversation.last = None

    def _compact(self) -> None:
        conversation = self._one()
        keep = self._draw(st.integers(0, 2))
        conversation.messages = [user("in short: a"), *conversation.messages[len(conversation.messages) - keep :]]
        conversation.last = None

    def _fork(self) -> None:
        conversation = self._one()
        self._conversations.append(Conversation(list(conversation.messages), conversation.tools, conversation.last))

    def _ask(self, conversation: Conversation) -> Asked:
        prompt = self.episode.tree.prompt(conversation.messages, conversation.tools)
        asked = Asked(list(conversation.messages), prompt, list(prompt.token_ids))
        self._waiting.append((asked, conversation))
        return asked

    def _answer(self) -> None:
        """Answer one of the waiting requests, in any order. The client takes one of the completions."""
        place = self._draw(st.integers(0, len(self._waiting) - 1))
        asked, conversation = self._waiting.pop(place)
        self.asked.append(asked)
        for _ in range(self._draw(st.sampled_from([1, 1, 3]))):
            asked.choices.append(self._sample(asked, conversation.tools))
        turn, _ = self._draw(st.sampled_from(asked.choices))
        if conversation.messages == asked.messages:
            conversation.messages.append(self._as_clients_do(turn.message))
            conversation.last = turn

    def _sample(self, asked: Asked, tools: list[Any] | None) -> tuple[TurnNode, Completion]:
        ids = self._draw(st.lists(st.sampled_from(self._vocabulary), min_size=1, max_size=5))
        ends = self._draw(st.booleans())
        ids = [token for token in ids if token != self._stop] + [self._stop] * ends
        old = self._draw(st.integers(0, len(ids)))
        number = sum(len(each.choices) for each in self.asked)
        completion = Completion(
            f"{self.episode.id}/{number}",
            ids,
            [-(number + t / 10) for t in range(len(ids))],  # unique for every sampled token
            FinishReason.STOP if ends else FinishReason.LENGTH,
            [VersionSpan(1, old), VersionSpan(2, len(ids) - old)],
        )
        try:
            message = reply_from(
                self._renderer.parse_response(list(ids), tools=tools, prompt_ids=asked.prompt_token_ids)
            )
        except Exception:
            message = {"role": "assistant", "content": "cannot be parsed"}
        return self.episode.record(asked.prompt, completion, message, SAMPLING), completion

    def _as_clients_do(self, message: Any) -> dict[str, Any]:
        """Return the message in an equivalent form."""
        copy = json.loads(json.dumps({**message, "content": message["content"] or ""}))
        for change in self._draw(st.sets(st.sampled_from(["trim", "null", "drop reasoning"]))):
            if change == "trim":
                copy["content"] = copy["content"].strip()
            elif change == "null":
                copy |= {"refusal": None, "annotations": [], "function_call": None}
            else:
                copy.pop("reasoning_content", None)
        return copy

    def _one(self) -> Conversation:
        return self._draw(st.sampled_from(self._conversations))

    def _user(self) -> dict[str, Any]:
        return user(self._draw(st.sampled_from(TEXTS)))


def sampled(agent: Agent) -> Counter[tuple[int, float, int]]:
    return Counter(
        token
        for asked in agent.asked
        for _, each in asked.choices
        for token in zip(each.token_ids, each.logprobs, each.versions, strict=True)
    )


@pytest.mark.parametrize("name", RENDERERS)
@given(data=st.data())
@settings(max_examples=examples(100))
def test_trained_tokens_equal_sampled_tokens(name: str, data: st.DataObject) -> None:
    make_renderer, vocabulary = RENDERERS[name]

    async def talk() -> None:
        renderer = make_renderer()
        store = EpisodeStore(renderer)
        agents = [
            Agent(store.open(f"e{n}"), renderer, vocabulary, data, always_extends=name == "chat template")
            for n in range(2)
        ]
        for _ in range(data.draw(st.integers(2, 20))):
            data.draw(st.sampled_from(agents)).act()
        for agent in agents:
            agent.finish()
            agent.episode.end()
            check(agent)

    asyncio.run(talk())


def check(agent: Agent) -> None:
    own = set(agent.episode.tree.turns)
    assert own == {turn for asked in agent.asked for turn, _ in asked.choices}
    for asked in agent.asked:
        if (parent := asked.prompt.parent) is not None:
            assert parent in own
            before = parent.token_ids
            assert asked.prompt_token_ids[: len(before)] == before
        for turn, completion in asked.choices:
            assert turn.prompt_token_ids == asked.prompt_token_ids
            assert turn.completion == completion

    rollout = Rollout("g0/0", "g0", 0, None)
    agent.episode.fill_in(rollout)
    if not own:
        return
    rollout.advantage = 1.0
    assert rollout.messages[-1]["role"] == "assistant"
    samples = build_samples(RolloutGroup("g0", None, [rollout]))
    trained = Counter(
        (sample.token_ids[t], sample.behaviour_logprobs[t], sample.versions[t])
        for sample in samples
        for t in range(len(sample.token_ids))
        if sample.loss_mask[t]
    )
    assert trained == sampled(agent)
    assert len(samples) <= sum(not turn.children for turn in own)

    contexts = {
        sample.behaviour_logprobs[t]: tuple(sample.token_ids[: t + 1])
        for sample in samples
        for t in range(len(sample.token_ids))
        if sample.loss_mask[t]
    }
    for asked in agent.asked:
        for _, completion in asked.choices:
            for t, logprob in enumerate(completion.logprobs):
                assert contexts[logprob] == (*asked.prompt_token_ids, *completion.token_ids[: t + 1])

    packed = [sample for family in find_families(samples, 10_000) for sample in family.samples]
    assert sorted(map(id, packed)) == sorted(map(id, samples))
