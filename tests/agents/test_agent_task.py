"""`AgentTask` with real programs over scripted engines: trained tokens, rollout statuses and remote harnesses."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from background import HANG_S
from serving.conversation_fakes import BASE, chat_template_renderer
from serving.served import CONTEXT, Engines, until

from titan_rl.core.console import ConsoleLines
from titan_rl.core.errors import ConfigError
from titan_rl.generation.router import GeneratorRouter
from titan_rl.rollout.group.rollouter import Rollouter
from titan_rl.rollout.rewards.reward import Reward
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.settings import RolloutConfig
from titan_rl.rollout.task import RunContext
from titan_rl.rollout.types import Rollout, RolloutGroup, RolloutStatus
from titan_rl.run.journal.run_journal import RunJournal
from titan_rl.tasks.agents import AgentTask
from titan_rl.tasks.agents.task import WaitingSamples
from titan_rl.training.data.sample_builder import build_samples
from titan_rl.types import Completion, FinishReason, SamplingParams, VersionSpan

TALKER = str(Path(__file__).parent / "talker.py")
SAMPLING = SamplingParams(max_tokens=16)
SAMPLE = {"question": "b a", "worth": 0.5}


class Stage:
    def __init__(
        self, task: AgentTask, router: GeneratorRouter, console: ConsoleLines, seed: int | None, **limits: Any
    ) -> None:
        self.router = router
        self.console = console
        self.rollouter = Rollouter(
            lambda sample: task.make_env(sample, chat_template_renderer()),
            task.rubric(),
            max_context=CONTEXT,
            limits=RolloutConfig(**{"max_turns": 50, **limits}),
            seed=seed,
        )

    async def group(self, sample: Any = SAMPLE, size: int = 2, generate: Any = None) -> RolloutGroup:
        return await self.rollouter.run_group(
            generate or self.router.generate, sample, group_id="train-1", group_size=size, sampling=SAMPLING
        )


@asynccontextmanager
async def stage(
    folder: Path,
    limits: dict[str, Any] | None = None,
    kind: type[AgentTask] = AgentTask,
    engines: Engines | None = None,
    seed: int | None = 0,
    **settings: Any,
) -> AsyncIterator[Stage]:
    settings = {"command": ("{python}", "-I", TALKER, "{question}"), "keep": "all", **settings}
    task = kind(**settings)
    console = ConsoleLines()
    run = RunContext(str(BASE), chat_template_renderer(), CONTEXT, folder, console)
    engines = engines or Engines(2, vocab_size=400, mean_tokens=6)
    async with engines.router() as router, task.open(run):
        yield Stage(task, router, console, seed, **(limits or {}))


def answers(folder: Path, name: str) -> list[list[int]]:
    return json.loads((folder / "agents" / name / "answers.json").read_text())


def answered(folder: Path, name: str) -> list[list[int]]:
    """Tokens of the completions that an agent received, by branch."""
    first, second, other = answers(folder, name)
    return sorted([[*first, *second], other])


def trained(rollout: Rollout) -> list[list[int]]:
    """Tokens that are trained, by branch."""
    rollout.advantage = 1.0
    return sorted(
        [token for token, is_trained in zip(sample.token_ids, sample.loss_mask, strict=True) if is_trained]
        for sample in build_samples(RolloutGroup("g", None, [rollout]))
    )


def addresses(folder: Path) -> list[Path]:
    return list(folder.glob("agents-*.json"))


async def test_trained_tokens_equal_the_agents_completions(tmp_path: Path) -> None:
    async with stage(tmp_path) as it:
        group = await it.group()
        assert it.console[0].startswith("agents ask the policy at http://127.0.0.1:")
    for rollout in group.rollouts:
        assert (rollout.status, rollout.error, rollout.reward) == (RolloutStatus.COMPLETED, None, 0.5)
        assert trained(rollout) == answered(tmp_path, f"train-1.{rollout.sibling}")
        assert [message["content"] for message in rollout.messages if message["role"] == "user"] == [
            "b a", "more", "or else?",
        ]  # fmt: skip


async def test_seeded_rollouts_are_unaffected_by_updates_pauses_and_deaths(tmp_path: Path) -> None:
    async with stage(tmp_path) as it:
        undisturbed = await it.group()
        troubling = asyncio.create_task(trouble(it.router))
        disturbed, _ = await asyncio.gather(it.group(), lose_a_replica(it.router))
        troubling.cancel()

    def tokens(group: RolloutGroup) -> list[list[list[int]]]:
        return [sorted(list(turn.completion.token_ids) for turn in rollout.turns) for rollout in group.rollouts]

    assert all(rollout.status is RolloutStatus.COMPLETED for rollout in disturbed.rollouts)
    assert tokens(disturbed) == tokens(undisturbed)
    for rollout in disturbed.rollouts:
        assert trained(rollout) == answered(tmp_path, f"train-1.{rollout.sibling}-2")
    assert (tmp_path / "agents" / "train-1.0-2").is_dir()


async def lose_a_replica(router: GeneratorRouter) -> None:
    """Remove a replica while it has requests."""
    async with asyncio.timeout(HANG_S):
        while not (busy := [replica.name for replica in router.replicas if replica.num_requests]):  # noqa: ASYNC110
            await asyncio.sleep(0)
    router.remove_replica(busy[0])


async def trouble(router: GeneratorRouter) -> None:
    version = 0
    while True:
        version += 1
        await router.pull_state_dict(version)
        await router.pause("keep")
        await router.resume()
        await asyncio.sleep(0.02)


async def test_crashed_agent_fails_only_its_rollout(tmp_path: Path) -> None:
    async with stage(tmp_path, keep="failed") as it:
        group = await it.group({**SAMPLE, "crash": True})
        fine = await it.group()
    for rollout in group.rollouts:
        assert rollout.status is RolloutStatus.ERROR_ENV
        output = tmp_path / "agents" / f"train-1.{rollout.sibling}" / "output.txt"
        assert rollout.error == f"the agent ended with exit code 1; its output ends: out of luck ({output})"
        assert len(rollout.turns) == 3
    assert all(rollout.status is RolloutStatus.COMPLETED for rollout in fine.rollouts)
    assert sorted(path.name for path in (tmp_path / "agents").iterdir()) == ["train-1.0", "train-1.1"]


async def test_agent_without_a_reward_fails_only_its_rollout(tmp_path: Path) -> None:
    async with stage(tmp_path, keep="failed") as it:
        group = await it.group({**SAMPLE, "silent": ["train-1.0"]})
    silent, reporting = group.rollouts
    assert group.failure is None
    assert (silent.status, silent.reward, len(silent.turns)) == (RolloutStatus.ERROR_ENV, None, 3)
    assert silent.error is not None
    assert "ended without reporting 'reward'" in silent.error
    assert '{"rewards": {"reward": 1.0}} to $TITAN_RL_EPISODE_URL/reward' in silent.error
    assert (reporting.status, reporting.reward) == (RolloutStatus.COMPLETED, 0.5)
    assert [path.name for path in (tmp_path / "agents").iterdir()] == ["train-1.0"]


class JudgedAgent(AgentTask):
    def rubric(self) -> Rubric:
        return Rubric([Reward(lambda rollout: float(len(rollout.turns)), name="talk")])


async def test_judged_agents_need_not_report_a_reward(tmp_path: Path) -> None:
    async with stage(tmp_path, kind=JudgedAgent) as it:
        (rollout,) = (await it.group({**SAMPLE, "silent": ["train-1.0"]}, size=1)).rollouts
    assert (rollout.status, rollout.error, rollout.reward) == (RolloutStatus.COMPLETED, None, 3.0)


@pytest.mark.parametrize(
    ("command", "limits", "status", "error"),
    [
        (("true",), {}, RolloutStatus.ERROR_ENV, "the agent ended without sending a request to the policy"),
        (
            ("sleep", "60"),
            {"rollout_timeout_s": 0.2},
            RolloutStatus.ERROR_TIMEOUT,
            "0.2 s (rollout.rollout_timeout_s)",
        ),
        (("{python}", "-I", TALKER, "{question}"), {"max_turns": 2}, RolloutStatus.TRUNCATED_TURNS, "its 2 turns"),
        (("echo", "{answer}"), {}, RolloutStatus.ERROR_ENV, "names 'answer'; the sample has question"),
    ],
)
async def test_agent_end_sets_the_rollout_status(
    tmp_path: Path, command: tuple[str, ...], limits: dict[str, Any], status: RolloutStatus, error: str
) -> None:
    async with stage(tmp_path, limits, command=command) as it:
        (rollout,) = (await it.group(size=1)).rollouts
    assert rollout.status is status
    assert error in (rollout.error or "")


async def test_agent_with_a_full_context_is_truncated(tmp_path: Path) -> None:
    async with stage(tmp_path) as it:
        (rollout,) = (await it.group({"question": "b " * CONTEXT}, size=1)).rollouts
    assert rollout.status is RolloutStatus.TRUNCATED_PROMPT
    assert "400" in (rollout.error or "")


async def test_generation_error_is_not_blamed_on_the_agent(tmp_path: Path) -> None:
    async def fails(*args: Any, **kwargs: Any) -> Any:
        raise OSError("no engine")

    async with stage(tmp_path) as it:
        (rollout,) = (await it.group(size=1, generate=fails)).rollouts
    assert (rollout.status, rollout.error) == (RolloutStatus.ERROR_GENERATE, "OSError: no engine")


async def test_remote_harness_takes_waiting_samples(tmp_path: Path) -> None:
    async with stage(tmp_path, command=()) as it:
        address = addresses(tmp_path)[0]
        assert address.stat().st_mode & 0o777 == 0o600
        server = json.loads(address.read_text())
        headers = {"authorization": f"Bearer {server['key']}"}
        async with httpx.AsyncClient(base_url=server["url"], headers=headers, timeout=300) as client:
            early = asyncio.create_task(client.post("/episodes", json={"wait_s": 60}))
            running = asyncio.create_task(it.group())
            for opened in ((await early).json(), (await client.post("/episodes", json={})).json()):
                assert opened["sample"] == SAMPLE
                own = {"x-api-key": opened["key"]}
                body = {"messages": [{"role": "user", "content": "b a"}]}
                async with httpx.AsyncClient(base_url=opened["base_url"], headers=own, timeout=300) as harness:
                    assert (await harness.post("/v1/chat/completions", json=body)).status_code == 200
                    await harness.post("/reward", json={"rewards": {"reward": 1.0}})
                    await harness.post("/end", json={})
            assert (await client.post("/episodes", json={})).status_code == 429
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 400
            group = await running
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 1.0]
    assert not addresses(tmp_path)


async def test_waiting_harness_gets_503_when_the_run_ends(tmp_path: Path, monkeypatch) -> None:
    asked, take = asyncio.Event(), WaitingSamples.take

    async def noting_take(waiting: WaitingSamples, wait_s: float) -> Any:
        asked.set()
        return await take(waiting, wait_s)

    monkeypatch.setattr(WaitingSamples, "take", noting_take)
    async with httpx.AsyncClient(timeout=300) as client:
        async with stage(tmp_path, command=()):
            server = json.loads(addresses(tmp_path)[0].read_text())
            headers = {"authorization": f"Bearer {server['key']}"}
            url = f"{server['url']}/episodes"
            waiting = asyncio.create_task(client.post(url, json={"wait_s": 60}, headers=headers))
            await asyncio.wait_for(asked.wait(), HANG_S)
        answer = await waiting
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the run is over")


async def test_address_file_has_the_hostname_when_listening_on_all_interfaces(tmp_path: Path) -> None:
    async with stage(tmp_path, command=(), host="0.0.0.0") as it:
        server = json.loads(addresses(tmp_path)[0].read_text())
        assert server["url"].startswith(f"http://{socket.gethostname()}:")
        assert it.console[0].startswith(f"harnesses open episodes at {server['url']}/episodes")


async def test_sample_that_no_harness_takes_times_out(tmp_path: Path) -> None:
    async with stage(tmp_path, command=(), harness_wait_s=0.05) as it:
        (rollout,) = (await it.group(size=1)).rollouts
    assert (rollout.status, rollout.error) == (
        RolloutStatus.ERROR_ENV, "no harness has taken it within 0.05 s",
    )  # fmt: skip


def test_train_samples_are_shuffled_per_epoch(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text("".join(f'{{"number": {number}}}\n' for number in range(10)))
    task = AgentTask(command=("true",), train_file=str(file), validation_file=str(file))
    epochs = [[task.train_sample(0, 10 * epoch + at)["number"] for at in range(10)] for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))
    assert epochs[0] != epochs[1]
    assert task.train_sample(1, 0) == task.train_sample(1, 0)
    assert [sample["number"] for sample in task.validation_samples(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match=r"train_file is not set"):
        AgentTask().train_sample(0, 0)
    with pytest.raises(ValueError, match="there is no file"):
        AgentTask(train_file="nowhere.jsonl")


async def test_port_in_use_error_gives_the_fix(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"task.port = {port}: .*leave task.port at 0"):
            async with stage(tmp_path, port=port):
                pass


class Numbered:
    """A `GenerateFn` that answers each request with a new number once `may_answer` is set.

    Attributes:
        asked: Ids of its requests.
    """

    def __init__(self, first: int = 100) -> None:
        self.asked: list[str] = []
        self.may_answer = asyncio.Event()
        self._first = first

    async def __call__(
        self, prompt_token_ids: Any, *, request_id: str, session_id: str | None = None, sampling: SamplingParams
    ) -> Completion:
        token_id = self._first + len(self.asked)
        self.asked.append(request_id)
        await self.may_answer.wait()
        return Completion(request_id, [token_id], [-0.5], FinishReason.LENGTH, [VersionSpan(0, 1)])


Ask = Callable[..., Coroutine[Any, Any, list[int]]]


@asynccontextmanager
async def harness(it: Stage, folder: Path, generate: Any) -> AsyncIterator[Ask]:
    """Yield a function that asks as the harness of a rollout and returns the tokens of the answers."""
    server = json.loads(addresses(folder)[0].read_text())
    running = asyncio.create_task(it.group(size=1, generate=generate))
    async with httpx.AsyncClient(timeout=300) as client:
        headers = {"authorization": f"Bearer {server['key']}"}
        opened = (await client.post(f"{server['url']}/episodes", json={"wait_s": 60}, headers=headers)).json()
        own = {"x-api-key": opened["key"]}

        async def ask(content: str, max_tokens: int = 8, n: int = 1) -> list[int]:
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": max_tokens, "n": n}
            body["return_token_ids"] = True
            answer = await client.post(f"{opened['base_url']}/v1/chat/completions", json=body, headers=own)
            assert answer.status_code == 200, answer.text
            return [token_id for choice in answer.json()["choices"] for token_id in choice["token_ids"]]

        yield ask
        await client.post(f"{opened['base_url']}/reward", json={"rewards": {"reward": 1.0}}, headers=own)
        await client.post(f"{opened['base_url']}/end", json={}, headers=own)
        await running


async def test_equal_requests_of_an_unseeded_rollout_get_separate_answers(tmp_path: Path) -> None:
    """Concurrently, as several completions of one request, and consecutively, as a retry or a best-of-n."""
    policy, journal = Numbered(), RunJournal(tmp_path / "journal")
    async with stage(tmp_path, command=(), seed=None) as it, harness(it, tmp_path, journal.record(policy, 1)) as ask:
        at_once = [asyncio.create_task(ask("b a")) for _ in range(2)]
        at_once += [asyncio.create_task(ask("other")), asyncio.create_task(ask("b a", n=2))]
        await until(lambda: len(policy.asked) == 5)
        policy.may_answer.set()
        answers = [token_id for answer in await asyncio.gather(*at_once) for token_id in answer]
        for _ in range(3):
            answers += await ask("b a")
    assert sorted(answers) == list(range(100, 108))
    assert len(set(policy.asked)) == 8
    journal.close()


async def test_rerun_of_an_unseeded_rollout_finds_its_recorded_answers(tmp_path: Path) -> None:
    """In any order of requests; requests without a recorded answer are generated."""
    policy, journal = Numbered(), RunJournal(tmp_path / "journal")
    policy.may_answer.set()
    async with stage(tmp_path, command=(), seed=None) as it:
        async with harness(it, tmp_path, journal.record(policy, 1)) as ask:
            before = [await ask("b a"), await ask("b a"), await ask("other"), await ask("b a", max_tokens=4)]
        journal.drain()
        policy, journal = Numbered(first=300), RunJournal(tmp_path / "journal")
        policy.may_answer.set()
        async with harness(it, tmp_path, journal.record(policy, 1)) as ask:
            again = [await ask("other"), await ask("b a", max_tokens=4), await ask("b a"), await ask("b a")]
            assert [again[2], again[3], again[0], again[1]] == before
            assert policy.asked == []
            assert [await ask("b a"), await ask("new")] == [[300], [301]]
    journal.close()
