"""Programs that play episodes: how they end, and that nothing of them is left."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from talk import SAMPLING, chat_template_renderer, completion, reply, user

from titan_rl.rollout.types import RolloutStatus
from titan_rl.serving.episodes.agent_command import AgentCommand
from titan_rl.serving.episodes.episode import Episode
from titan_rl.serving.episodes.limits import EpisodeLimits

URL = "http://127.0.0.1:1"
STUBBORN = """
trap '' TERM
sh -c "trap '' TERM; echo \\$\\$ >> pids; while :; do sleep 0.1; done" &
setsid sh -c "trap '' TERM; echo \\$\\$ >> pids; while :; do sleep 0.1; done" &
(setsid sh -c "echo \\$\\$ >> pids; while :; do sleep 0.1; done" &)
echo $$ >> pids
while [ $(wc -l < pids) -lt 4 ]; do sleep 0.05; done
mv pids all
while :; do sleep 0.1; done
"""


def episode_of(time_s: float = 60.0) -> Episode:
    return Episode("g0.0", chat_template_renderer(), EpisodeLimits(time_s=time_s))


def agent(tmp_path: Path, script: str, end_s: float = 0.1) -> AgentCommand:
    return AgentCommand(["sh", "-c", script], tmp_path, end_s=end_s)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def started(tmp_path: Path) -> list[int]:
    """The processes of `STUBBORN`, when all of them run."""
    async with asyncio.timeout(60.0):
        while not (file := tmp_path / "g0.0" / "all").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return [int(line) for line in file.read_text().split()]


async def test_a_program_has_a_folder_and_the_way_to_its_episode(tmp_path: Path) -> None:
    episode = episode_of()
    script = "pwd; echo $OPENAI_BASE_URL $ANTHROPIC_BASE_URL; [ $OPENAI_API_KEY = $ANTHROPIC_API_KEY ] && echo same"
    await agent(tmp_path, script).run(episode, URL + "/")
    assert episode.status is RolloutStatus.COMPLETED
    folder = tmp_path / "g0.0"
    assert (folder / "output.txt").read_text().split() == [str(folder), f"{URL}/v1", URL, "same"]


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("echo out; echo oh no >&2; exit 3", r"exit code 3; its output ends: out\noh no$"),
        ("kill -KILL $$", "exit code -9 and printed nothing"),
    ],
)
async def test_a_crash_is_a_rollout_with_a_status(tmp_path: Path, script: str, error: str) -> None:
    episode = episode_of()
    await agent(tmp_path, script).run(episode, URL)
    assert episode.status is RolloutStatus.ERROR_ENV
    with pytest.raises(AssertionError, match=error):
        raise AssertionError(episode.error)


async def test_a_program_that_is_not_there_is_too(tmp_path: Path) -> None:
    episode = episode_of()
    await AgentCommand([str(tmp_path / "none")], tmp_path).run(episode, URL)
    assert episode.status is RolloutStatus.ERROR_ENV
    assert episode.error is not None
    assert "could not be started: FileNotFoundError" in episode.error


async def test_the_end_of_its_episode_ends_a_program_and_all_that_it_started(tmp_path: Path) -> None:
    episode = episode_of()
    episode.record(episode.tree.prompt([user("a")]), completion(), reply("b"), SAMPLING)
    running = asyncio.create_task(agent(tmp_path, STUBBORN).run(episode, URL))
    pids = await started(tmp_path)
    assert len(pids) == 4
    assert all(map(lives, pids))
    episode.end(RolloutStatus.TRUNCATED_TIME)
    await running
    assert not any(map(lives, pids))
    assert episode.status is RolloutStatus.TRUNCATED_TIME


async def test_so_does_a_cancellation(tmp_path: Path) -> None:
    episode = episode_of()
    running = asyncio.create_task(agent(tmp_path, STUBBORN).run(episode, URL))
    pids = await started(tmp_path)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not any(map(lives, pids))


async def test_what_outlives_a_program_is_killed(tmp_path: Path) -> None:
    episode = episode_of()
    script = "(setsid sh -c 'echo $$ > pid; mv pid left; sleep 60' &) ; while ! [ -e left ]; do sleep 0.02; done"
    await agent(tmp_path, script).run(episode, URL)
    assert episode.status is RolloutStatus.COMPLETED
    assert not lives(int((tmp_path / "g0.0" / "left").read_text()))


async def test_a_program_that_deletes_its_folder_is_a_crash_like_others(tmp_path: Path) -> None:
    episode = episode_of()
    await agent(tmp_path, "rm -rf $PWD; exit 3").run(episode, URL)
    assert episode.status is RolloutStatus.ERROR_ENV
    assert "exit code 3; its output cannot be read" in (episode.error or "")
