"""Random interleavings of calls: each resolves, and no token is lost, doubled or attributed to a wrong version."""

import asyncio

from background import HANG_S
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.core.errors import EngineDeadError
from titan_rl.generation.continuation import resume_on_abort
from titan_rl.generation.loop.engine_loop import EngineLoop
from titan_rl.generation.scripted_engine import ScriptedEngine, scripted_logprobs
from titan_rl.types import Completion, FinishReason, SamplingParams

STOP_TOKEN = 3

operation = st.one_of(
    st.tuples(st.just("generate"), st.integers(1, 40), st.booleans()),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.just("abort_all")),
    st.tuples(st.just("pull")),
    st.tuples(st.just("pause"), st.sampled_from(["keep", "abort"])),
    st.tuples(st.just("resume")),
    st.tuples(st.just("tick"), st.sampled_from([0.0, 0.001])),
)


def sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP_TOKEN,))


def undisturbed(prompt: list[int], max_tokens: int) -> tuple[list[int], FinishReason]:
    """Tokens and finish reason of a request that runs alone."""
    from titan_rl.generation.request import EngineRequest

    engine, tokens = ScriptedEngine(mean_tokens=20), list[int]()
    engine.add(EngineRequest("-", prompt, sampling(max_tokens)))
    while True:
        (delta,) = engine.step()
        tokens += delta.token_ids
        if delta.finish_reason is not None:
            return tokens, delta.finish_reason


def check(completion: Completion, prompt: list[int], max_tokens: int, *, whole: bool) -> None:
    tokens, finish_reason = undisturbed(prompt, max_tokens)
    if whole:
        assert (list(completion.token_ids), completion.finish_reason) == (tokens, finish_reason)
    else:
        assert list(completion.token_ids) == tokens[: len(completion.token_ids)]
        assert completion.finish_reason in (finish_reason, FinishReason.ABORT)
    versions = completion.versions
    assert versions == sorted(versions)
    sequence = [*prompt, *completion.token_ids]
    for index, (logprob, version) in enumerate(zip(completion.logprobs, versions, strict=True), start=len(prompt)):
        assert logprob == scripted_logprobs(sequence[: index + 1], version)[-1]


async def play(operations: list[tuple]) -> None:
    engine = ScriptedEngine(mean_tokens=20, max_running=4)
    loop = EngineLoop(lambda: engine)
    await loop.start()
    resuming = asyncio.Event()
    resuming.set()
    resumed = resume_on_abort(loop.generate, wait_until_resumed=resuming.wait, max_attempts=10_000)
    calls: list[tuple[asyncio.Task[Completion], list[int], int, bool]] = []
    others: list[asyncio.Task[object]] = []
    version = 0
    for kind, *arguments in operations:
        match kind, arguments:
            case "generate", [max_tokens, whole]:
                prompt, name = [len(calls), max_tokens], f"r{len(calls)}"
                generate = resumed if whole else loop.generate
                call = generate(prompt, request_id=name, sampling=sampling(max_tokens))
                calls.append((asyncio.create_task(call), prompt, max_tokens, whole))
            case "cancel", [index] if index < len(calls):
                calls[index][0].cancel()
            case "abort", [index]:
                others.append(asyncio.create_task(loop.abort([f"r{index}"])))
            case "abort_all", _:
                others.append(asyncio.create_task(loop.abort()))
            case "pull", _:
                version += 1
                others.append(asyncio.create_task(loop.pull(version, lambda: [("w", 1)])))
            case "pause", [mode] if loop.paused is None:
                resuming.clear()
                await loop.pause(mode)
            case "resume", _ if loop.paused is not None:
                await loop.resume()
                resuming.set()
            case "tick", [seconds]:
                await asyncio.sleep(seconds)
            case _:
                pass
    if loop.paused is not None:
        await loop.resume()
        resuming.set()
    outcomes = await asyncio.gather(*(call for call, *_ in calls), return_exceptions=True)
    await asyncio.gather(*others)
    for outcome, (_, prompt, max_tokens, whole) in zip(outcomes, calls, strict=True):
        if not isinstance(outcome, asyncio.CancelledError):
            assert isinstance(outcome, Completion), outcome
            check(outcome, prompt, max_tokens, whole=whole)
    assert loop.num_in_flight == 0
    await loop.abort()
    assert not engine.step()
    await loop.close()


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(operation, max_size=40))
def test_every_interleaving_keeps_every_token(operations: list[tuple]) -> None:
    asyncio.run(asyncio.wait_for(play(operations), HANG_S))


async def close_amid(operations: list[tuple], fail_at_step: int | None) -> None:
    engine = ScriptedEngine(fail_at_step=fail_at_step)
    loop = EngineLoop(lambda: engine)
    await loop.start()
    tasks: list[asyncio.Task[object]] = []
    for index, (kind, *arguments) in enumerate(operations):
        match kind:
            case "generate":
                call = loop.generate([1], request_id=f"r{index}", sampling=SamplingParams(max_tokens=arguments[0]))
            case "pull":
                call = loop.pull(index, lambda: [("w", 1)])
            case "pause":
                call = loop.pause("wait")
            case "abort_all":
                call = loop.abort()
            case _:
                await asyncio.sleep(0)
                continue
        tasks.append(asyncio.create_task(call))
    await asyncio.sleep(0)
    await loop.close()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        assert not isinstance(outcome, Exception) or isinstance(outcome, EngineDeadError | RuntimeError), outcome
    assert engine.closed
    assert loop.num_in_flight == 0


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(operation, max_size=20), st.one_of(st.none(), st.integers(1, 20)))
def test_close_and_death_resolve_every_call(operations: list[tuple], fail_at_step: int | None) -> None:
    asyncio.run(asyncio.wait_for(close_amid(operations, fail_at_step), HANG_S))
