"""Pauses, aborts and pulls on real generators: nothing is lost, and requests go on where they were."""

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")
pytest.importorskip("vllm", reason="needs the cpu or gpu extra")

from e2e.runs import REPOSITORY

from titan_rl.actors.cluster import Cluster, start_cluster
from titan_rl.config.load import load_config
from titan_rl.errors import GenerationError
from titan_rl.generation.resume import resume_on_abort
from titan_rl.observability.run_dir import RunDirectory
from titan_rl.routing import GeneratorRouter
from titan_rl.statedict.board import VersionBoard
from titan_rl.types import Completion, FinishReason, GenerateFn, SamplingParams

LENGTH = 200
SAMPLING = SamplingParams(max_tokens=LENGTH, min_tokens=LENGTH, temperature=1.0)
SETTINGS = [("generation.max_running", "2"), ("generation.stream_interval", "4")]


class Stage:
    """Two real generators that run two requests each."""

    def __init__(self, cluster: Cluster, board: VersionBoard, router: GeneratorRouter) -> None:
        self.cluster, self.board, self.router = cluster, board, router
        self._names = iter(range(10_000))

    def ask(self, count: int, generate: GenerateFn | None = None) -> list[asyncio.Future[Completion]]:
        generate = generate or self.router.generate
        return [
            asyncio.ensure_future(generate([5, 6, 7, n], request_id=f"r{next(self._names)}", sampling=SAMPLING))
            for n in range(count)
        ]

    async def running(self, requests: list[asyncio.Future[Completion]], tokens: int = 8) -> None:
        """Return once one of these has streamed that many tokens."""
        async with asyncio.timeout(60):
            while max((len(c.token_ids) for c in self.router.tokens_so_far().values()), default=0) < tokens:
                await asyncio.wait(requests, timeout=0.001)

    async def publish(self, mode: str = "hot_swap") -> int:
        manifest = await self.cluster.trainer.publish()
        self.board.announce(manifest)
        await self.router.pull_state_dict(manifest.version, mode)  # pyright: ignore[reportArgumentType]
        return manifest.version


async def test_real_generators_keep_what_they_have_through_pauses_and_pulls(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    config = load_config("examples/alphabet_sort/cpu.toml", SETTINGS)
    run_dir, board = RunDirectory(tmp_path / "run"), VersionBoard()
    async with start_cluster(config, run_dir, board) as cluster:
        router = GeneratorRouter(cluster.replicas)
        stage = Stage(cluster, board, router)
        async with asyncio.timeout(240), asyncio.TaskGroup() as background:
            watch = background.create_task(cluster.watch(router))
            await stage.publish()
            await aborts_are_invisible(stage)
            await a_pause_keeps_or_waits(stage)
            await an_abort_ends_with_what_there_is(stage)
            await drain_serves_meanwhile(stage)
            watch.cancel()
        await router.close()
        await cluster.trainer.close()


async def aborts_are_invisible(stage: Stage) -> None:
    """Six requests, two at a time on each of two engines, through two pauses that abort them all."""
    generate = resume_on_abort(stage.router.generate, wait_until_resumed=stage.router.wait_resumed)
    requests = stage.ask(6, generate)
    for _ in range(2):
        await stage.running(requests)
        report = await stage.router.pause("abort")
        assert (report.cancelled, dict(report.failed)) == ((), {})
        assert stage.router.tokens_so_far() == {}
        await stage.router.resume()
    completions = await asyncio.gather(*requests)
    for completion in completions:
        assert completion.finish_reason is FinishReason.LENGTH
        assert len(completion.token_ids) == len(completion.logprobs) == LENGTH
    assert any(completion.metrics["num_resumes"] >= 2 for completion in completions)


async def a_pause_keeps_or_waits(stage: Stage) -> None:
    requests = stage.ask(4)
    await stage.running(requests)
    await stage.router.pause("keep")
    await asyncio.wait(requests, timeout=0.2)  # whatever was on its way has arrived
    frozen = stage.router.tokens_so_far()
    done, _ = await asyncio.wait(requests, timeout=0.5)
    assert not done
    assert stage.router.tokens_so_far() == frozen
    await stage.router.resume()
    completions = await asyncio.gather(*requests)
    assert [(c.finish_reason, len(c.token_ids)) for c in completions] == [(FinishReason.LENGTH, LENGTH)] * 4
    assert not any(completion.metrics.get("num_resumes") for completion in completions)

    requests = stage.ask(4)
    await stage.running(requests)
    report = await stage.router.pause("wait")
    assert report.aborted == ()
    assert [len(completion.token_ids) for completion in await asyncio.gather(*requests)] == [LENGTH] * 4
    late = stage.ask(1)
    done, _ = await asyncio.wait(late, timeout=0.3)
    assert not done
    await stage.router.resume()
    assert len((await late[0]).token_ids) == LENGTH


async def an_abort_ends_with_what_there_is(stage: Stage) -> None:
    requests = stage.ask(6)
    await stage.running(requests)
    assert await stage.router.abort() == ()
    completions = await asyncio.gather(*requests)
    assert {completion.finish_reason for completion in completions} == {FinishReason.ABORT}
    assert any(completion.token_ids for completion in completions)
    assert all(len(completion.token_ids) == len(completion.logprobs) < LENGTH for completion in completions)
    with pytest.raises((RuntimeError, GenerationError), match="not paused"):
        await stage.router.resume()


async def drain_serves_meanwhile(stage: Stage) -> None:
    requests = stage.ask(4)
    await stage.running(requests)
    await stage.cluster.trainer.step(samples())
    draining = asyncio.ensure_future(stage.publish("drain"))
    late = stage.ask(4)
    assert await draining == 1
    completions = await asyncio.gather(*requests, *late)
    assert all(len(completion.token_ids) == LENGTH for completion in completions)
    assert all(len(completion.version_spans) == 1 for completion in completions), "a drained request mixes no weights"
    assert [member.version for member in stage.router.members] == [1, 1]
    requests = stage.ask(4)
    await stage.running(requests)
    await stage.cluster.trainer.step(samples())
    assert await stage.publish("hot_swap") == 2
    swapped = await asyncio.gather(*requests)
    assert any([span.version for span in completion.version_spans] == [1, 2] for completion in swapped)


def samples() -> list:
    from titan_rl.training.sample import TrainingSample

    tokens, mask = [5, 6, 7, 8, 9, 10], [False, False, True, True, True, True]
    values = [0.0, 0.0, -1.0, -1.0, -1.0, -1.0]
    versions = [-1, -1, 0, 0, 0, 0]
    return [TrainingSample("g", "g/0", tokens, mask, values, values, versions, temperature=1.0)]
