"""`AgentTask`, whose rollouts are played by agents: programs started for each rollout, or external harnesses.

One host in each process serves the policy to the agents, and offers samples to the harnesses.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import secrets
import shutil
import socket
from collections.abc import AsyncGenerator, Generator, Sequence, Set
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import PrivateAttr

from titan_rl.core.calls.threads import in_thread
from titan_rl.core.calls.user_code import Failure
from titan_rl.core.errors import BusyError, ConfigError, EpisodeEndedError, RequestError
from titan_rl.core.plain_data import plain_json
from titan_rl.core.tracing.spans import span
from titan_rl.generation.continuation import request_fn
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.rollout.environment.types import AgentEnv, RolloutPolicy
from titan_rl.rollout.renderer.tokenizer import load_tokenizer
from titan_rl.rollout.renderer.types import Renderer
from titan_rl.rollout.rewards.reward import env_reward
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.task import RunContext
from titan_rl.rollout.types import Rollout, RolloutStatus
from titan_rl.serving.api_keys import Keys
from titan_rl.serving.app import PolicyApp, make_app
from titan_rl.serving.episode import Episode, EpisodeLimits
from titan_rl.serving.episode_store import EpisodeStore, Opened
from titan_rl.serving.http.errors import ApiError
from titan_rl.serving.http.exchange import ServerLimits
from titan_rl.serving.policy import uninterrupted
from titan_rl.serving.server import external_url, serve
from titan_rl.tasks.agents.program import AgentProgram, agent_environment, agent_processes, make_folder
from titan_rl.tasks.agents.settings import AgentSettings, check_command, fields_of, filled_in
from titan_rl.tasks.row_files import read_rows
from titan_rl.types import Completion, FinishReason


class AgentTask(AgentSettings):
    """Task whose rollouts are episodes of an agent. The agent queries the policy over HTTP, in the protocol of OpenAI
    or Anthropic, and reports its rewards.

    Override `train_sample` and `validation_samples` for other data, and `rubric` to judge agents by the messages of
    their rollouts.
    """

    _host: AgentHost | None = PrivateAttr(None)
    _files: dict[str, list[Any]] = PrivateAttr(default_factory=dict)  # rows by path, each read once

    def train_sample(self, seed: int, index: int) -> Any:
        rows = self._rows(self.train_file, "train_file")
        epoch, at = divmod(index, len(rows))
        return rows[_order(len(rows), seed, epoch)[at]]

    def validation_samples(self, count: int) -> Sequence[Any]:
        return self._rows(self.validation_file, "validation_file")[:count] if count else []

    def make_env(self, sample: Any, renderer: Renderer) -> AgentEnv:
        if self._host is None:
            raise RuntimeError("an AgentTask makes environments only while it is open")
        return AgentRollout(self._host, sample)

    def rubric(self) -> Rubric:
        return Rubric([env_reward(name, weight) for name, weight in self.rewards.items()])

    def check_settings(self) -> None:
        """Read the first samples, and look up the command.

        Raises:
            ConfigError: a file has no samples, or the command cannot be started for the first sample.
        """
        sample = self.train_sample(0, 0)
        if self.validation_file:
            self.validation_samples(1)
        if self.command:
            fields = fields_of(plain_json(sample), file=Path(SAMPLE), started_in=Path.cwd())
            check_command(self.command, self.environment, fields)

    @asynccontextmanager
    async def open(self, run: RunContext) -> AsyncGenerator[None]:
        """Context in which the policy is served to agents."""
        async with serve_agents(self, run) as self._host:
            try:
                yield
            finally:
                self._host = None

    def _rows(self, path: str, setting: str) -> list[Any]:
        if not path:
            raise ConfigError(f"task.{setting} is not set; name a file of samples, such as JSON lines")
        if path not in self._files:
            try:
                self._files[path] = read_rows(path)
            except ConfigError as error:
                raise ConfigError(f"task.{setting} = {path!r}: {error}") from error
        return self._files[path]


@lru_cache(maxsize=4)
def _order(count: int, seed: int, epoch: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


class WaitingSamples:
    """Queue of samples that wait for external harnesses."""

    def __init__(self) -> None:
        self._offers: asyncio.Queue[tuple[Opened, asyncio.Future[None]] | None] = asyncio.Queue()  # None ends the run

    @contextmanager
    def offered(self, episode: Episode, sample: Any) -> Generator[asyncio.Future[None]]:
        """Offer a sample during the block. The future is done once a harness has taken it."""
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._offers.put_nowait((Opened(episode, sample), taken))
        try:
            yield taken
        finally:
            taken.cancel()

    async def take(self, wait_s: float) -> Opened:
        """Take the sample that has waited longest.

        Args:
            wait_s: Longest wait for a sample.

        Raises:
            BusyError: no sample is waiting.
            ApiError: the run is over (status 503).
        """
        try:
            async with asyncio.timeout(wait_s):
                while (offer := await self._offers.get()) is not None:
                    opened, taken = offer
                    if not taken.done():  # otherwise the sample was withdrawn
                        taken.set_result(None)
                        return opened
        except TimeoutError:
            raise BusyError("no sample is waiting for a harness; try again, or use a longer wait_s") from None
        self.close()  # wakes the other waiting harnesses
        raise ApiError(503, "the run is over", code="run_over")

    def close(self) -> None:
        """End the run for waiting and later harnesses."""
        self._offers.put_nowait(None)


KEY_VARIABLE = "TITAN_RL_HARNESS_KEY"
"""Environment variable with the key for opening episodes. Without it each run makes a new key."""

_UNLIMITED = 1 << 20  # the run itself limits the number and time of rollouts


@dataclass(frozen=True, slots=True)
class AgentHost:
    """Shared resources of the agents of one process.

    Args:
        settings: Settings of the task.
        url: URL of the policy server.
        folder: Parent of the rollouts' folders.
        started_in: Current folder at the start of the run.
        store: Episodes of the server.
        program: Runs agent programs.
        waiting: Samples that wait for external harnesses.
    """

    settings: AgentSettings
    url: str
    folder: Path
    started_in: Path
    store: EpisodeStore
    program: AgentProgram
    waiting: WaitingSamples


@asynccontextmanager
async def serve_agents(settings: AgentSettings, run: RunContext) -> AsyncGenerator[AgentHost]:
    """Context in which the policy is served. At its end no agent process is left."""
    # Programs end with their episodes and send no later requests, so episodes need not be kept for long.
    limits = EpisodeLimits(time_s=math.inf, episodes=_UNLIMITED, keep_s=5.0 if settings.command else 60.0)
    store = EpisodeStore(run.renderer, limits)
    waiting = WaitingSamples()
    tokenizer = await in_thread(load_tokenizer, run.model)  # not the renderer's, which another thread may be using
    key = os.environ.get(KEY_VARIABLE) or secrets.token_urlsafe(32)
    app = make_app(
        _refuse_to_generate,
        model="policy",
        any_model=True,
        max_context=run.max_context,
        tokenizer=tokenizer,
        renderer=run.renderer,
        keys=Keys([key]),
        limits=ServerLimits(num_places=_UNLIMITED, request_s=math.inf),
        episodes=store,
        open_episode=None if settings.command else waiting.take,
    )
    async with agent_processes() as processes, _served(app, settings) as url:
        program = AgentProgram(
            processes, output_bytes=settings.output_bytes, end_s=settings.end_s, is_kept=settings.keep != "none"
        )
        host = AgentHost(settings, url, run.folder / "agents", Path.cwd(), store, program, waiting)
        if settings.command:
            run.tell(f"agents ask the policy at {external_url(url)}")
            yield host
            return
        address = run.folder / f"agents-{socket.gethostname()}-{os.getpid()}.json"
        address.touch(0o600)
        address.write_text(json.dumps({"url": external_url(url), "key": key}), encoding="utf-8")
        run.tell(f"harnesses open episodes at {external_url(url)}/episodes, with the key in {address}")
        try:
            yield host
        finally:
            address.unlink(missing_ok=True)
            waiting.close()


@asynccontextmanager
async def _served(app: PolicyApp, settings: AgentSettings) -> AsyncGenerator[str]:
    async with AsyncExitStack() as stack:
        try:
            url = await stack.enter_async_context(serve(app, host=settings.host, port=settings.port))
        except ConfigError as error:
            if not settings.port:
                raise
            raise ConfigError(
                f"task.port = {settings.port}: {error}. Each rollout worker has its own server: with several "
                "(rollout.num_workers) leave task.port at 0, so that each takes a free port"
            ) from error
        yield url


async def _refuse_to_generate(request: EngineRequest, on_chunk: OnChunk | None) -> Completion:
    raise RequestError("this key can only open episodes; use the key of an episode for requests")


SAMPLE = "sample.json"
"""File with the sample in the folder of a rollout."""


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
        episode = self._host.store.open(
            policy.rollout_id.replace("/", "."),
            stream=uninterrupted(lambda request, on_chunk: _generate(policy, episode, request, on_chunk)),
            sampling=policy.sampling,
            session_id=policy.rollout_id,
            max_turns=policy.max_turns,
        )
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
                        await taken
            except TimeoutError:
                episode.end(RolloutStatus.ERROR_ENV, f"no harness has taken it within {limit_s:g} s")
        await episode.wait()


def _fill_in(rollout: Rollout, episode: Episode, policy: RolloutPolicy) -> None:
    episode.fill_in(rollout)
    reported = {name for turn in rollout.turns for name in turn.rewards}
    missing = [name for name in policy.env_rewards if name not in reported]
    if rollout.status is RolloutStatus.COMPLETED and missing:
        rollout.status, rollout.error = RolloutStatus.ERROR_ENV, _unrewarded(missing, reported)
    if rollout.status is RolloutStatus.ERROR_ENV and episode.num_prompt_tokens >= policy.max_context:
        # The policy filled the context, so a failure for lack of room is not the environment's.
        rollout.status = RolloutStatus.TRUNCATED_PROMPT


def _unrewarded(missing: Sequence[str], reported: Set[str]) -> str:
    body = json.dumps({"rewards": dict.fromkeys(missing, 1.0)})
    return (
        f"the agent ended without reporting {', '.join(map(repr, missing))}, which the rubric expects; it reported "
        f"{sorted(reported)}. Have it POST {body} to $TITAN_RL_EPISODE_URL/reward (an external harness: "
        "<base_url>/reward) before it ends"
    )


async def _generate(
    policy: RolloutPolicy, episode: Episode, request: EngineRequest, on_chunk: OnChunk | None
) -> Completion:
    """Send a request of the rollout. A failed or aborted request ends the episode with the matching status."""
    try:
        completion = await request_fn(policy.generate)(replace(request, session_id=policy.rollout_id), on_chunk)
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


async def _end_in_time(policy: RolloutPolicy, episode: Episode) -> None:
    await policy.time_is_up.wait()
    episode.time_is_up(_time_is_up(policy, episode))


def _time_is_up(policy: RolloutPolicy, episode: Episode) -> str:
    return (
        f"its time limit is over: it has used {policy.time_s:g} s (rollout.rollout_timeout_s), and the policy has "
        f"answered {episode.num_turns} of its requests"
    )
