"""Invalid values and errors of user code fail one rollout, or nothing at all."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from background import HANG_S
from stage import Env, Generator, Stage

from titan_rl import (
    Completion,
    FinishReason,
    GroupReward,
    MessageObservation,
    MessageStep,
    Reward,
    Rollout,
    RolloutStatus,
    Rubric,
    TokenObservation,
    TokenStep,
    VersionSpan,
)
from titan_rl.rollout.group.running_groups import RunningGroups
from titan_rl.rollout.rewards.reward import env_reward
from titan_rl.rollout.settings import RolloutConfig
from titan_rl.training.data.sample_builder import build_samples

GOOD = Completion("r", [5, 6], [-0.5, -0.1], FinishReason.STOP, (VersionSpan(3, 2),))

BAD_ANSWERS: dict[str, tuple[Callable[[], Any], str]] = {
    "None": (lambda: None, "generate returned NoneType; it must return a Completion"),
    "text": (lambda: "hi", "generate returned str; it must return a Completion"),
    "metrics of text": (lambda: replace(GOOD, metrics={"interrupted_s": "long"}), "metrics['interrupted_s'] is 'long'"),
    "metrics of None": (lambda: replace(GOOD, metrics=None), "Completion.metrics is None"),
    "request id of None": (lambda: replace(GOOD, request_id=None), "Completion.request_id is None"),
    "a metric that is no number": (
        lambda: replace(GOOD, metrics={"interrupted_s": float("nan")}),
        "generate returned metrics['interrupted_s'] = nan; it must be finite",
    ),
    "a logprob of minus infinity": (
        lambda: replace(GOOD, logprobs=[-0.5, float("-inf")]),
        "generate returned a logprob of -inf; each must be finite",
    ),
    "tokens of text": (
        lambda: replace(GOOD, token_ids=["a", "b"]),
        "the completion has 'a' at 0; token ids are integers",
    ),
    "logprobs of text": (lambda: replace(GOOD, logprobs=[-0.5, "x"]), "a logprob of 'x'; each must be a number"),
    "a positive logprob": (
        lambda: replace(GOOD, logprobs=[-0.5, 0.5]),
        "generate returned a logprob of 0.5; each must be finite and at most 0",
    ),
    "True as a token": (
        lambda: replace(GOOD, token_ids=[5, True]),
        "the completion has True at 1; token ids are integers",
    ),
    "a huge token": (lambda: replace(GOOD, token_ids=[5, 10**30]), "the completion has token 1000000"),
    "a negative span": (
        lambda: replace(GOOD, version_spans=(VersionSpan(0, 3), VersionSpan(1, -1))),
        "VersionSpan.num_tokens is -1; it must be an integer of at least 0",
    ),
    **{
        f"version {version}": (
            lambda version=version: replace(GOOD, version_spans=(VersionSpan(version, 2),)),
            f"VersionSpan.version is {version!r}; it must be an integer of at least 0",
        )
        for version in (None, "a", 1.5, float("nan"), 10**30, -1)
    },
    "more tokens than requested": (
        lambda: replace(GOOD, token_ids=[5] * 99, logprobs=[0.0] * 99, version_spans=(VersionSpan(3, 99),)),
        "generate returned 99 tokens; it must be at most sampling.max_tokens = ",
    ),
    "a reason as text": (
        lambda: replace(GOOD, finish_reason="stop"),
        "it must be a FinishReason",
    ),
}


@pytest.mark.parametrize("answer", BAD_ANSWERS)
async def test_bad_completion_fails_only_its_rollout(answer: str) -> None:
    make, message = BAD_ANSWERS[answer]

    async def generate(prompt_token_ids: Sequence[int], *, request_id: str, **kwargs: Any) -> Any:
        return make() if request_id == "g/0/0" else await Generator()(prompt_token_ids, request_id=request_id, **kwargs)

    stage = Stage()
    bad, good = (await stage.group(generate, size=2)).rollouts
    assert (bad.status, bad.turns, good.status) == (RolloutStatus.ERROR_GENERATE, [], RolloutStatus.COMPLETED)
    assert message in (bad.error or "")
    assert stage.all_released(2)


BAD_STEPS: dict[str, tuple[Callable[[], Any], str]] = {
    "None": (lambda: None, "returned None; a TokenStep is expected"),
    "status as text": (
        lambda: TokenStep(status="completed"),  # pyright: ignore
        "TokenStep.status is 'completed'; it must be a RolloutStatus, such as RolloutStatus.COMPLETED",
    ),
    "reward NaN": (lambda: TokenStep([1], rewards={"a": float("nan")}), "TokenStep.rewards has 'a': nan"),
    "reward of text": (lambda: TokenStep([1], rewards={"a": "1"}), "TokenStep.rewards has 'a': '1'"),  # pyright: ignore
    "message of text": (lambda: TokenStep([1], messages=["hi"]), "TokenStep.messages[0] is 'hi'"),  # pyright: ignore
    "text for messages": (
        lambda: TokenStep([1], messages="hi"),  # pyright: ignore
        "TokenStep.messages is 'hi'; it must be a list of messages",
    ),
    "prompt of text": (lambda: TokenStep(["a"]), "the next prompt has 'a' at 0; token ids are integers"),  # pyright: ignore
    "True as a token": (lambda: TokenStep([True]), "the next prompt has True at 0; token ids are integers"),
    "negative token": (lambda: TokenStep([-1]), "the next prompt has token -1"),
    "it exits": (lambda: exit(3), "SystemExit: 3"),
}


@pytest.mark.parametrize("step", BAD_STEPS)
async def test_bad_step_is_an_environment_error(step: str) -> None:
    make, message = BAD_STEPS[step]

    class Bad(Env):
        async def step(self, completion: Completion) -> TokenStep:
            return make()

    stage = Stage(lambda _: Bad())
    (rollout,) = (await stage.group(Generator())).rollouts
    assert (rollout.status, len(rollout.turns)) == (RolloutStatus.ERROR_ENV, 1)
    assert message in (rollout.error or "")
    assert stage.all_released()


@pytest.mark.parametrize("observation", [None, {"prompt_token_ids": [1]}])
async def test_bad_observation_is_an_environment_error(observation: Any) -> None:
    class Bad(Env):
        async def reset(self) -> TokenObservation:
            return observation

    (rollout,) = (await Stage(lambda _: Bad()).group(Generator())).rollouts
    assert rollout.status is RolloutStatus.ERROR_ENV
    assert "a TokenObservation is expected" in (rollout.error or "")


@pytest.mark.parametrize("in_thread", [False, True])
async def test_make_env_that_returns_none_is_named(in_thread: bool) -> None:
    def make(sample: Any) -> Any:
        return None

    (rollout,) = (await Stage(make, limits=RolloutConfig(env_in_thread=in_thread)).group(Generator())).rollouts
    assert rollout.status is RolloutStatus.ERROR_ENV
    assert (
        rollout.error
        == "TypeError: make_env returned NoneType; it must return an environment, with reset, step and close"
    )


async def test_exit_in_close_does_not_end_the_run() -> None:
    async def leave(env: Env) -> None:
        raise SystemExit(3)

    (rollout,) = (await Stage(lambda _: Env(on_close=leave)).group(Generator())).rollouts
    assert (rollout.status, rollout.error) == (RolloutStatus.COMPLETED, "close: SystemExit: 3")


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("where", ["on_reset", "on_step", "on_close"])
@pytest.mark.parametrize(("error", "text"), [(Mute(), "Mute: "), (KeyError("\ud83d"), "KeyError: '\\ud83d'")])
async def test_error_with_an_unencodable_text_is_recorded(where: str, error: Exception, text: str) -> None:
    async def fail(env: Env) -> None:
        raise error

    stage = Stage(lambda _: Env(**{where: fail}))
    (rollout,) = (await stage.group(Generator())).rollouts
    assert text in (rollout.error or "")
    assert (rollout.error or "").encode()
    assert stage.all_released()


WRONG: list[Callable[[], object]] = [
    lambda: MessageStep(status="completed"),  # pyright: ignore
    lambda: MessageStep(["hi"]),  # pyright: ignore
    lambda: MessageStep(status=RolloutStatus.COMPLETED, rewards=[1.0]),  # pyright: ignore
    lambda: MessageObservation([("role", "user")]),  # pyright: ignore
    lambda: TokenObservation([1], messages=["hi"]),  # pyright: ignore
    lambda: TokenStep(status="done"),  # pyright: ignore
    lambda: Rollout("g/0", "g", 0, None, status="completed"),  # pyright: ignore
    lambda: Completion("r", [], [], "stop", ()),  # pyright: ignore
]


@pytest.mark.parametrize("make", WRONG)
def test_values_are_validated_at_construction(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="it must"):
        make()


@pytest.mark.parametrize("error", [RuntimeError("gone"), asyncio.CancelledError(), SystemExit(1)])
async def test_raising_callbacks_are_logged_once_and_lose_no_group(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(argument: object) -> None:
        raise error

    stage = Stage()
    stage.rollouter.finish_session = broken
    with caplog.at_level(logging.WARNING):
        group = await stage.group(Generator(), size=3, on_finished=broken)
    assert [rollout.reward for rollout in group.rollouts] == [0.0, 1.0, 2.0]
    assert [env.closed for env in stage.envs] == [1, 1, 1]
    logged = [record.getMessage() for record in caplog.records]
    assert [next(word for word in ("finish_session", "on_finished") if word in line) for line in logged] == [
        "finish_session",
        "on_finished",
    ]
    assert type(error).__name__ in logged[0]


def check_immutable(packed: Any) -> None:
    with pytest.raises(TypeError):
        packed[0] = 99
    np.array(packed)[:] = 99
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(packed)[:] = 99


async def test_recorded_turns_cannot_be_modified() -> None:
    kept: list[Completion] = []

    async def generate(prompt_token_ids: Any, **kwargs: Any) -> Completion:
        completion = await Generator()(prompt_token_ids, **kwargs)
        completion = replace(completion, metrics={"queue_s": 1.0})
        prompt_token_ids.append(99)
        kept.append(completion)
        return completion

    class Meddling(Env):
        said: Any = None

        async def reset(self) -> TokenObservation:
            self.said = [{"role": "user", "content": [{"text": "go"}]}]
            return TokenObservation(self.prompt, self.said)

        async def step(self, completion: Any) -> TokenStep:
            step = await super().step(completion)
            check_immutable(completion.token_ids)
            check_immutable(completion.logprobs)
            completion.metrics["queue_s"] = 99.0
            self.said[0]["content"][0]["text"] = "gone"
            self.prompt.append(99)
            return step

        async def close(self) -> None:
            self.prompt.clear()
            await super().close()

    (rollout,) = (await Stage(lambda _: Meddling()).group(generate)).rollouts
    for completion in kept:
        completion.token_ids.clear()  # pyright: ignore
    assert [list(turn.prompt_token_ids) for turn in rollout.turns] == [[1, 2, 3], [1, 2, 3, 5, 6, 7, 99]]
    assert [list(turn.completion.token_ids) for turn in rollout.turns] == [[5, 6], [5, 6]]
    assert [list(turn.completion.logprobs) for turn in rollout.turns] == [[-0.5, -0.1]] * 2
    assert [turn.completion.metrics for turn in rollout.turns] == [{"queue_s": 1.0}] * 2
    assert rollout.messages[0] == {"role": "user", "content": [{"text": "go"}]}


async def test_every_opened_session_is_finished_once() -> None:
    finished: list[str] = []
    two_finished = asyncio.Event()

    def finish(session_id: str) -> None:
        finished.append(session_id)
        if len(finished) == 2:
            two_finished.set()

    async def play() -> None:
        with RunningGroups(finish).one(3) as running:

            async def generate(prompt_token_ids: Sequence[int], *, request_id: str, **kwargs: Any) -> Completion:
                with running.request(kwargs["session_id"]):
                    if request_id.startswith("g/2"):
                        await asyncio.Event().wait()
                    fail = ConnectionError("gone") if request_id == "g/1/0" else None
                    return await Generator(fail=fail)(prompt_token_ids, request_id=request_id, **kwargs)

            stage = Stage(limits=RolloutConfig(max_retries=1))
            await stage.group(generate, size=3, on_finished=lambda rollout: running.ended(rollout.rollout_id))

    playing = asyncio.ensure_future(play())
    await asyncio.wait_for(two_finished.wait(), HANG_S)
    playing.cancel()  # as the scheduler does with a group that is too old
    await asyncio.wait({playing})
    assert finished == ["g/0", "g/1~1", "g/1", "g/2"]


@pytest.mark.parametrize("kind", [Reward, GroupReward])
async def test_changes_made_by_a_reward_are_not_trained_on(kind: Any) -> None:
    def meddle(rollout: Rollout) -> float:
        (turn,) = rollout.turns
        completion: Any = turn.completion
        completion.metrics["queue_s"] = 63
        completion.version_spans.clear()
        turn.token_advantages[0] = 44  # pyright: ignore
        for packed in (turn.prompt_token_ids, completion.token_ids, completion.logprobs):
            check_immutable(packed)
        turn.rewards["last"] = 99.0  # pyright: ignore
        return float(rollout.sibling)

    def meddle_with_all(rollouts: Sequence[Rollout]) -> list[float]:
        return list(map(meddle, rollouts))

    class Marked(Env):
        async def step(self, completion: Completion) -> TokenStep:
            return replace(await super().step(completion), token_advantages=[0.25, -0.25])

    reward = kind(meddle if kind is Reward else meddle_with_all)
    rubric = Rubric([reward, env_reward("last")])
    group = await Stage(lambda _: Marked(turns=1), rubric).group(Generator(), size=2)
    assert [rollout.reward_breakdown["last"] for rollout in group.rollouts] == [1.0, 1.0]
    await rubric.score(group)  # again: the record is unchanged
    for rollout, sample in zip(group.rollouts, build_samples(group, 1.0), strict=True):
        assert rollout.reward_breakdown["last"] == 1.0
        assert (sample.token_ids, sample.behaviour_logprobs) == ([1, 2, 3, 5, 6], [0, 0, 0, -0.5, -0.1])
        assert rollout.turns[0].token_advantages == [0.25, -0.25]
        assert rollout.turns[0].completion.versions == [3, 4]
        assert rollout.turns[0].completion.metrics == {}
