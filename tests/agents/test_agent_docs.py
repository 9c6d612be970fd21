"""Agent, settings and harness shown in docs/how_to/agents.md."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from background import HANG_S
from serving.conversation_fakes import BASE, chat_template_renderer
from serving.served import Engines

from titan_rl import load_config
from titan_rl.core.console import LOG
from titan_rl.rollout.group.rollouter import Rollouter
from titan_rl.rollout.renderer.tokenizer import load_tokenizer
from titan_rl.rollout.task import RunContext
from titan_rl.rollout.types import RolloutGroup, RolloutStatus
from titan_rl.tasks.agents import AgentTask
from titan_rl.tasks.agents.settings import AgentSettings
from titan_rl.types import SamplingParams

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how_to" / "agents.md").read_text()
(AGENT, _, HARNESS), (SAMPLES,), (SETTINGS,) = (
    re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) for language in ("python", "json", "toml")
)


ANSWER = "<alphabetical_sorted>\nAdaStone\nBenPatel\nVictorRossi\n</alphabetical_sorted>"

Play = Callable[[], Awaitable[RolloutGroup]]


def address_in(folder: Path) -> str:
    (file,) = folder.glob("agents-*.json")
    return json.loads(file.read_text())["url"]


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AgentTask:
    """Task of the page's files, in the current folder."""
    files = {"my_agent.py": AGENT, "my_harness.py": HARNESS, "agent.toml": SETTINGS, "train.jsonl": SAMPLES}
    for name, text in {**files, "validation.jsonl": SAMPLES}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    task = load_config("agent.toml").tasks[0].task
    assert isinstance(task, AgentTask)
    return task


@asynccontextmanager
async def playing(task: AgentTask, folder: Path) -> AsyncIterator[Play]:
    """Yield a function that plays a group with a policy that always answers correctly."""
    tokenizer, renderer = load_tokenizer(str(BASE)), chat_template_renderer()
    reply = [*tokenizer.encode(ANSWER, add_special_tokens=False), renderer.get_stop_token_ids()[0]]
    header = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)

    def script(context: Sequence[int]) -> int:
        begin = max(at for at in range(len(context)) if list(context[at : at + len(header)]) == header)
        return reply[len(context) - begin - len(header)]

    run = RunContext(str(BASE), renderer, 256, folder, LOG)
    rollouter = Rollouter(lambda sample: task.make_env(sample, renderer), task.rubric(), max_context=256)
    async with Engines(1, vocab_size=len(tokenizer), script=script).router() as router, task.open(run):
        (sample,) = task.validation_samples(1)
        yield lambda: rollouter.run_group(
            router.generate, sample, group_id="g", group_size=2, sampling=SamplingParams(max_tokens=64)
        )


async def test_documented_agent_earns_its_reward(task: AgentTask, tmp_path: Path) -> None:
    async with playing(task, tmp_path) as play:
        group = await play()
    assert [(one.status, one.error, one.reward) for one in group.rollouts] == [(RolloutStatus.COMPLETED, None, 1.0)] * 2


async def test_documented_harness_plays_until_the_run_ends(task: AgentTask, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TITAN_RL_HARNESS_KEY", "a-long-secret")
    task = task.model_copy(update={"command": ()})
    async with playing(task, tmp_path) as play:
        harness = await asyncio.create_subprocess_exec(
            *(sys.executable, "my_harness.py", address_in(tmp_path)), env=os.environ
        )
        try:
            group = await play()
        except BaseException:
            harness.kill()
            raise
    assert await asyncio.wait_for(harness.wait(), HANG_S) == 0
    assert [(one.status, one.reward) for one in group.rollouts] == [(RolloutStatus.COMPLETED, 1.0)] * 2


def test_documented_settings_match_the_defaults() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \|", PAGE.partition("## Settings")[2].partition("\n## ")[0], re.M)
    defaults = AgentSettings().model_dump(mode="json")
    assert {name: json.loads(default) for name, default in rows} == defaults
