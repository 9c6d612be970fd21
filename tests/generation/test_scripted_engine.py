"""The scripted engine is deterministic, and follows its settings."""

import pytest

from titan_rl.core.errors import RequestError
from titan_rl.generation.engine import Engine
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.scripted_engine import CostModel, ScriptedEngine, scripted_logprobs
from titan_rl.testing.engine_contract import PLACES, EngineContract
from titan_rl.types import FinishReason, SamplingParams


class TestContract(EngineContract):
    @pytest.fixture
    def engine(self) -> ScriptedEngine:
        return ScriptedEngine(max_running=PLACES, max_context=128)

    def weights(self, version: int) -> list[tuple[str, int]]:
        return [("w", version)]

    def num_forwards(self, engine: ScriptedEngine) -> int:
        return engine.num_steps + engine.num_score_steps


def run(engine: ScriptedEngine, prompt: list[int], **settings: object) -> tuple[list[int], FinishReason | None]:
    engine.add(EngineRequest("a", prompt, SamplingParams(**settings)))  # type: ignore[arg-type]
    tokens, finish = list[int](), None
    while finish is None:
        for delta in engine.step():
            tokens += delta.token_ids
            finish = delta.finish_reason
    return tokens, finish


def test_scripted_engine_is_an_engine() -> None:
    assert isinstance(ScriptedEngine(), Engine)


def test_tokens_depend_only_on_the_context() -> None:
    whole, finish = run(ScriptedEngine(), [1, 2], max_tokens=10)
    assert finish is FinishReason.LENGTH
    assert run(ScriptedEngine(), [1, 2, *whole[:4]], max_tokens=6)[0] == whole[4:]
    assert run(ScriptedEngine(seed=1), [1, 2], max_tokens=10)[0] != whole
    engine = ScriptedEngine()
    engine.load_state_dict([("w", 1)], 1)
    assert run(engine, [1, 2], max_tokens=10)[0] == whole
    moving = ScriptedEngine(tokens_depend_on_version=True)
    before, _ = run(moving, [1, 2], max_tokens=10)
    moving.load_state_dict([], 1)
    assert run(moving, [1, 2], max_tokens=10)[0] != before


def test_logprobs_depend_on_the_version_and_equal_the_scores() -> None:
    engine = ScriptedEngine()
    engine.load_state_dict([("w", 1)], 4)
    assert engine.score([[1, 2, 3]]) == [scripted_logprobs([1, 2, 3], 4)]
    assert scripted_logprobs([1, 2, 3], 4) != scripted_logprobs([1, 2, 3], 5)
    engine.add(EngineRequest("a", [1, 2], SamplingParams(max_tokens=1)))
    (delta,) = engine.step()
    assert list(delta.logprobs) == scripted_logprobs([1, 2, *delta.token_ids], 4)[1:]


def test_stop_tokens_give_completions_of_the_mean_length() -> None:
    engine = ScriptedEngine(mean_tokens=8)
    runs = [run(engine, [index], max_tokens=1000, min_tokens=3, stop_token_ids=(5, 6)) for index in range(200)]
    assert all(finish is FinishReason.STOP and tokens[-1] in (5, 6) for tokens, finish in runs)
    assert all(len(tokens) > 3 for tokens, _ in runs)
    assert 9 < sum(len(tokens) for tokens, _ in runs) / len(runs) < 13


def test_script_chooses_the_next_token() -> None:
    engine = ScriptedEngine(script=lambda context: context[-1] + 1)
    assert run(engine, [1], max_tokens=9, stop_token_ids=(4,)) == ([2, 3, 4], FinishReason.STOP)


def test_time_follows_the_cost_model() -> None:
    slept: list[float] = []
    engine = ScriptedEngine(
        cost=CostModel(step=1.0, request=0.5, prompt_token=0.25, load=3.0), sleep=slept.append, max_running=1
    )
    engine.add(EngineRequest("a", [1] * 4, SamplingParams(max_tokens=2)))
    engine.add(EngineRequest("b", [2] * 8, SamplingParams(max_tokens=1)))
    for _ in range(3):
        engine.step()
    engine.load_state_dict([], 1)
    assert slept == [2.5, 1.5, 3.5, 3.0]


def test_rejected_requests_and_injected_failures() -> None:
    engine = ScriptedEngine(max_context=4, fail_at_step=1)
    for prompt in ([], [1] * 4):
        with pytest.raises(RequestError, match="context of 4"):
            engine.add(EngineRequest("a", prompt, SamplingParams(max_tokens=1)))
    engine.add(EngineRequest("a", [1], SamplingParams(max_tokens=1)))
    with pytest.raises(RequestError, match="already running"):
        engine.add(EngineRequest("a", [1], SamplingParams(max_tokens=1)))
    with pytest.raises(RuntimeError, match="step 1"):
        engine.step()
