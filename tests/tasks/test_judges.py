"""Judges and reward models: their values, and the calls to the models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from byte_tokenizer import VOCAB, byte_tokenizer

from titan_rl.core.console import ConsoleLines
from titan_rl.core.errors import GenerationError, RequestError, RewardError
from titan_rl.rollout.chat_env import ChatReply
from titan_rl.rollout.rewards.reward import FailurePolicy, Reward
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.types import Message, Rollout, RolloutGroup
from titan_rl.tasks import Judge, LocalClassifier, RewardModel, ServedClassifier
from titan_rl.tasks.players import Endpoint
from titan_rl.types import FinishReason, SamplingParams


class ScriptedJudge:
    """`ChatFn` that answers with a function of the prompt's text.

    Args:
        fails: Called before each answer; it may raise.
    """

    def __init__(self, says: Callable[[str], str], fails: Callable[[], None] = lambda: None) -> None:
        self.asked: list[str] = []
        self.at_once = self.most_at_once = 0
        self._says = says
        self._fails = fails

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> ChatReply:
        self._fails()
        text = str(messages[-1]["content"])
        self.asked.append(text)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(1)
        self.at_once -= 1
        return ChatReply({"role": "assistant", "content": self._says(text)}, num_tokens=2, num_prompt_tokens=10)


def group_of(*answers: str, group_id: str = "g") -> RolloutGroup:
    rollouts = [
        Rollout(f"{group_id}/{i}", group_id, i, "q", messages=[{"role": "assistant", "content": answer}])
        for i, answer in enumerate(answers)
    ]
    return RolloutGroup(group_id, "q", rollouts)


def said(rollout: Rollout) -> str:
    return str(rollout.messages[-1]["content"])


def length(text: str) -> str:
    return f"{len(text)}"


async def rewards(group: RolloutGroup, *judges: Any) -> list[float | None]:
    await Rubric(list(judges)).score(group)
    return [rollout.reward for rollout in group.rollouts]


@pytest.mark.parametrize(
    ("make", "reply"),
    [
        (
            lambda url: Judge(Endpoint(url=f"{url}/v1", model="judge"), said, float),
            {"choices": [{"message": {"role": "assistant", "content": "1"}, "finish_reason": "stop"}]},
        ),
        (lambda url: RewardModel(ServedClassifier(url, "rm"), said), {"data": [{"index": 0, "probs": [1.0]}]}),
    ],
    ids=["judge", "reward model"],
)
async def test_rubric_close_closes_connections_and_later_calls_reopen_them(
    make: Callable[[str], Any], reply: dict[str, Any]
):
    ended = asyncio.Queue[None]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        (length,) = (
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
        )
        await reader.readexactly(length)
        body = json.dumps(reply).encode()
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        assert await reader.read() == b"", "the client asks nothing more, and closes"
        writer.close()
        ended.put_nowait(None)

    async with await asyncio.start_server(answer, "127.0.0.1") as server:
        rubric = Rubric([make(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")])
        for text in ("once", "again"):
            group = group_of(text)
            await rubric.score(group)
            assert group.rollouts[0].reward == 1.0
            assert ended.empty(), "the connection is kept for the next question"
            await rubric.close()
            await asyncio.wait_for(ended.get(), 10)


@pytest.mark.looptime
async def test_failing_or_hanging_close_of_a_reward_is_logged(
    caplog: pytest.LogCaptureFixture,
):
    closed: list[str] = []
    errors = {"fails": OSError("lost"), "is cancelled": asyncio.CancelledError(), "exits": SystemExit(1)}

    class Closing(Reward):
        async def close(self) -> None:
            closed.append(self.name)
            if self.name in errors:
                raise errors[self.name]
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(1000.0 * self.name.startswith("hangs"))
            await asyncio.sleep(1000.0 * (self.name == "hangs on"))

    names = [*errors, "hangs", "hangs on", "ends"]
    await Rubric([Closing(lambda rollout: 1.0, name=name) for name in names]).close()
    assert asyncio.get_running_loop().time() < 100.0
    assert closed == names
    reported = [record for record in caplog.records if "could not be closed" in record.message]
    assert [record.args[0] for record in reported if record.args] == names[:-1]  # pyright: ignore


@pytest.mark.looptime
async def test_absolute_judge_grades_each_answer_and_deduplicates_prompts():
    model = ScriptedJudge(length)
    group = group_of("aa", "b", "aa", "aa")
    assert await rewards(group, Judge(model, said, float, price=(1.0, 3.0))) == [2.0, 1.0, 2.0, 2.0]
    assert sorted(model.asked) == ["aa", "b"]
    metrics = [rollout.metrics for rollout in group.rollouts]
    assert [each["judge_cached"] for each in metrics] == [0.0, 0.0, 1.0, 1.0]
    assert [each["judge_tokens"] for each in metrics] == [12.0, 12.0, 0.0, 0.0]
    assert metrics[0]["judge_cost"] == pytest.approx(16e-6)
    assert metrics[0]["judge_seconds"] == pytest.approx(1.0)


@pytest.mark.looptime
async def test_relative_judge_averages_both_orders_and_measures_position_bias():
    """The judge gives each answer its number, and 0.5 more to the one it reads first."""

    def prefers_first(text: str) -> str:
        first, *others = text.split()
        return " ".join([f"{float(first) + 0.5}", *others])

    model = ScriptedJudge(prefers_first)
    judge = Judge(
        model,
        lambda rollouts: " ".join(map(said, rollouts)),
        lambda text: [float(each) for each in text.split()],
        relative=True,
    )
    group = group_of("1", "2", "3", "4")
    found = await rewards(group, judge)
    first, last = model.asked
    assert first.split() == last.split()[::-1]
    ends = {int(first.split()[0]), int(first.split()[-1])}
    assert found == [number + (0.25 if number in ends else 0.0) for number in (1, 2, 3, 4)]
    assert group.rollouts[0].metrics["judge_position_bias"] == pytest.approx(0.25)


@pytest.mark.looptime
async def test_five_minute_outage_drops_no_group():
    clock = asyncio.get_running_loop().time
    back_at = clock() + 300

    def down() -> None:
        if clock() < back_at:
            raise GenerationError("503")

    judge, console = Judge(ScriptedJudge(length, down), said, float), ConsoleLines()
    Rubric([judge]).show_on(console)
    assert await rewards(group_of("a", "bb"), judge) == [1.0, 2.0]
    assert 300 <= clock() - back_at + 300 < 345
    failed, answers = console
    assert failed.startswith("judge 'judge' fails: 503; requests are repeated for up to 15 min")
    assert answers.startswith("judge 'judge' answers again, after 3")


@pytest.mark.looptime
async def test_judge_failure_error_gives_the_reason():
    def down() -> None:
        raise GenerationError("503")

    def refused() -> None:
        raise RequestError("too long")

    for fails, says, reason in (
        (down, length, "judge 'judge' has failed for 120 s: 503"),
        (refused, length, "judge 'judge' refuses a question: too long"),
        (lambda: None, lambda text: "good!", "cannot be parsed: ValueError: .*; it said 'good!'"),
        (lambda: None, lambda text: "inf", "it must return 1 finite numbers"),
    ):
        judge = Judge(ScriptedJudge(says, fails), said, float, outage_s=120)
        with pytest.raises(RewardError, match=reason):
            await rewards(group_of("a"), judge)


def list_files(folder: Path) -> list[Path]:
    return list(folder.rglob("*.json"))


@pytest.mark.looptime
async def test_disk_cache_avoids_repeated_calls(tmp_path: Path):
    first, again, other = ScriptedJudge(length), ScriptedJudge(length), ScriptedJudge(length)
    expected = await rewards(group_of("a", "bb"), Judge(first, said, float, cache=tmp_path))
    group = group_of("a", "bb")
    assert await rewards(group, Judge(again, said, float, cache=tmp_path)) == expected
    assert again.asked == []
    assert [rollout.metrics["judge_cached"] for rollout in group.rollouts] == [1.0, 1.0]

    for path in list_files(tmp_path):
        path.write_text("{")  # as left by a full disk
    assert await rewards(group_of("a"), Judge(other, said, float, cache=tmp_path)) == [1.0]
    assert other.asked == ["a"]


def grader(grade: float, *, by_text: Mapping[str, float] | None = None) -> Any:
    """Chat function made by a factory: all of them have the same `__qualname__`."""

    async def chat(messages: Sequence[Message], **_: Any) -> ChatReply:
        return ChatReply({"role": "assistant", "content": f"{(by_text or {}).get('x', grade)}"})

    return chat


def scorer(score: float) -> Any:
    async def scores(texts: Sequence[str]) -> list[float]:
        return [score for _ in texts]

    return scores


class MethodGrader:
    __slots__ = ("grade",)

    def __init__(self, grade: float) -> None:
        self.grade = grade

    async def chat(self, messages: Sequence[Message], **_: Any) -> ChatReply:
        return await grader(self.grade)(messages)

    async def __call__(self, messages: Sequence[Message], **_: Any) -> ChatReply:
        return await self.chat(messages)


async def grade_with_default(messages: Sequence[Message], grade: float = 0.0, **_: Any) -> ChatReply:
    return await grader(grade)(messages)


GRADERS: list[Callable[[float], Any]] = [
    grader,
    lambda grade: grader(0.0, by_text={"x": grade}),
    lambda grade: partial(grade_with_default, grade=grade),
    lambda grade: MethodGrader(grade).chat,
    MethodGrader,
]


@pytest.mark.parametrize("make", GRADERS, ids=["closure", "closure over data", "partial", "method", "object"])
async def test_chat_functions_of_one_factory_share_no_grades(make: Callable[[float], Any], tmp_path: Path):
    for grade in (0.25, 0.75, 0.25):
        group = group_of("a")
        assert await rewards(group, Judge(make(grade), said, float, cache=tmp_path)) == [grade]
    assert group.rollouts[0].metrics["judge_cached"] == 1.0, "an equal function finds the grades"


async def test_score_functions_of_one_factory_share_no_scores(tmp_path: Path):
    for score in (0.25, 0.75):
        assert await rewards(group_of("a"), RewardModel(scorer(score), said, cache=tmp_path)) == [score]


async def test_name_of_a_chat_function_identifies_it_in_the_cache(tmp_path: Path):
    for grade in (0.25, 0.75):
        chat = grader(grade)
        chat.name = "my model, version 1"
        assert await rewards(group_of("a"), Judge(chat, said, float, cache=tmp_path)) == [0.25]


@pytest.mark.looptime
async def test_waiting_for_the_rate_is_no_outage():
    clock = asyncio.get_running_loop().time
    began, model = clock(), ScriptedJudge(length)
    answers = ["x" * count for count in range(1, 41)]
    assert await rewards(group_of(*answers), Judge(model, said, float, per_minute=2)) == list(range(1, 41))
    assert clock() - began == pytest.approx(39 * 30 + 1), "more than outage_s"


@pytest.mark.looptime
async def test_one_failed_call_at_a_low_rate_is_no_outage():
    failing = iter([True])

    def fails_once() -> None:
        if next(failing, False):
            raise GenerationError("503")

    judge = Judge(ScriptedJudge(length, fails_once), said, float, per_minute=2, on_failure=FailurePolicy(retries=0))
    answers = ["x" * count for count in range(1, 41)]
    assert await rewards(group_of(*answers), judge) == list(range(1, 41))


@pytest.mark.looptime
async def test_outage_at_a_low_rate_ends_at_its_limit():
    def down() -> None:
        raise GenerationError("503")

    clock = asyncio.get_running_loop().time
    began = clock()
    judge = Judge(ScriptedJudge(length, down), said, float, per_minute=2, on_failure=FailurePolicy(retries=0))
    with pytest.raises(RewardError, match="has failed for 900 s: 503"):
        await rewards(group_of("a", "bb", "ccc"), judge)
    assert clock() - began < 1000


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (lambda texts: [1.0], r"my_scores returned \[1.0\]; it must return 2 finite numbers"),
        (lambda texts: [1.0, 2.0, 3.0], r"returned \[1.0, 2.0, 3.0\]; it must return 2 finite numbers"),
        (lambda texts: None, "returned None; it must return 2 finite numbers"),
        (lambda texts: 1.0, "returned 1.0; it must return 2 finite numbers"),
        (lambda texts: dict(zip(texts, (1.0, 2.0), strict=True)), "returned {'a': 1.0, 'bb': 2.0}; it must"),
        (lambda texts: {1.0, 2.0}, "returned {1.0, 2.0}; it must return 2 finite numbers"),
        (lambda texts: "12", "returned '12'; it must return 2 finite numbers"),
        (lambda texts: [1.0, None], "None is not a finite number"),
        (lambda texts: {}["scores"], "KeyError: 'scores'"),
    ],
)
@pytest.mark.looptime
async def test_invalid_result_of_a_score_function_fails_at_once_and_names_it(
    returned: Callable[[Sequence[str]], Any], problem: str
):
    async def my_scores(texts: Sequence[str]) -> Any:
        return returned(texts)

    with pytest.raises(RewardError, match=problem):
        await rewards(group_of("a", "bb"), RewardModel(my_scores, said))
    assert asyncio.get_running_loop().time() < 1.0


@pytest.mark.looptime
async def test_cancelled_score_function_fails_the_reward():
    async def my_scores(texts: Sequence[str]) -> list[float]:
        raise asyncio.CancelledError

    with pytest.raises(RewardError, match="my_scores"):
        await rewards(group_of("a", "bb"), RewardModel(my_scores, said))
    assert asyncio.get_running_loop().time() < 1.0


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (None, "my_chat returned None; it must return a ChatReply"),
        ("0.5", "my_chat returned '0.5'; it must return a ChatReply"),
        (ChatReply(None), "my_chat returned a ChatReply with the message None"),  # pyright: ignore[reportArgumentType]
        (KeyError("choices"), "KeyError: 'choices'"),
        (asyncio.CancelledError(), "was cancelled"),
    ],
    ids=["none", "text", "no message", "error", "cancelled"],
)
async def test_invalid_reply_of_a_chat_function_fails_the_reward(reply: Any, problem: str):
    async def my_chat(messages: Sequence[Message], **_: Any) -> Any:
        if isinstance(reply, BaseException):
            raise reply
        return reply

    with pytest.raises(RewardError, match=problem):
        await rewards(group_of("a"), Judge(my_chat, said, float, on_failure=FailurePolicy(retries=0)))


async def test_text_function_that_fails_or_returns_no_text_fails_the_reward():
    cases: list[tuple[Any, str]] = [
        (lambda rollout: {}["text"], "KeyError: 'text'"),
        (lambda rollout: None, "is None; it must be a text"),
    ]
    for text, problem in cases:
        with pytest.raises(RewardError, match=f"reward_model.*{problem}"):
            await rewards(group_of("a"), RewardModel(scorer(1.0), text))


async def test_relative_judge_rejects_grades_without_an_order():
    def parse(text: str) -> Any:
        return {float(each) for each in text.split()}

    judge = Judge(grader(0.0), lambda rollouts: "?", parse, relative=True, on_failure=FailurePolicy(retries=0))
    with pytest.raises(RewardError, match=r"parse returned {0.0}; it must return 1 finite numbers in order"):
        await rewards(group_of("a"), judge)


@pytest.mark.looptime
async def test_unparsable_answer_is_not_cached(tmp_path: Path):
    texts = iter(["none", "3"])
    model = ScriptedJudge(lambda text: next(texts))
    assert await rewards(group_of("a"), Judge(model, said, float, cache=tmp_path)) == [3.0]
    assert len(model.asked) == 2


@pytest.mark.looptime
async def test_cached_answer_rejected_by_another_parse_is_requested_again(tmp_path: Path):
    judge = ScriptedJudge(length)
    assert await rewards(group_of("good"), Judge(judge, said, float, cache=tmp_path)) == [4.0]
    judge._says = lambda text: f"grade: {len(text)}"

    def after_colon(text: str) -> float:
        return float(text.split(": ")[1])

    assert await rewards(group_of("good"), Judge(judge, said, after_colon, cache=tmp_path)) == [4.0]
    assert await rewards(group_of("good"), Judge(judge, said, after_colon, cache=tmp_path)) == [4.0]
    assert judge.asked == ["good", "good"]


@pytest.mark.looptime
async def test_outage_limit_reached_during_a_call_reports_the_last_reason():
    asked = 0

    async def fails_then_hangs(messages: Sequence[Message], **_: Any) -> ChatReply:
        nonlocal asked
        asked += 1
        if asked > 1:
            await asyncio.sleep(1e6)
        raise GenerationError("the server is on fire")

    judge = Judge(fails_then_hangs, said, float, outage_s=60, on_failure=FailurePolicy(retries=0))
    with pytest.raises(RewardError, match="has failed for 60 s: the server is on fire"):
        await rewards(group_of("a"), judge)
    asked = 1
    judge = Judge(fails_then_hangs, said, float, outage_s=60, on_failure=FailurePolicy(retries=0))
    with pytest.raises(RewardError, match="has failed for 60 s: it did not answer, or demanded longer waits"):
        await rewards(group_of("a"), judge)


async def test_rejects_a_prompt_that_is_neither_text_nor_messages():
    judge = Judge(ScriptedJudge(length), lambda rollout: None, float, on_failure=FailurePolicy(retries=0))  # pyright: ignore[reportArgumentType]
    with pytest.raises(RewardError, match="the prompt of judge 'judge' for 'g/0' is None; it must be a text or"):
        await rewards(group_of("a"), judge)


async def test_truncated_judge_answer_is_logged_once(caplog: pytest.LogCaptureFixture):
    async def cut_off(messages: Sequence[Message], **_: Any) -> ChatReply:
        return ChatReply({"role": "assistant", "content": "1"}, FinishReason.LENGTH)

    assert await rewards(group_of("a", "b"), Judge(cut_off, said, float)) == [1.0, 1.0]
    assert caplog.text.count("was cut off after max_tokens = 512") == 1


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://judge", "http://"])
def test_endpoint_url_requires_scheme_and_host(url: str):
    with pytest.raises(ValueError, match='must begin with "http://" or "https://" and name a host'):
        Endpoint(url=url, model="judge")


@pytest.mark.looptime
async def test_calls_are_limited_in_flight_and_per_minute():
    clock = asyncio.get_running_loop().time
    model, began = ScriptedJudge(length), clock()
    await rewards(group_of(*"abcdefgh"), Judge(model, lambda r: f"{r.rollout_id}", lambda text: 1.0, in_flight=3))
    assert model.most_at_once == 3
    assert clock() - began == pytest.approx(3.0)
    began = clock()
    await rewards(group_of(*"abcd"), Judge(ScriptedJudge(length), said, float, per_minute=6))
    assert clock() - began == pytest.approx(31.0)


@pytest.mark.looptime
async def test_judge_call_survives_cancellation_and_is_reused():
    model = ScriptedJudge(length)
    judge = Judge(model, said, float)
    judging = asyncio.ensure_future(rewards(group_of("a"), judge))
    await asyncio.sleep(0.5)
    judging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await judging
    assert await rewards(group_of("a"), judge) == [1.0]
    assert model.asked == ["a"]


@pytest.mark.looptime
async def test_records_disagreement_with_exact_checks_and_between_judges():
    one, other = ScriptedJudge(lambda text: "0.75"), ScriptedJudge(lambda text: "0.25")
    group = group_of("a")
    exact = Reward(lambda rollout: 1.0, name="exact")
    await rewards(group, exact, Judge(one, said, float, name="one"), Judge(other, said, float, name="other"))
    metrics = group.rollouts[0].metrics
    assert (metrics["one_vs_exact"], metrics["other_vs_exact"]) == (0.25, 0.75)
    assert metrics["one_vs_other"] == 0.5
    assert {name for name in metrics if "_vs_" in name} == {"one_vs_exact", "other_vs_exact", "one_vs_other"}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"in_flight": 0}, "in_flight of judge 'judge' is 0; it must be positive"),
        ({"in_flight": 1.5}, "in_flight of judge 'judge' is 1.5; it must be an integer"),
        ({"per_minute": -1.0}, "per_minute of judge 'judge' is -1.0"),
        ({"outage_s": 0.0}, "timeout_s 0.0; it must be positive"),
        ({"price": (1.0,)}, r"price of judge 'judge' is \(1.0,\); it must be \(cost per million prompt tokens"),
        ({"price": (-1.0, 1.0)}, "price of judge 'judge'"),
    ],
)
def test_rejects_invalid_arguments(arguments: dict[str, Any], problem: str):
    with pytest.raises(ValueError, match=problem):
        Judge(ScriptedJudge(length), said, float, **arguments)
    with pytest.raises(ValueError, match="model of judge 'judge' is 'http://judge'; it must be an Endpoint"):
        Judge("http://judge", said, float)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="parse of judge 'judge' is 3"):
        Judge(ScriptedJudge(length), said, 3)  # pyright: ignore[reportArgumentType]


@pytest.mark.looptime
async def test_vllm_reward_model_is_called_in_deduplicated_batches():
    batches: list[list[str]] = []

    def classify(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/classify"
        body = json.loads(request.content)
        assert body["use_activation"] is False, "vLLM would squash the score of a reward model into 0 to 1"
        texts = body["input"]
        batches.append(texts)
        data = [{"index": i, "probs": [len(text) / 10], "num_classes": 1} for i, text in enumerate(texts)]
        return httpx.Response(200, json={"data": data[::-1]})

    score = ServedClassifier("http://rm/v1", "rm", transport=httpx.MockTransport(classify))
    group = group_of("a", "bb", "bb", "ccc")
    assert await rewards(group, RewardModel(score, said, batch=2)) == [0.1, 0.2, 0.2, 0.3]
    assert sorted(map(sorted, batches)) == [["a", "bb"], ["ccc"]]
    assert [rollout.metrics["reward_model_cached"] for rollout in group.rollouts] == [0.0, 0.0, 1.0, 0.0]


async def test_malformed_reward_model_answer_fails_the_reward():
    score = ServedClassifier(
        "http://rm", "rm", transport=httpx.MockTransport(lambda request: httpx.Response(200, json={"data": []}))
    )
    with pytest.raises(RewardError, match=r"has failed for 0.01 s: .*sent 0 scores for 1 texts"):
        await rewards(group_of("a"), RewardModel(score, said, outage_s=0.01))


def classifier_of(probs: list[float], label: int | None = None) -> ServedClassifier:
    def classify(request: httpx.Request) -> httpx.Response:
        assert json.loads(request.content)["use_activation"] is (label is not None)
        return httpx.Response(200, content=json.dumps({"data": [{"index": 0, "probs": probs}]}))

    return ServedClassifier("http://rm", "rm", label=label, transport=httpx.MockTransport(classify))


async def test_multi_class_classifier_requires_a_label():
    with pytest.raises(RewardError, match="has 2 outputs; choose the one that scores with label"):
        await rewards(group_of("a"), RewardModel(classifier_of([0.2, 0.8]), said))
    with pytest.raises(RewardError, match="has 2 outputs, numbered from 0"):
        await rewards(group_of("a"), RewardModel(classifier_of([0.2, 0.8], label=2), said))
    assert await rewards(group_of("a"), RewardModel(classifier_of([0.2, 0.8], label=1), said)) == [0.8]


async def test_non_finite_score_is_not_cached(tmp_path: Path):
    with pytest.raises(RewardError, match="nan is not a finite number"):
        await rewards(group_of("a"), RewardModel(classifier_of([float("nan")]), said, cache=tmp_path))
    assert list_files(tmp_path) == []
    assert await rewards(group_of("a"), RewardModel(classifier_of([3.5]), said, cache=tmp_path)) == [3.5]


async def test_local_classifier_scores_with_logits(tmp_path: Path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_labels=1,
        pad_token_id=0,
    )
    model = transformers.Qwen3ForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = [float(model(**tokenizer(text, return_tensors="pt")).logits[0, 0]) for text in ("good", "bad")]
    found = await rewards(group_of("good", "bad"), RewardModel(LocalClassifier(tmp_path), said))
    assert found == pytest.approx(expected, abs=1e-5)
