"""Contract between the engine loop and engines, as pytest tests.

Example of a complete test file:

    class TestMyEngine(EngineContract):
        @pytest.fixture
        def engine(self):
            engine = my_engines.make(EngineSpec("tiny_model", max_context=CONTEXT, max_running=PLACES))
            yield engine
            engine.close()

        def weights(self, version):
            return load_file("tiny_model/model.safetensors").items()
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from titan_rl.core.errors import RequestError, VerificationError
from titan_rl.core.tensor_checksum import TensorChecksum, box_checksum
from titan_rl.generation.engine import Engine, GaugedEngine, ReadableEngine, TokenDelta
from titan_rl.generation.loop.engine_loop import EngineLoop
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.types import compare, read_back
from titan_rl.testing.clock import StepClock
from titan_rl.types import FinishReason, PromptScores, SamplingParams

PLACES, CONTEXT, VOCABULARY = 4, 128, 128  # of the engine under test
NO_PROMPTS: dict[str, Any] = {
    "text among tokens": [1, "two", 3],
    "text": "hello",
    "None among tokens": [1, None],
    "a fraction": [1, 2.5],
    "a list among tokens": [1, [2, 3]],
    "a negative token": [1, -1],
    "a token of 100 bits": [1, 1 << 100],
    "None": None,
    "a number": 7,
}
"""Invalid prompts."""
PROBES = [[5, 9, 2, 7, 7, 1, 3, 8], [1, 2, 3, 4, 5, 6, 7, 8], [9, 9, 9], [2, 4]]


class Batch:
    """Requests of an engine, and their tokens so far."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running: set[str] = set()
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[float]] = {}
        self.top_logprobs: dict[str, list[Sequence[tuple[int, float]]]] = {}
        self.prompt_scores: dict[str, PromptScores] = {}
        self.finished: dict[str, FinishReason] = {}
        self.num_steps = 0

    def add(self, request_id: str, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self._engine.add(EngineRequest(request_id, prompt, sampling))
        self._running.add(request_id)
        self.tokens[request_id], self.logprobs[request_id], self.top_logprobs[request_id] = [], [], []

    def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests. If one of them produces a token later, `step` raises a KeyError."""
        self._engine.abort(request_ids)
        for request_id in request_ids:
            self._running.discard(request_id)
            self.tokens.pop(request_id, None)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.num_steps += 1
            for delta in self._engine.step():
                self.tokens[delta.request_id] += delta.token_ids
                self.logprobs[delta.request_id] += delta.logprobs
                self.top_logprobs[delta.request_id] += delta.top_logprobs or ()
                if delta.prompt_scores is not None:
                    self.prompt_scores[delta.request_id] = delta.prompt_scores
                if delta.finish_reason is not None:
                    self.finished[delta.request_id] = delta.finish_reason
                    self._running.remove(delta.request_id)

    def run(self) -> None:
        """Step until all requests have finished."""
        while self._running:
            self.step()
            assert self.num_steps < 10_000

    def crowd(self, count: int, max_tokens: int) -> None:
        """Add `count` requests, each with its own seed and with stop tokens that it may not sample early."""
        for index in range(count):
            sampling = SamplingParams(
                max_tokens=max_tokens, min_tokens=max_tokens // 2, seed=index, stop_token_ids=(3, 11)
            )
            self.add(f"crowd-{index}", [1 + index % 7, 2, 3, 4 + index % 5], sampling)


class Steps:
    """Engine wrapper that counts steps, and that an engine loop cannot close."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.num_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> list[TokenDelta]:
        deltas = self._engine.step()
        self.num_steps += 1
        return deltas

    def close(self) -> None:
        assert not self._engine.step()


class Held(Steps):
    """Engine wrapper that blocks inside a step until it is released."""

    def __init__(self, engine: Engine, *, at_step: int) -> None:
        super().__init__(engine)
        self._at_step = at_step
        self.started, self.release = threading.Event(), threading.Event()

    def step(self) -> list[TokenDelta]:
        if self.num_steps + 1 == self._at_step:
            self.started.set()
            assert self.release.wait(30), "a held step was never released"
        return super().step()


class EngineContract:
    """Tests of an engine that advances `PLACES` requests at a time, with contexts of `CONTEXT` tokens and a vocabulary
    of at least `VOCABULARY` tokens."""

    @pytest.fixture
    def engine(self) -> Engine:
        """Engine without requests. All tests may share one."""
        raise NotImplementedError

    def weights(self, version: int) -> Iterable[tuple[str, Any]]:
        """Return the weights of a version. They must generate the same tokens for every version."""
        raise NotImplementedError

    def num_forwards(self, engine: Any) -> int:
        """Return the number of forward passes so far, if the engine counts them."""
        pytest.skip(f"{type(self).__name__} does not count forward passes")

    @pytest.mark.parametrize("crowd", [PLACES - 1, PLACES, 2 * PLACES, 4 * PLACES])
    def test_scoring_cost_is_independent_of_other_requests(self, engine: Engine, crowd: int) -> None:
        before = self.num_forwards(engine)
        alone = engine.score(PROBES)
        idle = self.num_forwards(engine) - before
        batch = Batch(engine)
        batch.crowd(crowd, 24)
        batch.step(3)
        before = self.num_forwards(engine)
        scores = engine.score(PROBES)
        assert self.num_forwards(engine) - before == idle
        for score, expected in zip(scores, alone, strict=True):
            assert score == pytest.approx(expected, abs=1e-5)
        batch.run()

    def test_requests_are_suspended_during_scoring(self, engine: Engine) -> None:
        engine.reset_prefix_cache()
        undisturbed = Batch(engine)
        undisturbed.crowd(3 * PLACES, 24)
        undisturbed.run()
        engine.reset_prefix_cache()
        disturbed = Batch(engine)
        disturbed.crowd(3 * PLACES, 24)
        while len(disturbed.finished) < 3 * PLACES:
            disturbed.step()
            engine.score(PROBES)
        assert disturbed.num_steps == undisturbed.num_steps
        assert disturbed.tokens == undisturbed.tokens
        assert disturbed.finished == undisturbed.finished
        for name, logprobs in disturbed.logprobs.items():
            assert logprobs == pytest.approx(undisturbed.logprobs[name], abs=1e-5)
        assert not engine.step()

    def test_scoring_accepts_more_sequences_than_slots(self, engine: Engine) -> None:
        sequences = [[1 + index % 9, 2, 3, 4] for index in range(50)]
        scores = engine.score([*sequences, [7]])
        assert [len(score) for score in scores] == [3] * 50 + [0]
        assert scores[0] == pytest.approx(engine.score(sequences[:1])[0], abs=1e-5)
        assert scores[0] == pytest.approx(scores[9], abs=1e-5)

    def test_too_long_sequence_is_rejected_without_losing_requests(self, engine: Engine) -> None:
        batch = Batch(engine)
        batch.crowd(2 * PLACES, 8)
        batch.step()
        with pytest.raises(RequestError, match=str(CONTEXT + 1)):
            engine.score([[1, 2, 3], [1] * (CONTEXT + 1)])
        batch.run()
        assert len(batch.finished) == 2 * PLACES

    def test_sampled_logprobs_equal_scored_logprobs(self, engine: Engine) -> None:
        prompt = [5, 9, 2]
        batch = Batch(engine)
        batch.add("a", prompt, SamplingParams(max_tokens=12))
        batch.run()
        assert batch.finished == {"a": FinishReason.LENGTH}
        (score,) = engine.score([[*prompt, *batch.tokens["a"]]])
        assert batch.logprobs["a"] == pytest.approx(score[len(prompt) - 1 :], abs=1e-4)

    def test_top_logprobs_are_returned_or_rejected(self, engine: Engine) -> None:
        batch, greedy = Batch(engine), SamplingParams(max_tokens=6, temperature=0.0)
        batch.add("none", [5, 9, 2], greedy)
        try:
            for count in (1, 3):
                batch.add(f"{count}", [5, 9, 2], replace(greedy, temperature=1.0, seed=count, top_logprobs=count))
        except RequestError:
            return
        batch.run()
        assert not batch.top_logprobs["none"]
        for count in (1, 3):
            name = f"{count}"
            assert len(batch.tokens[name]) == len(batch.top_logprobs[name]) == 6
            for token, logprob, top in zip(
                batch.tokens[name], batch.logprobs[name], batch.top_logprobs[name], strict=True
            ):
                likeliest = [value for _, value in top]
                assert len(top) == count
                assert likeliest == sorted(likeliest, reverse=True)
                assert dict(top).get(token, logprob) == pytest.approx(logprob, abs=1e-6)
                assert logprob <= likeliest[0] + 1e-6

    def test_prompt_logprobs_equal_scored_logprobs(self, engine: Engine) -> None:
        if not getattr(engine, "scores_prompts", False):
            return
        batch, prompt = Batch(engine), [5, 9, 2, 7]
        for top_k in (0, 2):
            batch.add(f"{top_k}", prompt, SamplingParams(max_tokens=1, prompt_logprobs=top_k))
        batch.add("none", prompt, SamplingParams(max_tokens=1))
        batch.run()
        (score,) = engine.score([prompt])
        assert batch.prompt_scores.keys() == {"0", "2"}
        for name, scores in batch.prompt_scores.items():
            assert list(scores.logprobs) == pytest.approx(score, abs=1e-4)
            assert scores.top_k == int(name)
            assert len(scores.top_ids) == len(scores.top_logprobs) == int(name) * 3
        top = batch.prompt_scores["2"]
        for index, logprob in enumerate(top.logprobs):
            first, second = top.top_logprobs[2 * index : 2 * index + 2]
            assert logprob <= first + 1e-6
            assert second <= first
            likeliest = dict(zip(top.top_ids[2 * index : 2 * index + 2], (first, second), strict=True))
            assert likeliest.get(prompt[index + 1], logprob) == pytest.approx(logprob, abs=1e-6)

    def test_aborted_request_gets_no_more_tokens_and_frees_its_slot(self, engine: Engine) -> None:
        batch = Batch(engine)
        batch.crowd(2 * PLACES, 24)
        batch.step(3)
        batch.abort(["crowd-0", "crowd-7", "never-there"])
        batch.run()
        assert batch.finished.keys() == {f"crowd-{index}" for index in range(1, 7)}
        batch.add("crowd-0", [1, 2], SamplingParams(max_tokens=2))
        batch.run()
        assert len(batch.tokens["crowd-0"]) == 2

    def test_gauges_are_finite_and_totals_never_fall(self, engine: Engine) -> None:
        if not isinstance(engine, GaugedEngine):
            pytest.skip(f"{type(engine).__name__} reports no gauges")
        readings = [engine.gauges()]
        batch = Batch(engine)
        batch.crowd(3 * PLACES, 24)
        batch.step()
        readings.append(engine.gauges())
        batch.run()
        readings.append(engine.gauges())
        assert all(math.isfinite(value) for gauges in readings for value in gauges.values())
        for name in readings[0]:
            counts = [gauges[name] for gauges in readings]
            assert counts == sorted(counts) or not name.endswith("_total")
        for name, expected in {"running_requests": PLACES, "waiting_requests": 2 * PLACES}.items():
            assert [gauges.get(name, 0) for gauges in readings] == [0, expected if name in readings[0] else 0, 0]

    def test_held_weights_equal_the_loaded_weights(self, engine: Engine) -> None:
        """Applies only to engines whose weights can be read back. Their `weights` are tensors, and differ between
        versions."""
        if not isinstance(engine, ReadableEngine):
            pytest.skip("the engine has no held_weights")
        for version in (1, 2):
            engine.load_state_dict(self.weights(version), version)
            published = self._checksums(version)
            readback = compare(published, [read_back(engine, published)], version)
            assert readback.unread == ()
        other = self._checksums(3)
        if other != published:
            with pytest.raises(VerificationError):
                compare(other, [read_back(engine, other)], 3)

    def _checksums(self, version: int) -> dict[str, TensorChecksum]:
        return {
            name: TensorChecksum(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), box_checksum(tensor))
            for name, tensor in self.weights(version)
            if hasattr(tensor, "dtype")
        }

    def test_impossible_request_is_rejected_and_others_continue(self, engine: Engine) -> None:
        batch = Batch(engine)
        batch.add("a", [1, 2, 3], SamplingParams(max_tokens=8))
        for name, prompt in {"a": [1, 2], "empty": [], "long": [1] * CONTEXT}.items():
            with pytest.raises(RequestError):
                engine.add(EngineRequest(name, prompt, SamplingParams(max_tokens=1)))
        batch.run()
        assert len(batch.tokens["a"]) == 8

    @pytest.mark.parametrize("name", NO_PROMPTS)
    def test_invalid_prompt_is_rejected_and_others_continue(self, engine: Engine, name: str) -> None:
        batch = Batch(engine)
        batch.add("a", [1, 2, 3], SamplingParams(max_tokens=8))
        with pytest.raises(RequestError):
            engine.add(EngineRequest("bad", NO_PROMPTS[name], SamplingParams(max_tokens=4)))
        batch.run()
        assert len(batch.tokens["a"]) == 8
        asyncio.run(self._refused(engine, NO_PROMPTS[name]))

    async def _refused(self, engine: Engine, prompt: Any) -> None:
        steps: Any = Steps(engine)
        loop = EngineLoop(lambda: steps)
        await loop.start()
        good = asyncio.create_task(loop.generate([1, 2, 3], request_id="a", sampling=SamplingParams(max_tokens=8)))
        with pytest.raises(RequestError):
            await loop.generate(prompt, request_id="bad", sampling=SamplingParams(max_tokens=4))
        assert len((await good).token_ids) == 8
        await loop.close()

    def test_queue_time_ends_when_a_request_first_runs(self, engine: Engine) -> None:
        asyncio.run(self._queue(engine))

    async def _queue(self, engine: Engine) -> None:
        steps: Any = Steps(engine)
        loop = EngineLoop(lambda: steps, clock=StepClock(steps))
        await loop.start()
        await loop.pause("keep")
        requests = [
            asyncio.create_task(loop.generate([1, 2, 3], request_id=str(index), sampling=SamplingParams(max_tokens=10)))
            for index in range(3 * PLACES)
        ]
        await asyncio.sleep(0)  # all of them have arrived when the first step begins
        await loop.resume()
        metrics = [(await request).metrics for request in requests]
        await loop.close()
        waited = sorted(each["queue_s"] for each in metrics)
        assert waited == [0.0] * PLACES + [10.0] * PLACES + [20.0] * PLACES
        assert all(each["time_to_first_token_s"] == each["queue_s"] + 1 for each in metrics)

    def test_verified_pull_generates_no_tokens_while_paused(self, engine: Engine) -> None:
        asyncio.run(self._pull_in_a_pause(engine))

    async def _pull_in_a_pause(self, engine: Engine) -> None:
        held: Any = Held(engine, at_step=5)
        loop = EngineLoop(lambda: held)
        await loop.start()
        sampling = SamplingParams(max_tokens=100)
        requests = [
            asyncio.create_task(loop.generate([1, 2, 3], request_id=str(index), sampling=sampling))
            for index in range(2 * PLACES)
        ]
        assert await asyncio.to_thread(held.started.wait, 30)
        pause = asyncio.create_task(loop.pause("keep"))
        await asyncio.sleep(0)
        held.release.set()
        await pause
        await loop.pull(1, lambda: self.weights(1), lambda loaded: loaded.score(PROBES))
        await loop.abort()
        completions = await asyncio.gather(*requests)
        assert sorted(len(completion.token_ids) for completion in completions) == [0] * PLACES + [5] * PLACES
        assert all(set(completion.versions) <= {0} for completion in completions)
        await loop.close()
