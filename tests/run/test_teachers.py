"""Teachers of a run: their settings, the check of their tokens, and the policy as its own teacher."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from byte_tokenizer import byte_tokenizer
from user_project import project

from titan_rl import ChatTemplateRenderer, EngineLoop, GeneratorRouter, LocalReplica, SamplingParams, ScriptedEngine
from titan_rl.config.load import given_config, load_config
from titan_rl.core.console import LOG
from titan_rl.core.errors import ConfigError, GenerationError
from titan_rl.generation.scripted_engine import scripted_logprobs
from titan_rl.rollout.types import Rollout, RolloutGroup, Turn
from titan_rl.run.open_teachers import PrivilegedPrompt, TokenCheck, check_servers, check_tokens, open_teachers
from titan_rl.run.sft.train import supervised
from titan_rl.tasks.policy_servers import Served

__all__ = ["project"]

TEACHING = """
from echo_task import Echo

class Hinted(Echo):
    def teacher_messages(self, rollout):
        return [{"role": "user", "content": f"Say {rollout.sample}."}]
"""

SELF = [
    ("training.algorithm", "distillation"),
    ("training.teacher", "self"),
    ("task.type", "hinted_task:Hinted"),
]


@pytest.fixture
def teaching(project: Path) -> Path:
    (project / "hinted_task.py").write_text(TEACHING)
    return project


def server_of(tokenizer: Any, status: int = 200, **answer: Any) -> httpx.MockTransport:
    def tokenize(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/tokenize"
        asked = json.loads(request.content)
        tokens = tokenizer.encode(asked["prompt"], add_special_tokens=asked["add_special_tokens"])
        return httpx.Response(status, json={"tokens": tokens, **answer})

    return httpx.MockTransport(tokenize)


async def checked(transport: httpx.MockTransport) -> None:
    await check_tokens("big", Served("http://teacher/v1", ""), None, TokenCheck(byte_tokenizer()), transport=transport)


async def test_teacher_with_the_same_tokenizer_is_accepted() -> None:
    await checked(server_of(byte_tokenizer()))


async def test_teacher_with_another_tokenizer_is_rejected() -> None:
    class Shifted:
        def encode(self, text: str, **_: Any) -> list[int]:
            tokens = byte_tokenizer().encode(text)
            return [*tokens[:7], tokens[7] + 1, *tokens[8:]]

    with pytest.raises(
        ConfigError, match=r"the teacher big has another tokenizer than the policy: .* token 7 is \[\d+\]"
    ):
        await checked(server_of(Shifted()))


async def test_teacher_server_must_be_reachable_and_tokenize() -> None:
    with pytest.raises(ConfigError, match=r"answered 404: .* has to tokenize, as titan-rl serve and vLLM do"):
        await checked(server_of(byte_tokenizer(), 404))
    with pytest.raises(ConfigError, match="sent no list of tokens"):
        await checked(server_of(byte_tokenizer(), tokens="none"))

    def down(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(GenerationError, match="the teacher big cannot be reached at http://teacher/tokenize"):
        await checked(httpx.MockTransport(down))


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ([("training.distill_coef", "0.5")], "training.distill_coef = 0.5 without a teacher; set training.teacher to"),
        ([("training.algorithm", "distillation")], "training.distill_coef = 1 without a teacher"),
        ([("training.teacher", "self")], 'training.teacher = "self" has no effect'),
        (
            [("training.teacher", "gone"), ("training.distill_coef", "1")],
            "training.teacher = 'gone' is not a folder here",
        ),
        (
            [("training.teacher", "https://"), ("training.distill_coef", "1")],
            "training.teacher = 'https://' has no host or an invalid port; write http://HOST:PORT",
        ),
        (
            [("training.teacher", "http://localhost:80000"), ("training.distill_coef", "1")],
            "training.teacher = 'http://localhost:80000' has no host or an invalid port",
        ),
        ([("training.teacher", "self"), ("training.distill_coef", "1")], "has no method teacher_messages(rollout)"),
        (
            [*SELF, ("sampling.temperature", "0.7")],
            "temperature of task 'hinted' is 0.7, and its teacher 'self' scores",
        ),
        ([*SELF, ("training.distill_top_k", "4")], "training.distill_top_k = 4 has no effect"),
    ],
)
def test_invalid_teacher_settings_are_rejected(teaching: Path, overrides: list[tuple[str, str]], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("config.toml", overrides)
    assert problem in str(caught.value)


async def test_unreachable_server_is_found_by_the_check_before_a_run(teaching: Path) -> None:
    url = [("training.teacher", "http://127.0.0.1:9"), *SELF[::2]]
    with pytest.raises(GenerationError, match=r"the teacher http://127\.0\.0\.1:9 cannot be reached at"):
        await check_servers(load_config("config.toml", url))
    await check_servers(load_config("config.toml", SELF))


def test_missing_teacher_override_is_rejected_before_the_run(teaching: Path) -> None:
    overrides = {"training.teacher": "gone", "training.distill_coef": 1.0}
    with pytest.raises(ConfigError, match=r"arguments: training.teacher = 'gone' is not a folder here"):
        given_config(load_config("config.toml"), functions={}, overrides=overrides, check_files=True)


def test_teacher_folder_is_relative_to_its_config_file(teaching: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (teaching / "big").mkdir()
    with (teaching / "config.toml").open("a") as file:
        file.write('teacher = "big"\ndistill_coef = 1.0\n')
    monkeypatch.chdir(teaching.parent)
    config = load_config(teaching / "config.toml")
    assert config.teacher_of(config.tasks[0]) == str(teaching / "big")


def test_supervised_steps_have_no_teacher(teaching: Path) -> None:
    config = load_config("config.toml", [*SELF, ("training.distill", "forward")])
    assert config.training.distill_coef == 1.0
    training = supervised(config, config.model, 5).training
    assert (training.distill_coef, training.teacher, training.loss) == (0.0, "", "nll")


async def test_self_teacher_scores_tokens_after_the_teacher_messages(teaching: Path, tmp_path: Path) -> None:
    config = load_config("config.toml", [*SELF, ("training.distill", "reverse"), ("training.distill_top_k", "2")])
    renderer = ChatTemplateRenderer(byte_tokenizer())
    loop = EngineLoop(ScriptedEngine)
    await loop.start()
    router = GeneratorRouter([LocalReplica("engine", loop, lambda version: [])])
    answered = await router.generate([7, 8, 9], request_id="g/0/0", sampling=SamplingParams(max_tokens=4))
    rollout = Rollout("g/0", "g", 0, "spam", turns=[Turn([7, 8, 9], answered)], reward=1.0, advantage=0.0)
    async with open_teachers(config, tmp_path, router, renderer, LOG) as teachers:
        await teachers["hinted"].score(RolloutGroup("g", "spam", [rollout]))
    await router.close()

    prompt = PrivilegedPrompt(config.tasks[0], renderer)(rollout)
    assert "Say spam." in byte_tokenizer().decode(prompt)
    whole = scripted_logprobs([*prompt, *answered.token_ids], 0, 0)
    scores = rollout.turns[0].teacher
    assert scores is not None
    assert list(scores.logprobs) == pytest.approx(whole[len(prompt) - 1 :])
    assert scores.top_k == 2
    assert rollout.turns[0].completion.token_ids == answered.token_ids


def test_teacher_continues_the_beginning_of_an_answer(teaching: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("config.toml", [*SELF, ("training.distill", "reverse"), ("training.distill_top_k", "2")])
    source = config.tasks[0]
    messages = [{"role": "user", "content": "Say spam."}, {"role": "assistant", "content": "I say"}]
    monkeypatch.setattr(type(source.task), "teacher_messages", lambda self, rollout: messages)
    tokens = PrivilegedPrompt(source, ChatTemplateRenderer(byte_tokenizer()))(Rollout("g/0", "g", 0, "spam"))
    assert byte_tokenizer().decode(tokens).endswith("<|im_start|>assistant\nI say")
