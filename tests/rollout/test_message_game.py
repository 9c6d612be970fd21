"""Games in chat messages: each seat has its own conversation, whose prompts only grow."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer

from titan_rl import (
    ChatTemplateRenderer,
    Completion,
    FinishReason,
    Message,
    MessageGame,
    MessagePlayer,
    MessageSeat,
    Player,
    Rollouter,
    RolloutGroup,
    RolloutStatus,
    Rubric,
    SamplingParams,
    SeatOutError,
    TokenPlayer,
    VersionSpan,
    env_reward,
)

Seats = Mapping[str, MessageSeat]
Course = Callable[[Seats], Awaitable[None]]


class Renderer(ChatTemplateRenderer):
    """Renderer that parses everything except `MUMBLED`."""

    def parse_response(self, token_ids: list[int], **kwargs: Any) -> Any:
        parsed = super().parse_response(token_ids, **kwargs)
        if parsed.content == MUMBLED:
            raise ValueError("what?")
        return parsed


MUMBLED = "mumble"


@pytest.fixture(scope="module")
def renderer() -> ChatTemplateRenderer:
    return Renderer(byte_tokenizer())


def user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


class Talk:
    def __init__(self, course: Course) -> None:
        self._course = course
        self.closed = False

    async def play_seats(self, seats: Seats) -> None:
        await self._course(seats)

    async def close(self) -> None:
        self.closed = True


class Speaker:
    """`GenerateFn` that answers with the request id, or with the value of `says` for its suffix."""

    def __init__(self, renderer: ChatTemplateRenderer, says: Mapping[str, Any] | None = None) -> None:
        self.prompts: dict[str, list[int]] = {}
        self.sampling: dict[str, SamplingParams] = {}
        self._renderer = renderer
        self._says = says or {}

    def tokens(self, text: str) -> list[int]:
        asked: list[Any] = [{"role": "user", "content": "?"}]
        before = self._renderer.render_ids(asked, add_generation_prompt=True)
        whole = self._renderer.render_ids([*asked, {"role": "assistant", "content": text}])
        (stop,) = self._renderer.get_stop_token_ids()
        said = whole[len(before) :]
        return said[: said.index(stop) + 1]

    async def __call__(
        self, prompt_token_ids: Sequence[int], *, request_id: str, session_id: Any = None, sampling: SamplingParams
    ) -> Completion:
        self.prompts[request_id], self.sampling[request_id] = list(prompt_token_ids), sampling
        await asyncio.sleep(0)
        said = next((said for end, said in self._says.items() if request_id.endswith(end)), request_id)
        reason = FinishReason.STOP
        tokens = self.tokens(str(said))
        if said is FinishReason.LENGTH:
            tokens, reason = tokens[:3], FinishReason.LENGTH
        return Completion(request_id, tokens, [-0.1] * len(tokens), reason, [VersionSpan(0, len(tokens))])


async def play(
    course: Course,
    renderer: ChatTemplateRenderer,
    generate: Any,
    players: Mapping[str, Player] | None = None,
    size: int = 1,
) -> RolloutGroup:
    seats: Mapping[str, Player] = players or {"a": "policy", "b": "policy"}
    rollouter = Rollouter(
        lambda sample: MessageGame(Talk(course), renderer, seats), Rubric([env_reward("won")]), max_context=4096
    )
    return await rollouter.run_group(
        generate, None, group_id="g", group_size=size, sampling=SamplingParams(max_tokens=64)
    )


async def back_and_forth(seats: Seats) -> None:
    heard = "begin"
    for _ in range(2):
        for seat in seats.values():
            heard = str((await seat.ask(user(heard)))["content"])
    for seat in seats.values():
        seat.tell(user("over"))
        seat.reward("won", 1.0)


async def test_each_seat_has_its_own_conversation_and_its_prompts_only_grow(renderer: ChatTemplateRenderer) -> None:
    speaker = Speaker(renderer)
    a, b = (await play(back_and_forth, renderer, speaker)).rollouts
    assert [message["content"] for message in a.messages] == ["begin", "g/0/a/0", "g/0/b/0", "g/0/a/1", "over"]
    assert [message["content"] for message in b.messages] == ["g/0/a/0", "g/0/b/0", "g/0/a/1", "g/0/b/1", "over"]
    for rollout in (a, b):
        first, second = rollout.turns
        so_far = [*first.prompt_token_ids, *first.completion.token_ids]
        assert list(second.prompt_token_ids[: len(so_far)]) == so_far
        assert list(second.prompt_token_ids) == renderer.render_ids(
            list(rollout.messages[:3]), add_generation_prompt=True
        )


async def test_told_messages_precede_the_next_question(renderer: ChatTemplateRenderer) -> None:
    async def told(seats: Seats) -> None:
        seats["a"].tell(user("b is late"))
        await seats["a"].ask(user("go on"))
        seats["a"].reward("won", 0.0)

    a, b = (await play(told, renderer, Speaker(renderer))).rollouts
    assert [message["content"] for message in a.messages] == ["b is late", "go on", "g/0/a/0"]
    assert (b.status, b.messages) == (RolloutStatus.UNDECIDED, [])


@pytest.mark.parametrize(
    ("said", "status"), [(FinishReason.LENGTH, RolloutStatus.TRUNCATED_LENGTH), (MUMBLED, RolloutStatus.ERROR_PARSE)]
)
async def test_unreadable_answer_takes_its_seat_out_of_the_game(
    renderer: ChatTemplateRenderer, said: Any, status: RolloutStatus
) -> None:
    generate = Speaker(renderer, {"a/1": said})
    a, b = (await play(back_and_forth, renderer, generate)).rollouts
    assert (a.status, b.status) == (status, RolloutStatus.UNDECIDED)
    assert [len(rollout.turns) for rollout in (a, b)] == [2, 1]

    async def forfeit(seats: Seats) -> None:
        try:
            await back_and_forth(seats)
        except SeatOutError as out:
            (other,) = (seat for seat in seats.values() if seat.name != out.seat)
            other.reward("won", 1.0)

    a, b = (await play(forfeit, renderer, generate)).rollouts
    assert (a.status, b.status, b.reward) == (status, RolloutStatus.COMPLETED, 1.0)


async def test_scripts_receive_messages_and_frozen_policies_receive_tokens(
    renderer: ChatTemplateRenderer,
) -> None:
    heard: list[list[object]] = []

    async def script(messages: Sequence[Message]) -> str:
        heard.append([message["content"] for message in messages])
        return f"s{len(heard)}"

    frozen = Speaker(renderer, {"0": "f0", "1": "f1"})
    players: dict[str, Player] = {
        "a": "policy",
        "b": MessagePlayer(script),
        "c": TokenPlayer(frozen, temperature=0.5),
    }
    (a,) = (await play(back_and_forth, renderer, Speaker(renderer, {"0": "p0", "1": "p1"}), players)).rollouts
    assert [message["content"] for message in a.messages] == ["begin", "p0", "f0", "p1", "over"]
    assert heard == [["p0"], ["p0", "s1", "p1"]]
    assert list(frozen.prompts) == ["g/0/c/0", "g/0/c/1"]
    assert {sampling.temperature for sampling in frozen.sampling.values()} == {0.5}
    conversation: list[Any] = [*user("s1"), {"role": "assistant", "content": "f0"}, *user("s2")]
    assert frozen.prompts["g/0/c/1"] == renderer.render_ids(conversation, add_generation_prompt=True)


async def test_players_may_differ_by_sibling(renderer: ChatTemplateRenderer) -> None:
    silent = MessagePlayer(lambda messages: "")

    def of_sibling(sibling: int) -> Mapping[str, Player]:
        return {"a": "policy", "b": silent} if sibling % 2 else {"a": silent, "b": "policy"}

    rollouter = Rollouter(
        lambda sample: MessageGame(Talk(back_and_forth), renderer, of_sibling),
        Rubric([env_reward("won")]),
        max_context=4096,
    )
    group = await rollouter.run_group(
        Speaker(renderer), None, group_id="g", group_size=4, sampling=SamplingParams(max_tokens=64)
    )
    assert [rollout.rollout_id for rollout in group.rollouts] == ["g/0/b", "g/1/a", "g/2/b", "g/3/a"]
    assert {seat: len(rollouts) for seat, rollouts in group.by_seat.items()} == {"b": 2, "a": 2}
