"""Dry run without engines: a group of each task is played with a mock policy. This shows errors in an environment, a
reward, the renderer or a limit within a second, before any process starts."""

from __future__ import annotations

import asyncio
import contextlib
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice, takewhile
from pathlib import Path
from typing import Any

from titan_rl.config.build import (
    is_single_turn,
    leave_out_long_prompts,
    make_filters,
    make_renderer,
    open_rollouters,
)
from titan_rl.config.run import RunConfig
from titan_rl.config.tasks import TaskSource
from titan_rl.core.calls.bounded import OutOfTimeError
from titan_rl.core.calls.pulse import BLOCKED_AFTER_S, PULSE
from titan_rl.core.calls.threads import call_within, in_thread
from titan_rl.core.calls.user_code import where
from titan_rl.core.calls.watchdog import LoopWatchdog
from titan_rl.core.console import LOG, Console
from titan_rl.core.errors import ConfigError, DataError
from titan_rl.core.plain_data import safe_repr
from titan_rl.generation.continuation import resume_on_abort
from titan_rl.rollout.environment.messages import MessageTokenEnv
from titan_rl.rollout.environment.types import AgentEnv, SeatedEnv, TokenEnv, TokenObservation, TokenStep
from titan_rl.rollout.group.rollouter import Rollouter
from titan_rl.rollout.renderer import Renderer
from titan_rl.rollout.renderer.tokenizer import load_tokenizer
from titan_rl.rollout.task import DEMONSTRATED_CALL_S, DemonstratingTask, calling
from titan_rl.rollout.types import Message, Rollout, RolloutGroup, RolloutStatus
from titan_rl.run.journal.run_journal import RunJournal
from titan_rl.run.process.signals import run_to_its_end
from titan_rl.scheduling.filters import first_reason
from titan_rl.scheduling.task_mix import Assigned
from titan_rl.training.data.sft_tokens import encode
from titan_rl.training.losses import ClipRange, loss_problem
from titan_rl.types import Completion, FinishReason, SamplingParams, VersionSpan

ECHOED = 8


class MockPolicy:
    """`GenerateFn` without a model, for one group, whose id must have no slash. The siblings take turns in giving
    answers of different kinds: the demonstrated answer, the end of the prompt, nothing at all, and more tokens than
    allowed.

    Args:
        shown: Demonstrated answers to the first request of a rollout, the second, and so on, each with its stop token;
            the last one is repeated. If there are none, the end of the prompt is used.  # [num_turns][num_tokens]
        stop_token_id: Stop token of the other answers.
    """

    def __init__(self, shown: Sequence[Sequence[int]], stop_token_id: int) -> None:
        self._shown = shown
        self._stop = stop_token_id

    async def __call__(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> Completion:
        _, sibling, *_, turn = request_id.split("/")
        answer = self._answer(int(sibling) % 4, int(turn), prompt_token_ids, sampling.max_tokens)
        ends = FinishReason.STOP if len(answer) <= sampling.max_tokens else FinishReason.LENGTH
        answer = answer[: sampling.max_tokens]
        return Completion(request_id, answer, [0.0] * len(answer), ends, [VersionSpan(0, len(answer))])

    def _answer(self, kind: int, turn: int, prompt: Sequence[int], max_tokens: int) -> list[int]:
        plain = [token for token in prompt if token != self._stop][-ECHOED:]
        if kind == 0 and self._shown:
            return list(self._shown[min(turn, len(self._shown) - 1)])
        if kind == 2:
            return [self._stop]
        return plain[-1:] * (max_tokens + 1) if kind == 3 else [*plain, self._stop]


AnyEnv = TokenEnv | AgentEnv | SeatedEnv

SIBLINGS = 4  # one for each kind of answer of the mock policy
LIMIT_S = 60.0
GRACE_S = 15.0
"""Extra time for closing an environment that hangs, in seconds."""
ROLLOUT_LIMIT_S = 20.0
REPEATED = 4
"""Samples that are drawn twice."""
_NOT_READY = "not ready, the dry run is killed; make this line end by itself, as a simpler regular expression does"


@dataclass(frozen=True, slots=True)
class DryRunResult:
    """Result of the dry run of a task.

    Attributes:
        prompt: First prompt of the first rollout, as the model reads it; None if there was none.
        problems: Messages about problems with which a run would fail or learn nothing.
    """

    task: str
    prompt: str | None
    num_prompt_tokens: int
    group: RolloutGroup
    problems: tuple[str, ...]


def play_dry_run(config: RunConfig, console: Console) -> list[DryRunResult]:
    """Play the first training sample of each task, as a run would. Tasks of agents are skipped, because their programs
    are not started.

    Args:
        console: Console for reports of calls that block the event loop.

    Raises:
        ConfigError, ModelError: The renderer cannot be created.
        DataError: A sample cannot be created, or the dry run takes longer than `LIMIT_S`.
        RewardError: The advantage function failed, or a reward failed whose failure policy ends the run.
        MissingExtraError: The package that reads tokenizers is not installed.
    """
    DEMONSTRATED_CALL_S.set(min(config.rollout.env_timeout_s, ROLLOUT_LIMIT_S))
    began = time.monotonic()
    timer = threading.Timer(LIMIT_S + GRACE_S, lambda: PULSE.interrupt_if_late(time.monotonic() - began))
    timer.daemon = True
    PULSE.advise(_NOT_READY)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        parts = {Path(folder, str(number)): part for number, part in enumerate(_parts_of(config))}
        for run_folder in parts:
            run_folder.mkdir()
        timer.start()
        try:
            with PULSE.limited(LIMIT_S):  # also for code that blocks the event loop, and with it all time limits
                return run_to_its_end(_play_parts(parts, console))
        except OutOfTimeError as error:
            location = where(error)
            raise DataError(
                f"a group of each task took longer than {LIMIT_S:g} s without a model"
                + ("" if location is None else f": {location} blocks, and does not return")
            ) from None
        finally:
            timer.cancel()
            PULSE.advise("")


def problems_of_losses(config: RunConfig) -> list[str]:
    """Call each of the user's losses once, if torch is installed, and return the problems that this shows.

    Raises:
        ConfigError: A loss does not exist.
    """
    policies = {f"adapters.{name}: ": each.training for name, each in config.experiments.items()}
    problems = {
        prefix: loss_problem(training.loss, ClipRange(*training.clip))
        for prefix, training in (policies or {"": config.training}).items()
    }
    return [f"{prefix}{problem}" for prefix, problem in problems.items() if problem is not None]


def _parts_of(config: RunConfig) -> list[RunConfig]:
    """Configs whose tasks are played. In a run with several adapters, they are one for the tasks of all adapters, and
    one for each of the user's advantages."""
    parts: dict[str, RunConfig] = {}
    for experiment in config.experiments.values():
        advantage = experiment.training.advantage
        key = advantage if ":" in advantage else ""
        part = parts.get(key)
        if part is None:
            parts[key] = experiment
            continue
        tasks = {source.name: source for source in (*part.tasks, *experiment.tasks)}
        suites = {suite.name: suite for suite in (*part.validation.suites, *experiment.validation.suites)}
        validation = part.validation.model_copy(update={"suites": tuple(suites.values())})
        parts[key] = part.model_copy(update={"tasks": tuple(tasks.values()), "validation": validation})
    return list(parts.values()) or [config]


async def _play_parts(parts: Mapping[Path, RunConfig], console: Console) -> list[DryRunResult]:
    """Play the tasks of configs, by the folders of their runs."""
    return [result for folder, part in parts.items() for result in await _play_tasks(part, folder, console)]


async def _play_tasks(config: RunConfig, folder: Path, console: Console) -> list[DryRunResult]:
    renderer = make_renderer(config.model, single_turn=is_single_turn(config))
    env_timeout_s = min(config.rollout.env_timeout_s, ROLLOUT_LIMIT_S)
    update = {"max_retries": 0, "rollout_timeout_s": ROLLOUT_LIMIT_S, "env_timeout_s": env_timeout_s}
    limits = config.rollout.model_copy(update=update)
    limited = config.model_copy(update={"rollout": limits})
    limit = asyncio.timeout(LIMIT_S)
    try:
        opened = open_rollouters(limited, folder, LOG, renderer, dry=True)
        async with limit, opened as rollouters:
            for rollouter in rollouters.values():
                rollouter.rubric.limit_calls(ROLLOUT_LIMIT_S)
            with LoopWatchdog(console, blocked_after_s=BLOCKED_AFTER_S):
                context = config.model.max_context
                await in_thread(leave_out_long_prompts, config.sources, renderer, context, console)
                _check_held_out(config)
                with contextlib.closing(RunJournal(folder / "journal")) as journal:
                    played = [
                        await _play(limited, number, rollouters[source.name], renderer, journal)
                        for number, source in enumerate(limited.tasks)
                    ]
                return [result for result in played if result is not None]
    except TimeoutError:
        if not limit.expired():  # an error of the task
            raise
        raise DataError(f"a group of each task takes longer than {LIMIT_S:g} s without a model") from None


def _check_held_out(config: RunConfig) -> None:
    for suite in config.suites:
        with calling("validation_samples(1)", suite.source.name):
            if not list(islice(suite.source.task.validation_samples(1), 1)):
                raise ValueError(
                    f"it returned no sample, and {suite.num_prompts} are needed for validation; return some, or set "
                    "validation.num_prompts = 0"
                )


async def _play(
    config: RunConfig,
    number: int,
    rollouter: Rollouter,
    renderer: Renderer,
    journal: RunJournal,
) -> DryRunResult | None:
    """Play a group as training does, including the journal. Return None for a task of agents."""
    source = config.tasks[number]
    task, sampling = source.task, config.sampling_of(source)
    PULSE.advise(f"task {source.name[:80]!r}, train_sample({config.seed}, 0): {_NOT_READY}")
    stop_token_ids = renderer.get_stop_token_ids()
    with calling(f"train_sample({config.seed}, 0)", source.name):
        sample = task.train_sample(config.seed, 0)
    shown = await in_thread(_shown, source, renderer)
    rollouter.make_env = agents = _WithoutAgents(rollouter.make_env)
    policy = MockPolicy(shown, stop_token_ids[0])
    group = await rollouter.run_group(
        resume_on_abort(journal.record(policy, number), max_context=config.model.max_context),
        sample,
        group_id=f"{source.name}-0",
        group_size=SIBLINGS,
        sampling=SamplingParams(sampling.max_tokens, sampling.temperature, stop_token_ids=tuple(stop_token_ids)),
    )
    if agents.found:
        return None
    group.task = source.name
    first_reason(make_filters(config), group)
    journal.finished(Assigned(number, source.name, 0), group)
    journal.drain()
    first = next((rollout.turns[0].prompt_token_ids for rollout in group.rollouts if rollout.turns), None)
    return DryRunResult(
        source.name,
        None if first is None else load_tokenizer(config.model.path).decode(list(first)),
        len(first or ()),
        group,
        (
            *dict.fromkeys(_problems(group, shown, sampling.max_tokens)),
            *(_unread(group.rollouts[0].messages, renderer) if agents.speak else ()),
            *_untaught(config, source, group, renderer),
            *_unrepeatable(config, source),
        ),
    )


class _WithoutAgents:
    """Environment factory that replaces agents by environments that play nothing."""

    def __init__(self, make_env: Callable[[Any], AnyEnv]) -> None:
        self._make_env = make_env
        self.found = False
        self.speak = False  # whether the environments use messages, which the renderer converts to tokens

    def __call__(self, sample: Any) -> AnyEnv:
        env = self._make_env(sample)
        self.speak = isinstance(env, MessageTokenEnv)
        if not isinstance(env, AgentEnv):
            return env
        self.found = True
        return _Unplayed(env)


class _Unplayed:
    """`TokenEnv` that replaces an agent, and whose rollout fails before anything is begun."""

    def __init__(self, agent: AgentEnv) -> None:
        self._agent = agent

    async def reset(self) -> TokenObservation:
        raise NotImplementedError

    async def step(self, completion: Completion) -> TokenStep:
        raise NotImplementedError

    async def close(self) -> None:
        await self._agent.close()


def _shown(source: TaskSource, renderer: Renderer) -> list[list[int]]:
    """Encode the answers of the first demonstration, if there is one.  # [num_turns][num_tokens]"""
    task: Any = source.task
    if not isinstance(task, DemonstratingTask):
        return []
    try:
        with calling("demonstrations(1)", source.name):
            limit_s = ROLLOUT_LIMIT_S + GRACE_S
            demonstrations = call_within(lambda: list(islice(task.demonstrations(1), 1)), limit_s, "a demonstration")
    except DataError as error:
        if isinstance(error.__cause__, ConfigError):  # the task has no demonstrations
            return []
        raise
    tokens = [encode(renderer, demonstration) for demonstration in demonstrations]
    return [
        [token for token, _ in run]
        for one in tokens
        for learned, run in groupby(zip(one.token_ids, one.loss_mask, strict=True), key=lambda pair: pair[1])
        if learned
    ]


def _problems(group: RolloutGroup, shown: Sequence[Sequence[int]], max_tokens: int) -> Iterator[str]:
    if group.failure is not None:
        yield f"a reward failed: {group.failure}"
    for rollout in group.rollouts:
        if rollout.status.is_fault or (rollout.status is RolloutStatus.TRUNCATED_PROMPT and not rollout.turns):
            yield f"a rollout ends with {rollout.status}: {rollout.failure or rollout.error}"
    if not shown:
        return
    if (longest := max(map(len, shown))) > max_tokens:
        yield f"a demonstration's answer has {longest} tokens, and sampling.max_tokens = {max_tokens} cuts it off"
    if group.rollouts[0].status is RolloutStatus.ERROR_PARSE:
        yield "the answer of a demonstration cannot be parsed (error_parse): model.renderer does not fit the task"


def _unread(messages: Sequence[Message], renderer: Renderer) -> Iterator[str]:
    """Problems with messages before the first answer that the renderer leaves out."""
    opening = list(takewhile(lambda message: message.get("role") != "assistant", messages))
    if opening and not any(message.get("content") for message in opening):
        yield "the first prompt has no text"
        return
    for index, message in enumerate(opening):
        content = message.get("content")
        if content is None:
            yield f"message {index} of the first prompt has no content: {dict(message)!r}"
        if not isinstance(content, str) or not content.strip():
            continue
        longer = [*opening[:index], {**message, "content": f"{content}\n{content}"}, *opening[index + 1 :]]
        try:
            is_shown = list(renderer.render_ids(opening)) != list(renderer.render_ids(longer))
        except Exception:  # the template refuses an incomplete conversation
            continue
        if not is_shown:
            yield (
                f"message {index} of the first prompt is not shown to the model: the renderer leaves out messages "
                f"with role {message.get('role')!r}"
            )


def _unrepeatable(config: RunConfig, source: TaskSource) -> list[str]:
    """Problems with samples that differ between two calls. A resumed run draws its samples again."""
    task = source.task
    calls: dict[str, Callable[[], Any]] = {
        f"train_sample({config.seed}, {index})": partial(task.train_sample, config.seed, index)
        for index in range(REPEATED)
    }
    if any(suite.source is source for suite in config.suites):
        calls[f"validation_samples({REPEATED})"] = lambda: list(islice(task.validation_samples(REPEATED), REPEATED))
    for call, draw in calls.items():
        with calling(call, source.name):
            first, again = (re.sub(r" at 0x[0-9a-f]+", "", safe_repr(draw())) for _ in range(2))
        if first != again:
            return [
                f"{call} returned different samples in two calls: {first[:100]} and {again[:100]}; a resumed run draws "
                "its samples again, so use only the given rng, or random.Random(f'{seed}/{index}'), not random itself"
            ]
    return []


def _untaught(config: RunConfig, source: TaskSource, group: RolloutGroup, renderer: Renderer) -> Iterator[str]:
    """Problems with which the policy cannot teach itself.

    Raises:
        DataError: `teacher_messages` failed.
    """
    if config.teacher_of(source) != "self":
        return
    from titan_rl.run.open_teachers import PrivilegedPrompt

    limit = config.model.max_context
    for rollout in group.rollouts[:1]:
        if (length := len(PrivilegedPrompt(source, renderer)(rollout))) >= limit - 1:
            yield (
                f"teacher_messages have {length} tokens, and model.max_context = {limit} leaves no room for the "
                "policy's tokens, so none would be scored; return shorter messages, or raise model.max_context"
            )


def describe(result: DryRunResult, max_context: int) -> Iterator[str]:
    """Describe a result in lines: its prompt, and the results of its group."""
    if result.prompt is not None:
        yield f"{result.task}: the first prompt has {result.num_prompt_tokens} of {max_context} tokens:"
        yield from (f"  | {line}" for line in result.prompt.splitlines())
    ends = Counter(str(rollout.status) for rollout in result.group.rollouts)
    statuses = ", ".join(f"{count} {status}" for status, count in ends.items())
    rewards = " ".join(map(_reward, result.group.rollouts))
    yield f"{result.task}: {len(result.group.rollouts)} rollouts of a mock policy: {statuses}; rewards: {rewards}"
    yield from (f"{result.task}: error: {problem}" for problem in result.problems)


def _reward(rollout: Rollout) -> str:
    return "none" if rollout.reward is None or rollout.status.is_fault else f"{rollout.reward:.3g}"
