"""Episodes: requests, limits, rewards and ends, the resulting rollout, and keys."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from conversation_fakes import SAMPLING, SYSTEM, chat_template_renderer, completion, reply, user

from titan_rl.core.errors import BusyError, EpisodeEndedError, RequestError
from titan_rl.rollout.types import Rollout, RolloutGroup, RolloutStatus
from titan_rl.serving.conversations.tree import TurnNode
from titan_rl.serving.episode import Episode, EpisodeLimits
from titan_rl.serving.episode_store import EpisodeStore
from titan_rl.training.data.sample_builder import build_samples, count_branches
from titan_rl.types import SamplingParams

pytestmark = pytest.mark.looptime


def store(**limits: Any) -> EpisodeStore:
    return EpisodeStore(chat_template_renderer(), EpisodeLimits(**limits))


def say(episode: Episode, messages: list[Any], text: str, request_id: str) -> TurnNode:
    prompt = episode.tree.prompt(messages)
    return episode.record(prompt, completion((5, 6), request_id), reply(text), SAMPLING)


def rollout_of(episode: Episode) -> Rollout:
    rollout = Rollout("g0/0", "g0", 0, None)
    episode.fill_in(rollout)
    return rollout


async def test_rollout_contains_turns_transcript_and_rewards() -> None:
    episode = store().open("e")
    opening = [SYSTEM, user("b a")]
    first = say(episode, opening, "a b", "r0")
    second = say(episode, [*opening, reply("a b"), user("c")], "a b c", "r1")
    episode.reward({"format": 1.0}, "r0")
    episode.reward({"solved": 0.25})
    episode.reward({"solved": 0.5, "format": 2})
    assert episode.status is None
    assert episode.end()

    rollout = rollout_of(episode)
    assert rollout.status is RolloutStatus.COMPLETED
    assert [turn.prompt_token_ids for turn in rollout.turns] == [first.prompt_token_ids, second.prompt_token_ids]
    assert [turn.rewards for turn in rollout.turns] == [{"format": 1.0}, {"solved": 0.5, "format": 2.0}]
    assert rollout.messages == [*opening, reply("a b"), user("c"), reply("a b c")]


async def test_each_branch_is_a_sample_that_trains_only_its_own_tokens() -> None:
    episode = store().open("e")
    main = [SYSTEM, user("b a")]
    say(episode, main, "a b", "r0")
    say(episode, [{"role": "system", "content": "Help."}, user("x")], "helped", "r1")
    main += [reply("a b"), user("c")]
    say(episode, main, "no", "r2")
    say(episode, main, "yes", "r3")
    say(episode, [*main, reply("yes"), user("d")], "done", "r4")
    episode.end()

    rollout = rollout_of(episode)
    assert [turn.completion.request_id for turn in rollout.turns] == ["r1", "r0", "r2", "r3", "r4"]
    assert count_branches(rollout) == rollout.metrics["branches"] == 3
    assert [message["content"] for message in rollout.messages] == [
        "Help.", "x", "helped", "Sort.", "b a", "a b", "c", "no", "yes", "d", "done",
    ]  # fmt: skip
    rollout.advantage = 1.0
    samples = build_samples(RolloutGroup("g0", None, [rollout]))
    assert [sample.num_trained_tokens for sample in samples] == [2, 4, 4]


async def test_time_limit_ends_the_episode_and_requests_in_flight() -> None:
    episode = store(time_s=10.0).open("e")
    say(episode, [user("a")], "b", "r0")
    entered = asyncio.Event()

    async def ask() -> None:
        async with episode.request():
            entered.set()
            await asyncio.Event().wait()

    asking = asyncio.create_task(ask())
    await entered.wait()
    assert episode.num_in_flight == 1
    before = asyncio.get_running_loop().time()
    await episode.wait()
    assert asyncio.get_running_loop().time() - before == pytest.approx(10.0)
    with pytest.raises(EpisodeEndedError, match="truncated_time"):
        await asking
    assert episode.num_in_flight == 0
    assert rollout_of(episode).status is RolloutStatus.TRUNCATED_TIME


async def test_episode_without_a_turn_is_an_error() -> None:
    late = store(time_s=10.0).open("e")
    await late.wait()
    assert rollout_of(late).status is RolloutStatus.ERROR_TIMEOUT
    idle = store().open("e")
    idle.end()
    rollout = rollout_of(idle)
    assert (rollout.status, rollout.error) == (
        RolloutStatus.ERROR_ENV, "the agent ended without sending a request to the policy",
    )  # fmt: skip


async def test_first_end_is_final() -> None:
    episode = store().open("e")
    prompt = episode.tree.prompt([user("a")])
    say(episode, [user("a")], "b", "r0")
    assert episode.end(RolloutStatus.ERROR_ENV, "it crashed")
    assert not episode.end()
    with pytest.raises(EpisodeEndedError, match="error_env"):
        async with episode.request():
            pass
    with pytest.raises(EpisodeEndedError):
        episode.record(prompt, completion(), reply("b"), SAMPLING)
    with pytest.raises(EpisodeEndedError):
        episode.reward({"solved": 1.0})
    rollout = rollout_of(episode)
    assert (rollout.status, rollout.error, len(rollout.turns)) == (RolloutStatus.ERROR_ENV, "it crashed", 1)


async def test_limits_on_turns_and_concurrent_requests() -> None:
    episode = store(turns=1, requests=1).open("e")
    async with episode.request():
        with pytest.raises(BusyError, match="1 requests in flight"):
            async with episode.request():
                pass
        say(episode, [user("a")], "b", "r0")
    with pytest.raises(EpisodeEndedError, match="truncated_turns"):
        async with episode.request():
            pass
    assert episode.status is RolloutStatus.TRUNCATED_TURNS
    with pytest.raises(ValueError, match=r"EpisodeLimits\.turns is 0"):
        EpisodeLimits(turns=0)


async def test_each_completion_counts_as_a_turn() -> None:
    episode = store(turns=3).open("e")
    with pytest.raises(RequestError, match=r"4 completions .* 3 of its 3 turns left"):
        async with episode.request(4):
            pass
    async with episode.request(2):
        with pytest.raises(BusyError, match="3 turns that it has left"):
            async with episode.request(2):
                pass
        async with episode.request(1):
            pass
    async with episode.request(3):
        pass
    assert episode.status is None


async def test_failed_and_cancelled_requests_are_no_longer_in_flight() -> None:
    episode = store().open("e")
    with pytest.raises(TimeoutError, match="mine"):
        async with episode.request():
            raise TimeoutError("mine")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0), episode.request():
            await asyncio.Event().wait()
    assert episode.num_in_flight == 0
    assert episode.status is None


async def test_rejects_duplicate_choices_and_invalid_rewards() -> None:
    episode = store().open("e")
    say(episode, [user("a")], "b", "r0")
    with pytest.raises(ValueError, match="'r0' already has a choice 0"):
        say(episode, [user("a")], "b", "r0")
    with pytest.raises(LookupError, match="'r9'"):
        episode.reward({"solved": 1.0}, "r9")
    for value in (float("nan"), "1", True, None):
        with pytest.raises(ValueError, match="finite number"):
            episode.reward({"solved": value})  # pyright: ignore[reportArgumentType]


async def test_key_finds_only_its_own_episode() -> None:
    episodes = store(keep_s=5.0)
    one, other = episodes.open("one"), episodes.open("other")
    assert episodes.find(one.key) is one
    assert episodes.find(other.key) is other
    assert one.key not in repr(one)
    for key in ("", one.key[:-1], one.key + "x", one.id, "\ud83d", "é"):
        assert episodes.find(key) is None
    one.end()
    assert episodes.find(one.key) is one
    await asyncio.sleep(5.1)
    assert episodes.find(one.key) is None
    assert episodes.find(other.key) is other


async def test_store_limits_the_number_of_open_episodes() -> None:
    episodes = store(episodes=2, keep_s=1.0)
    one, _ = episodes.open("one"), episodes.open("other")
    with pytest.raises(BusyError, match="2 episodes are open"):
        episodes.open("third")
    one.end()
    assert len(episodes) == 1
    episodes.open("third")
    assert len(episodes) == 2


async def test_agent_sets_stop_tokens_and_training_sets_sampling() -> None:
    asked = SamplingParams(max_tokens=10, temperature=0.0, top_p=0.5, seed=42, stop_token_ids=(3,))
    assert store().open("e").sampling.of(asked, [1]) is asked

    own = SamplingParams(max_tokens=8, min_tokens=1, seed=7)
    one, other = (store().open(name, sampling=own) for name in ("one", "other"))
    given = [one.sampling.of(asked, [1]), one.sampling.of(asked, [1]), one.sampling.of(asked, [2])]
    given.append(other.sampling.of(asked, [1]))
    assert len({sampling.seed for sampling in given}) == 4
    assert [replace(sampling, seed=None) for sampling in given] == [
        SamplingParams(max_tokens=8, min_tokens=1, stop_token_ids=(3,))
    ] * 4
    unseeded = store().open("e", sampling=SamplingParams(max_tokens=16))
    assert unseeded.sampling.of(asked, [1]).seed is None


async def test_seeds_do_not_depend_on_the_order_of_concurrent_requests() -> None:
    own = SamplingParams(max_tokens=8, seed=7)
    one, again = (store().open("e", sampling=own) for _ in range(2))
    prompts = [[1], [2], [1]]
    seeds = [one.sampling.of(SAMPLING, prompt).seed for prompt in prompts]
    assert [again.sampling.of(SAMPLING, prompt).seed for prompt in ([2], [1], [1])] == [seeds[1], seeds[0], seeds[2]]


async def test_rejected_request_does_not_consume_a_seed() -> None:
    """Otherwise a retry would change the seed, and a repeated rollout would not find its recorded answers."""
    own = SamplingParams(max_tokens=8, seed=7)
    undisturbed, busy = (store(requests=1).open("e", sampling=own) for _ in range(2))

    def ask(episode: Episode) -> int | None:
        prompt = episode.prompt([user("a")], None, None)
        return prompt.request(SAMPLING, 1, "r").sampling.seed

    async with busy.request():
        with pytest.raises(BusyError, match="1 requests in flight"):
            ask(busy)
    assert ask(busy) == ask(undisturbed)
