"""Real generators under pulls, pauses, aborts and SIGKILL: requests resume from their tokens and none is lost.

All tests share one set of processes with real engines. The last tests kill some of them.
"""

import asyncio
import contextlib
import os
import signal
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
import pytest_asyncio

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")
pytest.importorskip("vllm", reason="needs the cpu or gpu extra")

import openai
import transformers
from e2e.agent import Agent
from e2e.generator_stage import LENGTH, LIMIT_S, Stage
from e2e.runs import REPOSITORY, process_writing_to

from titan_rl.cluster.actor_replica import ActorReplica
from titan_rl.cluster.processes.fork_server import fork_servers, forked_kinds
from titan_rl.cluster.run_processes import start_processes
from titan_rl.config.load import load_config
from titan_rl.core.errors import ActorDiedError, GenerationError
from titan_rl.generation.continuation import resume_on_abort
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.generation.router import GeneratorRouter
from titan_rl.rollout.renderer import ChatTemplateRenderer
from titan_rl.run.directory import RunDirectory
from titan_rl.serving.app import make_app
from titan_rl.serving.server import serve
from titan_rl.types import Completion, FinishReason, TokenChunk
from titan_rl.weights.types import PublishedWeights

pytestmark = pytest.mark.asyncio(loop_scope="module")

BASE = REPOSITORY / "examples" / "alphabet_sort" / "base"
SETTINGS = [
    ("generation.max_running", "2"),  # so that requests queue
    ("generation.stream_interval", "4"),
    ("hosts.max_respawns", "2"),
    ("statedict.transport", "rdma"),  # readers on the trainer's host map its memory, as with shared_memory
]
STALL_S = 8.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    run_dir, published = RunDirectory(tmp_path_factory.mktemp("generators") / "run"), PublishedWeights()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPOSITORY)
        config = load_config("examples/alphabet_sort/cpu.toml", SETTINGS)
        with fork_servers(forked_kinds(config, trains=True, generates=True)):
            async with start_processes(config, run_dir, published) as processes:
                router = GeneratorRouter(
                    processes.replicas, stall_timeout_s=STALL_S, on_replica_failed=processes.on_replica_failed
                )
                stage = Stage(processes, published, router, run_dir)
                await stage.publish()
                yield stage
                stage.watch.cancel()
                await router.close()
                with contextlib.suppress(ActorDiedError):
                    await processes.training.trainer.close()


async def test_remote_generator_pulls_while_serving(stage: Stage) -> None:
    """Over the network, in Monarch's TCP fallback, and verified by the trainer's logprobs."""
    await stage.step()
    requests = stage.ask(2)
    await stage.running(requests)
    assert await stage.publish(host="elsewhere") == 1
    assert [len(completion.token_ids) for completion in await asyncio.gather(*requests)] == [LENGTH] * 2


async def test_aborted_requests_resume_and_complete(stage: Stage) -> None:
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


async def test_pause_keeps_or_drains_running_requests(stage: Stage) -> None:
    requests = stage.ask(4)
    await stage.running(requests)
    await stage.router.pause("keep")
    await asyncio.wait(requests, timeout=0.2)  # let the tokens in flight arrive
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


async def test_abort_returns_partial_completions(stage: Stage) -> None:
    requests = stage.ask(6)
    await stage.running(requests)
    assert await stage.router.abort() == ()
    completions = await asyncio.gather(*requests)
    assert {completion.finish_reason for completion in completions} == {FinishReason.ABORT}
    assert any(completion.token_ids for completion in completions)
    assert all(len(completion.token_ids) == len(completion.logprobs) < LENGTH for completion in completions)
    with pytest.raises((RuntimeError, GenerationError), match="not paused"):
        await stage.router.resume()


async def test_drain_serves_requests_while_pulling(stage: Stage) -> None:
    before = stage.version
    requests = stage.ask(4)
    await stage.running(requests)
    await stage.step()
    draining = asyncio.ensure_future(stage.publish("drain"))
    late = stage.ask(4)
    assert await draining == before + 1
    completions = await asyncio.gather(*requests, *late)
    assert all(len(completion.token_ids) == LENGTH for completion in completions)
    assert all(len(completion.version_spans) == 1 for completion in completions), "a drained request mixes no weights"
    assert [replica.version for replica in stage.router.replicas] == [before + 1] * 2
    requests = stage.ask(4)
    await stage.running(requests)
    await stage.step()
    assert await stage.publish("hot_swap") == before + 2
    swapped = await asyncio.gather(*requests)
    assert any(
        [span.version for span in completion.version_spans] == [before + 1, before + 2] for completion in swapped
    )


async def test_sigkill_loses_no_request_and_keeps_streamed_tokens(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamed: dict[str, list[int]] = {}  # tokens streamed by request
    far: Counter[str] = Counter()  # number of requests with 32 tokens, by generator
    enough = asyncio.Event()
    stream = ActorReplica.stream

    async def spy(replica: ActorReplica, request: EngineRequest, on_chunk: OnChunk) -> Completion:
        def record(chunk: TokenChunk) -> None:
            tokens = streamed.setdefault(request.request_id, [])
            far[replica.name] += len(tokens) < 32 <= len(tokens) + len(chunk.token_ids)
            tokens.extend(chunk.token_ids)
            if max(far.values()) == 2:
                enough.set()
            on_chunk(chunk)

        return await stream(replica, request, record)

    monkeypatch.setattr(ActorReplica, "stream", spy)
    requests = stage.ask(8)
    await asyncio.wait_for(enough.wait(), LIMIT_S)
    ((doomed, _),) = far.most_common(1)
    os.kill(process_writing_to(stage.run_dir.logs / f"{doomed}.log"), signal.SIGKILL)
    completions = await asyncio.wait_for(asyncio.gather(*requests), LIMIT_S)

    resumed = [c for c in completions if c.metrics.get("num_resumes")]
    assert resumed
    for completion in completions:
        assert (len(completion.token_ids), completion.finish_reason) == (LENGTH, FinishReason.LENGTH)
    for completion in resumed:
        kept = streamed[completion.request_id]
        assert list(completion.token_ids[: len(kept)]) == kept
    await stage.until_both_serve()


async def test_agents_are_unaffected_by_swaps_pauses_and_deaths(stage: Stage) -> None:
    """Six agents under a hot swap every tenth of a second, pauses of each kind, and the death of a generator."""
    await stage.until_both_serve()
    renderer = ChatTemplateRenderer.from_pretrained(BASE)
    generated: list[Completion] = []

    async def stream(request: EngineRequest, on_chunk: OnChunk) -> Completion:
        completion = await stage.router.stream(request, on_chunk)
        generated.append(completion)
        return completion

    app = make_app(
        stream,
        model="policy",
        max_context=256,
        tokenizer=transformers.AutoTokenizer.from_pretrained(BASE),
        renderer=renderer,
        wait_until_resumed=stage.router.wait_resumed,
    )
    async with (
        serve(app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        alone = [Agent(client, number) for number in range(6)]
        await asyncio.gather(*(agent.run() for agent in alone))
        assert all(completion.metrics.get("num_resumes", 0) == 0 for completion in generated)

        generated.clear()
        disturbed = [Agent(client, number) for number in range(6)]
        running = asyncio.gather(*(agent.run() for agent in disturbed))
        swapping = asyncio.create_task(stage.swap_the_same_until(running))
        await stage.running([running])
        await stage.router.pause("keep")
        await asyncio.wait([running], timeout=0.2)
        await stage.router.resume()
        await stage.running([running])
        await stage.router.pause("abort")
        await stage.router.resume()
        await stage.all_running(running)
        hit = max(stage.router.replicas, key=lambda replica: replica.num_requests)
        assert hit.num_requests
        os.kill(process_writing_to(stage.run_dir.logs / f"{hit.name}.log"), signal.SIGKILL)
        await asyncio.wait_for(running, LIMIT_S)
        await swapping

    assert [agent.answers for agent in disturbed] == [agent.answers for agent in alone]
    assert [agent.token_ids for agent in disturbed] == [agent.token_ids for agent in alone]
    assert len(set[str]().union(*(agent.versions for agent in disturbed))) > 2
    for agent in disturbed:
        for before, after in pairwise(agent.token_ids):
            assert after[: len(before)] == before, "each turn extends the tokens of the previous one"
    received = sorted(sampled for agent in disturbed for sampled in agent.sampled)
    parts = defaultdict[str, list[int]](list)  # an aborted completion continues under its request id
    for completion in generated:
        parts[completion.request_id] += completion.token_ids
    assert received == sorted(parts.values())


async def test_deaths_beyond_max_respawns_end_the_watch(stage: Stage) -> None:
    def kill(name: str) -> None:
        os.kill(process_writing_to(stage.run_dir.logs / f"{name}.log"), signal.SIGKILL)

    last = next(replica.name for replica in stage.router.replicas if replica.serving)
    kill(last)
    died = rf"{last} died: process \d+ .*, and is not replaced: hosts.max_respawns = 2, and 2 were replaced"
    with pytest.RaisesGroup(pytest.RaisesExc(ActorDiedError, match=died)):
        await asyncio.wait_for(stage.watch, LIMIT_S)

    step = asyncio.ensure_future(stage.step())
    kill("trainer")
    with pytest.raises(ActorDiedError, match="trainer"):
        await asyncio.wait_for(step, LIMIT_S)
