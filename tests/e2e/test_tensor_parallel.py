"""Real generators of two ranks each: vLLM's external launcher, in lockstep over gloo."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from background import HANG_S
from depth import in_depth

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")
pytest.importorskip("vllm", reason="needs the cpu or gpu extra")

from e2e.runs import REPOSITORY, process_writing_to

from titan_rl.cluster.run_processes import RunProcesses, start_processes
from titan_rl.config.load import load_config
from titan_rl.core.errors import RequestError
from titan_rl.generation.router import GeneratorRouter
from titan_rl.run.directory import RunDirectory
from titan_rl.training.data.sample import TrainingSample
from titan_rl.types import SamplingParams
from titan_rl.weights.types import PublishedWeights

SETTINGS = [
    ("generation.num_generators", "2"),
    ("generation.tensor_parallel_size", "2"),
    ("generation.stream_interval", "8"),
    ("generation.max_running", "auto"),  # each rank decides independently how many requests to admit
    ("generation.kv_cache_gib", "0.0005"),  # too small for all requests of a generator
]
LENGTH = 120
SAMPLING = SamplingParams(max_tokens=LENGTH, min_tokens=LENGTH, seed=7)


@in_depth
async def test_tensor_parallel_ranks_generate_pull_and_are_replaced_together(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    config = load_config("examples/alphabet_sort/cpu.toml", SETTINGS)
    run_dir, published = RunDirectory(tmp_path / "run"), PublishedWeights()
    async with start_processes(config, run_dir, published) as processes:
        router = processes.router = GeneratorRouter(processes.replicas)
        async with asyncio.timeout(HANG_S), asyncio.TaskGroup() as background:
            watch = background.create_task(processes.watch())
            await publish(processes, published, router)
            alone = await asyncio.gather(*ask(router, "alone"))

            # Two ranks in lockstep admit requests that arrive during generation, and reject an invalid one.
            early = ask(router, "early")
            await streamed(router, early)
            with pytest.raises(RequestError):
                await router.generate([10**6], request_id="bad", sampling=SAMPLING)
            late = ask(router, "late")
            await processes.training.trainer.step(samples())
            await publish(processes, published, router)  # the trainer's logprobs hold for the sharded weights too
            completions = await asyncio.gather(*early, *late)
            assert {span.version for completion in completions for span in completion.version_spans} == {0, 1}
            gauges = [replica.gauges for replica in processes.replicas if replica.gauges is not None]
            assert max(gauge.maxima["waiting_requests"] for gauge in gauges) > 0, (
                "the KV cache should have been too small"
            )
            for completion, expected in zip(completions, alone * 2, strict=True):
                before_swap = sum(span.num_tokens for span in completion.version_spans if span.version == 0)
                assert completion.token_ids[:before_swap] == expected.token_ids[:before_swap]

            # One rank dies: both are replaced, and the requests resume from their tokens.
            doomed = ask(router, "doomed")
            await streamed(router, doomed)
            os.kill(process_writing_to(run_dir.logs / "generator-0-rank1.log"), signal.SIGKILL)
            completions = await asyncio.gather(*doomed)
            assert any(completion.metrics.get("num_resumes") for completion in completions)
            assert [len(completion.token_ids) for completion in completions] == [LENGTH] * len(doomed)
            while [replica.serving for replica in router.replicas] != [True, True]:
                await asyncio.wait([watch], timeout=0.2)
            assert not [name for name in os.listdir("/dev/shm") if "cpushm" in name]  # nothing would remove it
            watch.cancel()
        await router.close()
        await processes.training.trainer.close()


def ask(router: GeneratorRouter, name: str):
    return [
        asyncio.ensure_future(router.generate([5, 6, 7, n], request_id=f"{name}-{n}", sampling=SAMPLING))
        for n in range(12)
    ]


async def streamed(router: GeneratorRouter, requests, tokens: int = 16) -> None:
    while max((len(part.token_ids) for part in router.tokens_so_far().values()), default=0) < tokens:
        done, _ = await asyncio.wait(requests, timeout=0.001)
        assert len(done) < len(requests)


def samples() -> list[TrainingSample]:
    tokens = [5, 6, 7, 8]
    ones = [1.0] * len(tokens)
    return [TrainingSample("g", "g/0", tokens, [True] * 4, [-1.0] * 4, ones, [0] * 4, temperature=1.0)]


async def publish(processes: RunProcesses, published: PublishedWeights, router: GeneratorRouter) -> None:
    await processes.training.trainer.begin_publish()
    manifest = await processes.training.trainer.finish_publish()
    published.announce(manifest)
    await router.pull_state_dict(manifest.version)
