"""Real generators: one is killed in the middle of its requests, which go on elsewhere from what they had."""

import asyncio
import contextlib
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")
pytest.importorskip("vllm", reason="needs the cpu or gpu extra")

from e2e.runs import REPOSITORY, process_writing_to

from titan_rl.actors.cluster import Cluster, start_cluster
from titan_rl.actors.replica import ActorReplica
from titan_rl.config.load import load_config
from titan_rl.errors import EngineDeadError
from titan_rl.observability.run_dir import RunDirectory
from titan_rl.routing import GeneratorRouter
from titan_rl.statedict.board import VersionBoard
from titan_rl.types import Completion, FinishReason, SamplingParams

LENGTH = 200


async def test_sigkill_loses_no_request_and_at_most_the_interval_of_tokens(tmp_path: Path, monkeypatch) -> None:
    streamed: dict[str, list[int]] = {}  # engine id -> tokens told of
    far: Counter[str] = Counter()  # requests of each generator that are some way on
    enough = asyncio.Event()
    stream = ActorReplica.stream

    async def spy(replica: ActorReplica, prompt, *, request_id: str, on_tokens, **arguments) -> Completion:
        def tell(part: Completion) -> None:
            tokens = streamed.setdefault(request_id, [])
            far[replica.name] += len(tokens) < 32 <= len(tokens) + len(part.token_ids)
            tokens.extend(part.token_ids)
            if max(far.values()) == 8:
                enough.set()
            on_tokens(part)

        return await stream(replica, prompt, request_id=request_id, on_tokens=tell, **arguments)

    monkeypatch.setattr(ActorReplica, "stream", spy)
    monkeypatch.chdir(REPOSITORY)
    config = load_config("examples/alphabet_sort/cpu.toml", [("generation.stream_interval", "16")])
    run_dir, board = RunDirectory(tmp_path / "run"), VersionBoard()
    sampling = SamplingParams(max_tokens=LENGTH, min_tokens=LENGTH)
    async with start_cluster(config, run_dir, board) as cluster:
        router = GeneratorRouter(cluster.replicas)
        await sync(cluster, board, router)
        watch = asyncio.ensure_future(cluster.watch(router))
        requests = [
            asyncio.ensure_future(router.generate([5, 6, 7, index], request_id=f"r{index}", sampling=sampling))
            for index in range(32)
        ]
        await asyncio.wait_for(enough.wait(), 60)
        ((doomed, _),) = far.most_common(1)
        os.kill(process_writing_to(run_dir.logs / f"{doomed}.log"), signal.SIGKILL)
        completions = await asyncio.wait_for(asyncio.gather(*requests), 120)

        resumed = [c for c in completions if c.metrics.get("num_resumes")]
        assert resumed
        for completion in completions:
            assert (len(completion.token_ids), completion.finish_reason) == (LENGTH, FinishReason.LENGTH)
        for completion in resumed:
            kept = streamed[completion.request_id]
            assert list(completion.token_ids[: len(kept)]) == kept

        await until_both_serve(router, watch)

        # An engine that has ended in a process that lives is replaced with its process, and so is one that is starting.
        broken = next(replica for replica in cluster.replicas if replica.name != doomed)
        log = run_dir.logs / f"{broken.name}.log"
        before = process_writing_to(log)
        cluster.on_replica_failed(broken, EngineDeadError("the engine failed"))
        second = await another_process(log, before)
        assert len(router.members) == 1
        os.kill(second, signal.SIGKILL)
        assert await another_process(log, second) != before
        await until_both_serve(router, watch)
        watch.cancel()
        await router.close()
        await cluster.trainer.close()


async def another_process(log: Path, than: int) -> int:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(ProcessLookupError):
                if (pid := process_writing_to(log)) != than:
                    return pid
            await asyncio.sleep(0.05)


async def until_both_serve(router: GeneratorRouter, watch: asyncio.Future[None]) -> None:
    async with asyncio.timeout(120):
        while [member.serving for member in router.members] != [True, True]:
            await asyncio.wait([watch], timeout=0.2)
            assert not watch.done()
    assert [member.version for member in router.members] == [0, 0]


async def sync(cluster: Cluster, board: VersionBoard, router: GeneratorRouter) -> None:
    manifest = await cluster.trainer.publish()
    board.announce(manifest)
    await router.pull_state_dict(manifest.version)
