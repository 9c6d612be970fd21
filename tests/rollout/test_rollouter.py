"""The rollouter: endings of a rollout, the turns that it keeps, and the release of its environment."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from background import HANG_S
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from stage import Env, Generator, Stage, by_sibling

from titan_rl import (
    Completion,
    FinishReason,
    Rollout,
    RolloutStatus,
    SamplingParams,
    TokenStep,
)
from titan_rl.core.errors import GenerationError, RequestError, RewardError
from titan_rl.rollout.group.rollouter import Rollouter
from titan_rl.rollout.group.turns import turn_seed
from titan_rl.rollout.group.user_code_boundary import CLEANUP_S
from titan_rl.rollout.rewards.reward import Reward
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.settings import RolloutConfig
from titan_rl.training.data.sample_builder import build_samples


async def test_group_is_played_scored_and_compared() -> None:
    stage, generate = Stage(), Generator()
    group = await stage.group(generate, size=3)
    assert [r.rollout_id for r in group.rollouts] == ["g/0", "g/1", "g/2"]
    assert [r.status for r in group.rollouts] == [RolloutStatus.COMPLETED] * 3
    assert [r.reward for r in group.rollouts] == [0.0, 1.0, 2.0]
    assert [r.advantage for r in group.rollouts] == pytest.approx([-1.2247, 0.0, 1.2247], abs=1e-3)
    assert group.versions == {3, 4}
    assert stage.all_released(3)
    first = group.rollouts[0]
    assert [list(turn.prompt_token_ids) for turn in first.turns] == [[1, 2, 3], [1, 2, 3, 5, 6, 7]]
    assert [turn.rewards for turn in first.turns] == [{"so_far": 0.5}, {"last": 1.0}]
    assert [m["role"] for m in first.messages] == ["user", "assistant", "assistant"]
    assert {(c["request"], c["session"]) for c in generate.calls} == {
        (f"g/{sibling}/{turn}", f"g/{sibling}") for sibling in range(3) for turn in range(2)
    }


async def test_siblings_run_concurrently() -> None:
    everyone = asyncio.Barrier(4)

    async def meet(env: Env) -> None:
        await everyone.wait()

    async with asyncio.timeout(HANG_S):
        group = await Stage(lambda _: Env(on_reset=meet)).group(Generator(), size=4)
    assert all(r.status is RolloutStatus.COMPLETED for r in group.rollouts)


async def test_seeds_differ_by_turn_and_are_reproducible() -> None:
    async def seeds(**kwargs: Any) -> dict[str, int]:
        generate = Generator()
        sampling = {"seed": kwargs.pop("sampling_seed", None)}
        await Stage(**kwargs).group(generate, size=3, **sampling)
        return {call["request"]: call["sampling"].seed for call in generate.calls}

    once = await seeds()
    assert len(set(once.values())) == 6
    assert await seeds() == once
    assert once["g/1/1"] == turn_seed(0, "g/1", 1)
    assert await seeds(seed=1) != once
    assert await seeds(sampling_seed=1) == await seeds(seed=1)
    assert set((await seeds(seed=None)).values()) == {None}
    assert await seeds(seed=None, sampling_seed=1) == await seeds(seed=1)


def test_seeds_are_the_same_in_every_process() -> None:
    assert turn_seed(0, "g0/0", 0) == 6799027815719958804
    assert turn_seed(0, "g/1", 11) != turn_seed(0, "g/11", 1)


async def test_max_tokens_is_capped_to_the_remaining_context() -> None:
    generate = Generator()
    played = await Stage(max_context=8).group(
        generate, max_tokens=4, min_tokens=3, stop_token_ids=(9,), temperature=0.5
    )
    first, second = (call["sampling"] for call in generate.calls)
    assert (first.max_tokens, first.min_tokens) == (4, 3)
    assert (second.max_tokens, second.min_tokens) == (2, 2)
    assert (second.stop_token_ids, second.temperature) == ((9,), 0.5)
    assert [turn.sampling for turn in played.rollouts[0].turns] == [first, second]


async def fail(env: Env) -> None:
    raise KeyError("lost")


async def fail_second(env: Env) -> None:
    if env.steps == 2:
        raise TimeoutError("the game server")


ENDS = {
    "completed": (Stage, Generator(), "completed", 2, None),
    "length": (Stage, Generator(FinishReason.LENGTH, fail_at="/1"), "truncated_length", 2, None),
    "abort": (Stage, Generator(FinishReason.ABORT, fail_at="/1"), "aborted", 2, None),
    "turn cap": (
        lambda: Stage(lambda _: Env(turns=9), limits=RolloutConfig(max_turns=3)),
        Generator(),
        "truncated_turns",
        3,
        None,
    ),
    "prompt too long": (
        lambda: Stage(max_context=6),
        Generator(),
        "truncated_prompt",
        1,
        "the prompt of turn 1 has 6 tokens, max_context is 6",
    ),
    "first prompt too long": (
        lambda: Stage(max_context=2),
        Generator(),
        "truncated_prompt",
        0,
        "the prompt of turn 0 has 3 tokens, max_context is 2",
    ),
    "reset raises": (lambda: Stage(lambda _: Env(on_reset=fail)), Generator(), "error_env", 0, "KeyError: 'lost'"),
    "step raises": (
        lambda: Stage(lambda _: Env(on_step=fail_second)),
        Generator(),
        "error_env",
        2,
        "TimeoutError: the game server",
    ),
    "bad prompt": (
        lambda: Stage(lambda _: Env(prompt=None)),  # pyright: ignore
        Generator(),
        "error_env",
        0,
        "TypeError: 'NoneType' object is not iterable",
    ),
    "generation fails": (
        Stage,
        Generator(fail=GenerationError("replica died"), fail_at="/1"),
        "error_generate",
        1,
        "GenerationError: replica died",
    ),
    "request refused": (
        Stage,
        Generator(fail=RequestError("too long"), fail_at="/0"),
        "error_generate",
        0,
        "RequestError: too long",
    ),
    "a custom client raises": (
        Stage,
        Generator(fail=ConnectionResetError("peer"), fail_at="/0"),
        "error_generate",
        0,
        "ConnectionResetError: peer",
    ),
}


@pytest.mark.parametrize("end", ENDS)
async def test_each_ending_has_its_status_and_keeps_its_turns(end: str) -> None:
    make_stage, generate, status, num_turns, error = ENDS[end]
    stage = make_stage()
    (rollout,) = (await stage.group(generate)).rollouts
    assert (rollout.status, len(rollout.turns), rollout.error) == (RolloutStatus(status), num_turns, error)
    assert rollout.num_completion_tokens == 2 * num_turns
    assert stage.all_released()
    judged = num_turns and not rollout.status.is_error and rollout.status is not RolloutStatus.ABORTED
    assert (rollout.reward is not None) == bool(judged)


@pytest.mark.parametrize("status", [RolloutStatus.ERROR_PARSE, RolloutStatus.TRUNCATED_TURNS])
async def test_environment_status_takes_precedence(status: RolloutStatus) -> None:
    class Ending(Env):
        async def step(self, completion: Completion) -> TokenStep:
            return TokenStep(status=status)

    (rollout,) = (await Stage(lambda _: Ending()).group(Generator(FinishReason.LENGTH))).rollouts
    assert rollout.status is status


async def test_make_env_error_fails_its_rollout() -> None:
    def make(sample: Any) -> Env:
        raise LookupError("no such level")

    (rollout,) = (await Stage(make).group(Generator())).rollouts
    assert (rollout.status, rollout.error) == (RolloutStatus.ERROR_ENV, "LookupError: no such level")


HANGS = {
    "reset": (Env(on_reset=lambda _: asyncio.sleep(1e6)), 10.0, "env_timeout_s"),
    "step": (Env(on_step=lambda _: asyncio.sleep(1e6)), 10.0, "env_timeout_s"),
}


@pytest.mark.looptime
@pytest.mark.parametrize("where", HANGS)
async def test_hanging_environment_is_a_timeout(where: str) -> None:
    env, seconds, limit = HANGS[where]
    limits = RolloutConfig(max_turns=99, env_timeout_s=10.0, rollout_timeout_s=30.0)
    stage = Stage(lambda _: env, limits=limits, max_context=10_000)
    (rollout,) = (await stage.group(Generator())).rollouts
    assert rollout.status is RolloutStatus.ERROR_TIMEOUT
    assert limit in (rollout.error or "")
    assert rollout.metrics["seconds"] == pytest.approx(seconds)
    assert stage.all_released()


SLOW_TO_CLEAN_UP = [(20.0, False), (295.0, False), (295.0, True), (600.0, False), (600.0, True)]


@pytest.mark.looptime
@pytest.mark.parametrize("where", ["on_reset", "on_step"])
@pytest.mark.parametrize(("cleanup_s", "raises"), SLOW_TO_CLEAN_UP)
async def test_environment_with_slow_cleanup_is_closed_after_it(where: str, cleanup_s: float, raises: bool) -> None:
    async def stubborn(env: Env) -> None:
        try:
            await asyncio.sleep(1e6)
        except asyncio.CancelledError:
            await asyncio.sleep(cleanup_s)
            if raises:
                raise

    stage = Stage(lambda _: Env(**{where: stubborn}), limits=RolloutConfig(env_timeout_s=10.0, rollout_timeout_s=300.0))
    (rollout,) = (await stage.group(Generator())).rollouts
    assert (rollout.status, rollout.reward) == (RolloutStatus.ERROR_TIMEOUT, None)
    assert "env_timeout_s" in (rollout.error or "")
    assert rollout.metrics["seconds"] == pytest.approx(10.0 + CLEANUP_S)
    assert [env.closed for env in stage.envs] == [0]
    await asyncio.sleep(cleanup_s)
    assert stage.all_released()


@pytest.mark.looptime
@pytest.mark.parametrize("where", ["generate", "on_reset", "on_step"])
async def test_cancelled_group_does_not_wait_for_slow_cleanup(where: str) -> None:
    loop = asyncio.get_running_loop()

    async def stubborn(env: Env) -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            await asyncio.sleep(600.0)

    async def generate(prompt_token_ids: Sequence[int], **kwargs: Any) -> Completion:
        if where == "generate":
            await stubborn(Env())
        return await Generator()(prompt_token_ids, **kwargs)

    stage = Stage(lambda _: Env(**({} if where == "generate" else {where: stubborn})))
    running = asyncio.ensure_future(stage.group(generate, size=2))
    await asyncio.sleep(20.0)
    running.cancel()
    began = loop.time()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert loop.time() - began == pytest.approx(CLEANUP_S)
    await asyncio.sleep(600.0)
    assert stage.all_released(2)


@pytest.mark.looptime
@pytest.mark.parametrize("where", ["generate", "on_step"])
async def test_failed_group_does_not_wait_for_slow_cleanup(where: str) -> None:
    async def stubborn(env: Env | None = None) -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            await asyncio.sleep(600.0)

    async def generate(prompt_token_ids: Sequence[int], *, request_id: str, **kwargs: Any) -> Completion:
        if where == "generate" and request_id == "g/1/0":
            await stubborn()
        return await Generator()(prompt_token_ids, request_id=request_id, **kwargs)

    def broken(rollout: Rollout) -> float:
        raise KeyError("lost")

    envs = [Env(), Env() if where == "generate" else Env(on_step=stubborn)]
    left = iter(envs)
    began = asyncio.get_running_loop().time()
    group = await Stage(lambda _: next(left), rubric=Rubric([Reward(broken)])).group(generate, size=2)
    assert group.failure is not None
    assert group.rollouts[1].status is RolloutStatus.ABORTED
    assert asyncio.get_running_loop().time() - began == pytest.approx(CLEANUP_S)


@pytest.mark.looptime
async def test_generation_with_slow_cleanup_is_a_timeout() -> None:
    async def generate(prompt_token_ids: Sequence[int], **kwargs: Any) -> Completion:
        try:
            await asyncio.sleep(1e6)
        finally:
            await asyncio.sleep(600.0)
        raise AssertionError

    stage = Stage(limits=RolloutConfig(generate_timeout_s=50.0))
    (rollout,) = (await stage.group(generate)).rollouts
    assert rollout.status is RolloutStatus.ERROR_TIMEOUT
    assert rollout.metrics["seconds"] == pytest.approx(50.0 + CLEANUP_S)
    assert stage.all_released()


@pytest.mark.looptime
@pytest.mark.parametrize("hangs", [False, True])
async def test_all_calls_of_an_environment_are_made_in_one_task(hangs: bool) -> None:
    """A scope that is entered in `reset` is left in `close`, which asyncio and anyio allow only in the same task."""
    left: list[bool] = []

    class Scoped(Env):
        async def reset(self) -> Any:
            self.scope = asyncio.timeout(1e6)
            await self.scope.__aenter__()
            return await super().reset()

        async def step(self, completion: Completion) -> TokenStep:
            self.task = asyncio.current_task()
            return await (asyncio.sleep(1e6) if hangs else super().step(completion))  # pyright: ignore

        async def close(self) -> None:
            await super().close()
            await self.scope.__aexit__(None, None, None)
            left.append(asyncio.current_task() is self.task and self.task is not None and not self.task.cancelling())

    stage = Stage(lambda _: Scoped(), limits=RolloutConfig(env_timeout_s=10.0))
    (rollout,) = (await stage.group(Generator())).rollouts
    assert rollout.status is (RolloutStatus.ERROR_TIMEOUT if hangs else RolloutStatus.COMPLETED)
    assert "close_failed" not in rollout.metrics
    assert left == [True]
    assert stage.all_released()


@pytest.mark.looptime
async def test_hanging_generation_is_a_timeout_and_keeps_earlier_turns() -> None:
    async def generate(prompt_token_ids: Sequence[int], *, request_id: str, **kwargs: Any) -> Completion:
        if request_id.endswith("/1"):
            await asyncio.Event().wait()
        return await Generator()(prompt_token_ids, request_id=request_id, **kwargs)

    stage = Stage(limits=RolloutConfig(generate_timeout_s=30.0))
    (rollout,) = (await stage.group(generate)).rollouts
    assert (rollout.status, len(rollout.turns)) == (RolloutStatus.ERROR_TIMEOUT, 1)
    assert rollout.metrics["seconds"] == pytest.approx(30.0)
    assert stage.all_released()


async def test_failed_close_is_recorded_and_changes_nothing_else() -> None:
    stage = Stage(lambda _: Env(on_close=fail))
    (rollout,) = (await stage.group(Generator())).rollouts
    assert (rollout.status, rollout.error) == (RolloutStatus.COMPLETED, "close: KeyError: 'lost'")
    assert rollout.metrics["close_failed"] == 1.0
    assert rollout.reward == 0.0
    assert stage.all_released()


@pytest.mark.looptime
async def test_hanging_close_is_abandoned() -> None:
    async def stubborn(env: Env) -> None:
        while True:
            try:
                await asyncio.sleep(1e6)
            except asyncio.CancelledError:
                if asyncio.get_running_loop().time() > 100:
                    raise

    stage = Stage(lambda _: Env(on_close=stubborn))
    (rollout,) = (await stage.group(Generator())).rollouts
    assert rollout.status is RolloutStatus.COMPLETED
    assert rollout.error == "close: TimeoutError: it took longer than 10 s"
    assert rollout.metrics["seconds"] == pytest.approx(11.0)
    assert stage.all_released()
    await asyncio.sleep(100)


class Gate:
    """Gate at which a rollout waits until it is released."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.release = asyncio.Event()

    async def __call__(self, env: Env | None = None) -> None:
        self.reached.set()
        await self.release.wait()


@pytest.mark.parametrize("where", ["reset", "generate", "step", "close", "score"])
async def test_cancelling_closes_the_environments_once(where: str) -> None:
    gate = Gate()

    async def generate(prompt_token_ids: Sequence[int], **kwargs: Any) -> Completion:
        if where == "generate":
            await gate()
        return await Generator()(prompt_token_ids, **kwargs)

    async def judge(rollout: Rollout) -> float:
        if where == "score":
            await gate()
        return 1.0

    hooks = {f"on_{where}": gate} if where in ("reset", "step", "close") else {}
    stage = Stage(lambda _: Env(**hooks), rubric=Rubric([Reward(judge)]))
    running = asyncio.ensure_future(stage.group(generate, size=2))
    await gate.reached.wait()
    running.cancel()
    await asyncio.sleep(0)
    running.cancel()  # a second cancellation must not interrupt a close
    await asyncio.sleep(0)
    gate.release.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert stage.all_released(2)


async def test_stray_cancellation_in_generation_fails_only_its_rollout() -> None:
    async def generate(prompt_token_ids: Sequence[int], *, request_id: str, **kwargs: Any) -> Completion:
        if request_id == "g/0/0":
            lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            lost.cancel()
            await lost
        return await Generator()(prompt_token_ids, request_id=request_id, **kwargs)

    group = await Stage().group(generate, size=2)
    assert [r.status for r in group.rollouts] == [RolloutStatus.ERROR_GENERATE, RolloutStatus.COMPLETED]


async def test_errored_sibling_does_not_enter_the_baseline() -> None:
    async def generate(prompt_token_ids: Sequence[int], *, request_id: str, **kwargs: Any) -> Completion:
        fail = GenerationError("gone") if request_id == "g/2/1" else None
        return await Generator(fail=fail)(prompt_token_ids, request_id=request_id, **kwargs)

    for error_reward in (None, -9.0):
        rubric = Rubric([Reward(by_sibling)], error_reward=error_reward)
        group = await Stage(rubric=rubric, advantage=lambda rewards: [r - sum(rewards) for r in rewards]).group(
            generate, size=3
        )
        assert [r.reward for r in group.rollouts] == [0.0, 1.0, error_reward]
        assert [r.advantage for r in group.rollouts] == [-1.0, 0.0, None]


async def test_group_with_an_aborted_sibling_is_not_judged() -> None:
    async def generate(prompt_token_ids: Sequence[int], *, request_id: str, **kwargs: Any) -> Completion:
        reason = FinishReason.ABORT if request_id == "g/1/0" else FinishReason.STOP
        return await Generator(reason)(prompt_token_ids, request_id=request_id, **kwargs)

    ended: list[str] = []

    async def judge(rollout: Rollout) -> float:
        try:
            await asyncio.Event().wait()  # a judge that began before the abort does not end
        finally:
            ended.append(rollout.rollout_id)
        return 1.0

    group = await asyncio.wait_for(Stage(rubric=Rubric([Reward(judge)])).group(generate, size=2), HANG_S)
    assert group.is_aborted
    assert ended in ([], ["g/0"])
    assert [r.reward_breakdown for r in group.rollouts] == [{}, {}]
    assert [(r.status.value, r.reward, r.advantage) for r in group.rollouts] == [
        ("completed", None, None),
        ("aborted", None, None),
    ]


async def test_environments_are_closed_when_a_reward_fails() -> None:
    def broken(rollout: Rollout) -> float:
        return rollout.sample["score"]

    stage = Stage(rubric=Rubric([Reward(broken)]))
    group = await stage.group(Generator(), size=2)
    assert group.failure is not None
    assert "'broken' failed on rollout 'g/0': TypeError" in group.failure.error
    assert stage.all_released(2)


@pytest.mark.parametrize("values", [[1.0], [1.0, float("nan")]])
async def test_error_about_bad_advantages_names_the_function(values: list[float]) -> None:
    def odd(rewards: Sequence[float]) -> list[float]:
        return values

    with pytest.raises(RewardError, match="advantage 'odd' returned"):
        await Stage(advantage=odd).group(Generator(), size=2)


@pytest.mark.parametrize("error", [ZeroDivisionError, StopIteration, asyncio.CancelledError, SystemExit])
async def test_advantage_function_that_raises_ends_the_run_with_its_line(error: type[BaseException]) -> None:
    def odd(rewards: Sequence[float]) -> list[float]:
        raise error("no luck")

    stage = Stage(advantage=odd)
    with pytest.raises(RewardError, match=rf"advantage 'odd' failed .*{error.__name__}: no luck .*test_rollouter.py:"):
        await stage.group(Generator(), size=2)
    assert stage.all_released(2)


@pytest.mark.parametrize("given", [None, 1.0, ["high", "low"]])
async def test_error_about_non_numeric_advantages_names_the_function(given: Any) -> None:
    def odd(rewards: Sequence[float]) -> Any:
        return given

    with pytest.raises(RewardError, match=r"advantage 'odd' returned .* for the rewards"):
        await Stage(advantage=odd).group(Generator(), size=2)


async def test_invalid_settings_are_rejected() -> None:
    with pytest.raises(ValueError, match="max_context is 1"):
        Stage(max_context=1)
    with pytest.raises(ValueError, match="group_size is 0"):
        await Stage().group(Generator(), size=0)


@settings(max_examples=examples(60), deadline=None)
@given(
    fates=st.lists(
        st.sampled_from(["ok", "reset", "step", "close", "generate", "abort", "length"]), min_size=1, max_size=6
    ),
    cancel_after=st.none() | st.integers(0, 40),
)
def test_environments_are_closed_once_for_any_ending(fates: list[str], cancel_after: int | None) -> None:
    async def run() -> None:
        left = iter(fates)

        def make(sample: Any) -> Env:
            fate = next(left)
            return Env(**{f"on_{fate}": fail}) if fate in ("reset", "step", "close") else Env()

        async def generate(prompt_token_ids: Sequence[int], *, request_id: str, **kwargs: Any) -> Completion:
            fate = fates[int(request_id.split("/")[1])]
            reason = FinishReason(fate) if fate in ("abort", "length") else FinishReason.STOP
            broken = GenerationError("gone") if fate == "generate" else None
            return await Generator(reason, broken)(prompt_token_ids, request_id=request_id, **kwargs)

        stage = Stage(make)
        running = asyncio.ensure_future(stage.group(generate, size=len(fates)))
        for _ in range(-1 if cancel_after is None else cancel_after):
            await asyncio.sleep(0)
        if cancel_after is not None:
            running.cancel()
        await asyncio.wait({running})
        assert [env.closed for env in stage.envs] == [1] * len(stage.envs)
        assert len(set(stage.finished)) == len(stage.finished) == len(stage.envs)
        if not running.cancelled():
            kinds = {"ok": "completed", "close": "completed", "abort": "aborted", "length": "truncated_length"}
            kinds |= {"reset": "error_env", "step": "error_env", "generate": "error_generate"}
            assert [r.status for r in running.result().rollouts] == [kinds[fate] for fate in fates]

    asyncio.run(run())


async def test_errored_sibling_is_retried_in_a_fresh_environment():
    made: list[Env] = []

    async def fail_first(env: Env) -> None:
        if len(made) <= 2:
            raise ConnectionError("sandbox is gone")

    def make_env(sample: object) -> Env:
        made.append(Env(turns=1, on_step=fail_first))
        return made[-1]

    finished: list[str] = []
    generator = Generator()
    rollouter = Rollouter(make_env, Rubric([Reward(one)]), max_context=64, limits=RolloutConfig(max_retries=1))
    group = await rollouter.run_group(
        generator,
        None,
        group_id="g",
        group_size=2,
        sampling=SamplingParams(max_tokens=8),
        on_finished=lambda rollout: finished.append(rollout.rollout_id),
    )
    assert sorted(rollout.status for rollout in group.rollouts) == [RolloutStatus.COMPLETED, RolloutStatus.ERROR_ENV]
    assert [env.closed for env in made] == [1, 1, 1]
    assert sorted(finished) == sorted(rollout.rollout_id for rollout in group.rollouts)


def one(rollout: Rollout) -> float:
    return 1.0


async def test_sibling_is_judged_as_soon_as_it_ends() -> None:
    judged, release = asyncio.Event(), asyncio.Event()

    async def generate(prompt_token_ids: Sequence[int], *, request_id: str, **kwargs: Any) -> Completion:
        if request_id.startswith("g/1"):
            await release.wait()
        return await Generator()(prompt_token_ids, request_id=request_id, **kwargs)

    calls: list[str] = []

    def judge(rollout: Rollout) -> float:
        calls.append(rollout.rollout_id)
        judged.set()
        return float(rollout.sibling)

    group = asyncio.ensure_future(Stage(rubric=Rubric([Reward(judge)])).group(generate, size=2))
    await asyncio.wait_for(judged.wait(), HANG_S)
    assert not group.done()
    release.set()
    assert [rollout.reward for rollout in (await group).rollouts] == [0.0, 1.0]
    assert sorted(calls) == ["g/0", "g/1"]  # once each


async def test_environment_can_set_token_advantages() -> None:
    class Marked(Env):
        marks = (0.25, -0.25)

        async def step(self, completion: Completion) -> TokenStep:
            return TokenStep(status=RolloutStatus.COMPLETED, token_advantages=self.marks)

    stage = Stage(lambda _: Marked())
    group = await stage.group(Generator(), size=3)
    assert [list(rollout.turns[0].token_advantages or ()) for rollout in group.rollouts] == [[0.25, -0.25]] * 3
    (sample, *_) = build_samples(group, temperature=1.0)
    rollout = group.rollouts[0]
    assert rollout.advantage is not None
    assert sample.advantages == [0, 0, 0, rollout.advantage + 0.25, rollout.advantage - 0.25]

    Marked.marks = (0.25, float("nan"))
    (rollout,) = (await stage.group(Generator())).rollouts
    assert rollout.status is RolloutStatus.ERROR_ENV
    assert "token_advantages = [0.25, nan]; the completion's 2 tokens need a finite one each" in (rollout.error or "")
