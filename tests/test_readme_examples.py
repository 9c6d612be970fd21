"""First examples of the docs, runnable. README.md and docs/how_to/mocks.md show them word for word."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rollout.test_message_token_env import LetterRenderer

from titan_rl import (
    Completion,
    FinishReason,
    Reward,
    Rollouter,
    RolloutStatus,
    Rubric,
    SamplingParams,
    TokenObservation,
    TokenStep,
    VersionSpan,
    load_config,
)

README = Path(__file__).parents[1] / "README.md"
MOCKS = README.parent / "docs" / "how_to" / "mocks.md"


class CountDown:
    """Asks for token n - 1 after token n, until 0."""

    def __init__(self, start: int) -> None:
        self.tokens = [start]

    async def reset(self) -> TokenObservation:
        return TokenObservation(self.tokens)

    async def step(self, completion: Completion) -> TokenStep:
        right = completion.token_ids[0] == self.tokens[-1] - 1
        self.tokens = [*self.tokens, *completion.token_ids]
        if right and self.tokens[-1] > 0:
            return TokenStep(self.tokens, rewards={"right": 1.0})
        return TokenStep(status=RolloutStatus.COMPLETED, rewards={"right": float(right)})

    async def close(self) -> None: ...


async def count_down(prompt_token_ids, *, request_id, session_id=None, sampling) -> Completion:
    """A `GenerateFn` that always knows the answer."""
    answer = [prompt_token_ids[-1] - 1]
    return Completion(request_id, answer, [0.0] * len(answer), FinishReason.STOP, [VersionSpan(0, len(answer))])


@pytest.mark.asyncio
async def test_a_custom_env_and_a_mock_generate_play_a_group() -> None:
    rubric = Rubric([Reward(lambda rollout: len(rollout.turns), name="turns")])
    rollouter = Rollouter(CountDown, rubric, max_context=16)
    group = await rollouter.run_group(count_down, 3, group_id="g0", group_size=2, sampling=SamplingParams(max_tokens=1))
    assert [rollout.reward for rollout in group.rollouts] == [3.0, 3.0]
    assert group.rollouts[0].status is RolloutStatus.COMPLETED


@pytest.mark.skipif(not MOCKS.exists(), reason="an installed package has no docs")
def test_mocks_page_shows_these_examples() -> None:
    page = MOCKS.read_text()
    for example in (CountDown, count_down, test_a_custom_env_and_a_mock_generate_play_a_group):
        assert inspect.getsource(example).strip() in page


@pytest.mark.skipif(not MOCKS.exists(), reason="an installed package has no docs")
def test_shown_examples_import_what_they_use() -> None:
    *_, env, test = re.findall(r"```python\n(.*?)```", MOCKS.read_text(), re.DOTALL)
    (task,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    for block in (env, env + test, task):
        checked = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F401,F821", "-"]
        done = subprocess.run(checked, input=block, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout


@pytest.mark.skipif(not README.exists(), reason="an installed package has no README")
async def test_readme_task_loads_from_its_file_and_is_played(tmp_path: Path, monkeypatch) -> None:
    (module,) = re.findall(r"```python\n(import random\n.*?)```", README.read_text(), re.DOTALL)
    (settings,) = re.findall(r"```toml\n(.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "sums.py").write_text(module)
    (tmp_path / "sums.toml").write_text(settings)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    task = load_config("sums.toml", check_files=False).tasks[0].task
    assert type(task) is sys.modules.pop("sums").Sums

    async def second_time_right(prompt_token_ids, *, request_id, session_id=None, sampling) -> Completion:
        text = "".join(map(chr, prompt_token_ids))
        a, b = re.findall(r"\d+", text)[:2]
        answer = [*map(ord, str(int(a) + int(b)) if "No." in text else "unsure"), 0]
        return Completion(request_id, answer, [0.0] * len(answer), FinishReason.STOP, [VersionSpan(0, len(answer))])

    rollouter = Rollouter(lambda sample: task.make_env(sample, LetterRenderer()), task.rubric(), max_context=1024)
    (sample,) = task.validation_samples(1)
    group = await rollouter.run_group(
        second_time_right, sample, group_id="g", group_size=2, sampling=SamplingParams(max_tokens=64)
    )
    assert max(sample) > 99
    assert [(rollout.reward, len(rollout.turns)) for rollout in group.rollouts] == [(0.5, 2)] * 2
