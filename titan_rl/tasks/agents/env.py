"""Rollout of an agent: an `AgentEnv` over an episode of the policy server."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from titan_rl.core.calls.plain import plain_json
from titan_rl.core.calls.threads import in_thread
from titan_rl.core.calls.user_code import Failure
from titan_rl.core.errors import EpisodeEndedError, RequestError
from titan_rl.core.tracing.spans import span
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.generation.resume import request_fn
from titan_rl.rollout.environment.types import RolloutPolicy
from titan_rl.rollout.types import Rollout, RolloutStatus
from titan_rl.serving.episode import Episode
from titan_rl.serving.policy import StreamFn, unbroken
from titan_rl.tasks.agents.host import AgentHost
from titan_rl.tasks.agents.program import agent_environment, make_folder
from titan_rl.tasks.agents.settings import fields_of, filled_in
from titan_rl.types import Completion, FinishReason

SAMPLE = "sample.json"
"""In the folder of a rollout."""


class AgentRollout:
    """An `AgentEnv`: an episode of the host's server, played by a program or by an external harness."""

    def __init__(self, host: AgentHost, sample: Any) -> None:
        self._host = host
        self._sample = sample

    async def play(self, policy: RolloutPolicy, rollout: Rollout) -> None:
        episode = self._open(policy)
        ending = asyncio.create_task(_end_in_time(policy, episode))
        folder: Path | None = None
        try:
            if self._host.settings.command:
                folder = await in_thread(make_folder, self._host.folder, episode.id)
                await self._run_program(episode, folder)
            else:
                await self._wait_for_harness(policy, episode)
        finally:
            ending.cancel()
            is_failed = episode.status is None or episode.status.is_error
            episode.end(RolloutStatus.ABORTED)
            _fill_in(rollout, episode, policy)
            if folder is not None:
                await self._keep_or_remove(folder, is_failed or rollout.status.is_error)

    async def close(self) -> None:
        pass

    def _open(self, policy: RolloutPolicy) -> Episode:
        async def stream(request: Any, on_chunk: Any) -> Completion:
            return await own(request, on_chunk)  # needs the episode, which is made first

        episode = self._host.store.open(
            policy.rollout_id.replace("/", "."),
            stream=stream,
            sampling=policy.sampling,
            session_id=policy.rollout_id,
            max_turns=policy.max_turns,
        )
        own = _stream_of(policy, episode)
        return episode

    async def _run_program(self, episode: Episode, folder: Path) -> None:
        host, settings = self._host, self._host.settings
        sample = plain_json(self._sample)
        (folder / SAMPLE).write_text(json.dumps(sample), encoding="utf-8")
        fields = fields_of(sample, file=folder / SAMPLE, started_in=host.started_in)
        command = [filled_in(part, fields) for part in settings.command]
        environment = {
            **os.environ,
            "TITAN_RL_SAMPLE": str(folder / SAMPLE),
            **agent_environment(host.url, episode),
            **{name: filled_in(value, fields) for name, value in settings.environment.items()},
        }
        with span("program", "environment", fine=True):
            await host.program.run(episode, command, environment, folder)

    async def _keep_or_remove(self, folder: Path, is_failed: bool) -> None:
        keep = self._host.settings.keep
        if keep == "none" or (keep == "failed" and not is_failed):
            await in_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _wait_for_harness(self, policy: RolloutPolicy, episode: Episode) -> None:
        limit_s = self._host.settings.harness_wait_s
        with self._host.waiting.offered(episode, self._sample) as taken:
            try:
                with policy.waiting():
                    async with asyncio.timeout(limit_s):
                        await taken.wait()
            except TimeoutError:
                episode.end(RolloutStatus.ERROR_ENV, f"no harness has come for it within {limit_s:g} s")
        await episode.wait()


def _fill_in(rollout: Rollout, episode: Episode, policy: RolloutPolicy) -> None:
    episode.fill_in(rollout)
    reported = {name for turn in rollout.turns for name in turn.rewards}
    missing = [name for name in policy.env_rewards if name not in reported]
    if rollout.status is RolloutStatus.COMPLETED and missing:
        rollout.status, rollout.error = RolloutStatus.ERROR_ENV, _unrewarded(missing, reported)
    if rollout.status is RolloutStatus.ERROR_ENV and episode.num_prompt_tokens >= policy.max_context:
        # A failure for lack of room is the policy's fault, which filled the context.
        rollout.status = RolloutStatus.TRUNCATED_PROMPT


def _unrewarded(missing: Sequence[str], reported: Set[str]) -> str:
    said = f"of what the rubric expects it reported no {', '.join(map(repr, missing))}, only {sorted(reported)}"
    body = json.dumps({"rewards": dict.fromkeys(missing, 1.0)})
    return (
        f"the agent ended, and {said}; have it POST {body} to $TITAN_RL_EPISODE_URL/reward (a harness elsewhere: "
        "<base_url>/reward) before it ends"
    )


def _stream_of(policy: RolloutPolicy, episode: Episode) -> StreamFn:
    """Stream of the rollout's requests. A failed or aborted request ends the episode with the matching status."""

    generate = request_fn(policy.generate)

    async def ask(request: EngineRequest, on_chunk: OnChunk | None) -> Completion:
        try:
            completion = await generate(replace(request, session_id=policy.rollout_id), on_chunk)
        except RequestError:
            raise
        except TimeoutError as error:
            episode.end(RolloutStatus.ERROR_TIMEOUT, Failure.of(error))
            raise
        except Exception as error:
            episode.end(RolloutStatus.ERROR_GENERATE, Failure.of(error))
            raise
        if completion.finish_reason is FinishReason.ABORT:
            if policy.time_is_up.is_set():
                episode.time_is_up(_time_is_up(policy, episode))
            else:
                episode.end(RolloutStatus.ABORTED, "its generation was aborted")
            raise EpisodeEndedError(f"the episode is over: {episode.status}")
        return completion

    return unbroken(ask)


async def _end_in_time(policy: RolloutPolicy, episode: Episode) -> None:
    await policy.time_is_up.wait()
    episode.time_is_up(_time_is_up(policy, episode))


def _time_is_up(policy: RolloutPolicy, episode: Episode) -> str:
    return (
        f"its own time is up: it has used {policy.time_s:g} s (rollout.rollout_timeout_s), and the policy has answered "
        f"it {episode.num_turns} times"
    )
