"""`MessageTokenEnv`: prompts that only grow, and invalid messages."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from titan_rl import (
    Completion,
    FinishReason,
    Message,
    MessageObservation,
    MessageStep,
    Rollout,
    RolloutStatus,
    Rubric,
    SamplingParams,
    TokenEnv,
    TokenObservation,
    VersionSpan,
    env_reward,
)
from titan_rl.core.errors import DataError
from titan_rl.rollout.environment.messages import MessageTokenEnv
from titan_rl.rollout.group.rollouter import Rollouter
from titan_rl.rollout.settings import RolloutConfig

STOP = 0


class LetterRenderer:
    """Renderer with a token for each character, a stop token, `|` after each message, and `#` first if there are tools.
    Records the rendered messages."""

    def __init__(self) -> None:
        self.rendered: list[Message] = []
        self.threads: list[int] = []

    def _ids(self, messages: Sequence[Message]) -> list[int]:
        self.rendered += messages
        self.threads.append(threading.get_ident())
        return [ord(c) for message in messages for c in f"{message['content']}|"]

    def render_ids(self, messages: list[Any], *, tools: Any = None, add_generation_prompt: bool = False) -> list[int]:
        return [ord("#")] * bool(tools) + self._ids(messages) + [ord(">")] * add_generation_prompt

    def parse_response(self, token_ids: list[int], *, tools: Any = None, prompt_ids: Any = None) -> Any:
        text = "".join(chr(i) for i in token_ids if i != STOP)
        if "?" in text:
            raise ValueError("unreadable")
        calls = [SimpleNamespace(id="c1", name="look", arguments={"x": 1}, status="ok")] if "!" in text else []
        calls += [SimpleNamespace(id="c2", name="fly", arguments={}, status="unknown_tool")] if "^" in text else []
        calls += [SimpleNamespace(id=None, name=None, arguments=None, status="invalid_json")] if "{" in text else []
        return SimpleNamespace(
            content=text,
            reasoning_content="hm" if "~" in text else None,
            reasoning_complete="<" not in text,
            tool_calls=calls,
        )

    def get_stop_token_ids(self) -> list[int]:
        return [STOP]

    def bridge_to_next_turn(
        self, prompt: list[int], completion: list[int], new: list[Any], *, tools: Any = None
    ) -> Any:
        return SimpleNamespace(token_ids=[*prompt, *completion, *self._ids(new), ord(">")])


@dataclass
class Talk:
    """Environment that says "more" until the policy has answered `turns` times."""

    turns: int = 1
    heard: list[Message] = field(default_factory=list[Message])
    closed: int = 0

    async def reset(self) -> MessageObservation:
        return MessageObservation([{"role": "user", "content": "go"}])

    async def step(self, message: Message) -> MessageStep:
        self.heard.append(message)
        if len(self.heard) == self.turns:
            return MessageStep([{"role": "user", "content": "bye"}], RolloutStatus.COMPLETED, {"turns": self.turns})
        return MessageStep([{"role": "user", "content": "more"}], rewards={"so_far": 1.0})

    async def close(self) -> None:
        self.closed += 1


def completion(text: str, reason: FinishReason = FinishReason.STOP) -> Completion:
    ids = [*map(ord, text), *([STOP] if reason is FinishReason.STOP else [])]
    return Completion("r", ids, [-1.0] * len(ids), reason, (VersionSpan(0, len(ids)),))


async def test_prompts_grow_by_the_completion_without_rerendering() -> None:
    talk, renderer = Talk(turns=3), LetterRenderer()
    env: TokenEnv = MessageTokenEnv(talk, renderer)
    assert isinstance(env, TokenEnv)
    observation = await env.reset()
    assert observation.messages == [{"role": "user", "content": "go"}]
    prompt = observation.prompt_token_ids
    for text in ("a", "b"):
        answer = completion(text)
        step = await env.step(answer)
        assert step.status is None
        assert step.prompt_token_ids is not None
        assert list(step.prompt_token_ids) == [*prompt, *answer.token_ids, *map(ord, "more|>")]
        assert step.rewards == {"so_far": 1.0}
        assert step.messages == [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
        prompt = step.prompt_token_ids
    last = await env.step(completion("c"))
    assert (last.status, last.prompt_token_ids, last.rewards) == (RolloutStatus.COMPLETED, None, {"turns": 3})
    assert [m["content"] for m in last.messages] == ["c", "bye"]
    assert [m["content"] for m in renderer.rendered] == ["go", "more", "more"]
    await env.close()
    assert talk.closed == 1


@pytest.mark.parametrize(
    ("text", "reason", "status", "said"),
    [
        ("?", FinishReason.STOP, RolloutStatus.ERROR_PARSE, []),
        ("{", FinishReason.STOP, RolloutStatus.ERROR_PARSE, ["{"]),
        ("<", FinishReason.STOP, RolloutStatus.ERROR_PARSE, ["<"]),
        ("ab", FinishReason.LENGTH, RolloutStatus.TRUNCATED_LENGTH, ["ab"]),
        ("<", FinishReason.LENGTH, RolloutStatus.TRUNCATED_LENGTH, ["<"]),
        ("?", FinishReason.LENGTH, RolloutStatus.TRUNCATED_LENGTH, []),
    ],
)
async def test_bad_completion_ends_the_rollout_before_the_environment_sees_it(
    text: str, reason: FinishReason, status: RolloutStatus, said: list[str]
) -> None:
    talk = Talk()
    env = MessageTokenEnv(talk, LetterRenderer())
    await env.reset()
    step = await env.step(completion(text, reason))
    assert step.status is status
    assert [m["content"] for m in step.messages] == said
    assert talk.heard == []


async def test_reasoning_and_tool_calls_reach_the_environment() -> None:
    talk = Talk()
    env = MessageTokenEnv(talk, LetterRenderer())
    await env.reset()
    await env.step(completion("~!", FinishReason.TOOL_CALLS))
    assert talk.heard == [
        {
            "role": "assistant",
            "content": "~!",
            "reasoning_content": "hm",
            "tool_calls": [{"type": "function", "id": "c1", "function": {"name": "look", "arguments": {"x": 1}}}],
        }
    ]


class DictCalls(LetterRenderer):
    def parse_response(self, token_ids: list[int], *, tools: Any = None, prompt_ids: Any = None) -> Any:
        call = {"type": "function", "function": {"name": "look", "arguments": "{}"}}
        return SimpleNamespace(content="", reasoning_content=None, reasoning_complete=None, tool_calls=[call])


async def test_tool_calls_of_the_wrong_type_are_a_renderer_error() -> None:
    env = MessageTokenEnv(Talk(), DictCalls())
    await env.reset()
    with pytest.raises(
        TypeError, match=r"returned {'type': 'function'.* an object with name, arguments, status and id"
    ):
        await env.step(completion("a"))


async def test_call_of_an_unknown_tool_reaches_the_environment() -> None:
    talk = Talk()
    env = MessageTokenEnv(talk, LetterRenderer())
    await env.reset()
    assert (await env.step(completion("^"))).status is RolloutStatus.COMPLETED
    assert talk.heard[0]["tool_calls"][0]["function"]["name"] == "fly"


@pytest.mark.parametrize("bridged", [None, SimpleNamespace(token_ids=[1, 2, 3])])
async def test_renderer_that_rerenders_the_past_is_an_error(bridged: Any) -> None:
    renderer = LetterRenderer()
    renderer.bridge_to_next_turn = lambda *_, **__: bridged  # pyright: ignore
    env = MessageTokenEnv(Talk(turns=2), renderer)
    await env.reset()
    with pytest.raises(DataError, match="LetterRenderer cannot extend this conversation"):
        await env.step(completion("a"))


async def test_environment_cannot_modify_the_recorded_message() -> None:
    class Meddling(Talk):
        async def step(self, message: Any) -> MessageStep:
            step = await super().step(dict(message))
            message["content"] = "changed"
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"]["x"] = 99
            return step

    env = MessageTokenEnv(Meddling(), LetterRenderer())
    await env.reset()
    step = await env.step(completion("look!"))
    assert step.messages[0]["content"] == "look!"
    assert step.messages[0]["tool_calls"][0]["function"]["arguments"] == {"x": 1}


async def test_lone_surrogate_is_rendered_as_a_replacement_character() -> None:
    class Echo(Talk):
        async def step(self, message: Message) -> MessageStep:
            return MessageStep([{"role": "tool", "content": "no city \ud83d"}])

    renderer = LetterRenderer()
    env = MessageTokenEnv(Echo(), renderer)
    await env.reset()
    step = await env.step(completion("a"))
    assert step.messages[1]["content"] == "no city \ud83d"
    assert renderer.rendered[-1]["content"] == "no city \ufffd"


HUGE = 10_000_000
TOO_LONG = "Verbose returned messages of 10,000,000 characters, which cannot fit into max_context = 256 tokens"


@dataclass
class Verbose(Talk):
    """Environment that says `opening` at its reset, and `more` after each answer."""

    opening: Any = "go"
    more: Any = "more"

    async def reset(self) -> MessageObservation:
        return MessageObservation([{"role": "user", "content": self.opening}])

    async def step(self, message: Message) -> MessageStep:
        return MessageStep([{"role": "user", "content": self.more}], rewards={"so_far": 1.0})


async def played(env: Verbose, renderer: LetterRenderer, max_context: int = 256) -> Rollout:
    async def say(prompt_token_ids: Sequence[int], *, request_id: str, **_: Any) -> Completion:
        return replace(completion("hi"), request_id=request_id)

    rubric = Rubric([env_reward("so_far")])
    make_env = lambda _: MessageTokenEnv(env, renderer)  # noqa: E731  # pyright: ignore
    rollouter = Rollouter(make_env, rubric, max_context=max_context, limits=RolloutConfig(max_turns=2))
    sampling = SamplingParams(max_tokens=8)
    return (await rollouter.run_group(say, None, group_id="g", group_size=1, sampling=sampling)).rollouts[0]


@pytest.mark.parametrize("huge", ["x" * HUGE, [{"type": "text", "text": "x" * HUGE}]])
async def test_messages_too_long_for_the_context_are_not_tokenized(huge: Any) -> None:
    renderer = LetterRenderer()
    rollout = await played(Verbose(more=huge), renderer)
    assert rollout.status is RolloutStatus.TRUNCATED_PROMPT
    assert rollout.error == TOO_LONG
    assert [message["content"] for message in renderer.rendered] == ["go"]
    assert (rollout.reward, len(rollout.turns)) == (1.0, 1)


async def test_opening_too_long_for_the_context_is_not_tokenized() -> None:
    renderer = LetterRenderer()
    rollout = await played(Verbose(opening="x" * HUGE), renderer)
    assert rollout.status is RolloutStatus.TRUNCATED_PROMPT
    assert rollout.error == TOO_LONG
    assert (renderer.rendered, rollout.turns, rollout.reward) == ([], [], None)


async def test_only_the_beginning_of_a_text_that_cannot_fit_is_tokenized() -> None:
    renderer = LetterRenderer()
    rollout = await played(Verbose(more="x" * 1_000_000), renderer, max_context=10_000)
    assert rollout.status is RolloutStatus.TRUNCATED_PROMPT
    assert [len(message["content"]) for message in renderer.rendered] == [2, 80_000]
    renderer = LetterRenderer()
    rollout = await played(Verbose(more="x" * 99_000), renderer, max_context=100_000)
    assert rollout.status is RolloutStatus.TRUNCATED_TURNS


async def test_long_text_is_tokenized_off_the_event_loop() -> None:
    renderer = LetterRenderer()
    rollout = await played(Verbose(more="x" * 30_000), renderer, max_context=100_000)
    assert rollout.status is RolloutStatus.TRUNCATED_TURNS
    opening, *others = renderer.threads
    assert opening == threading.get_ident()
    assert threading.get_ident() not in others


async def test_oversized_token_prompt_is_refused_without_being_read() -> None:
    class Unread(Sequence[int]):
        def __len__(self) -> int:
            return HUGE

        def __getitem__(self, place: Any) -> Any:
            raise AssertionError("the tokens must not be read")

    class Tokens:
        async def reset(self) -> TokenObservation:
            return TokenObservation(Unread())

        async def step(self, completion: Completion) -> Any: ...

        async def close(self) -> None: ...

    rollouter = Rollouter(lambda _: Tokens(), Rubric([env_reward("x")]), max_context=256)
    group = await rollouter.run_group(
        None,  # pyright: ignore[reportArgumentType]  nothing is requested
        None,
        group_id="g",
        group_size=1,
        sampling=SamplingParams(max_tokens=8),
    )
    assert group.rollouts[0].status is RolloutStatus.TRUNCATED_PROMPT
    assert group.rollouts[0].error == "the prompt of turn 0 has 10000000 tokens, max_context is 256"


@pytest.mark.parametrize("lacks", ["reset", "step", "close"])
def test_environment_with_a_missing_method_is_rejected(lacks: str) -> None:
    methods: dict[str, Any] = {name: lambda self: None for name in ("reset", "step", "close") if name != lacks}
    env: Any = type("HalfEnv", (), methods)()
    with pytest.raises(TypeError, match=rf"HalfEnv has no method {lacks}; .*: reset, step and close"):
        MessageTokenEnv(env, LetterRenderer())
