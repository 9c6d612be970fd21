"""Programs that play episodes: their statuses and the cleanup of their processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from background import HANG_S

from titan_rl.rollout.types import RolloutStatus
from titan_rl.serving.episode import Episode, EpisodeLimits
from titan_rl.tasks.agents import reaper
from titan_rl.tasks.agents.program import AgentProgram, agent_environment, agent_processes, make_folder

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


OWNER = """
import asyncio, sys
from pathlib import Path
from titan_rl.tasks.agents.program import AgentProgram, agent_processes
from titan_rl.serving.episode import Episode

async def main():
    async with agent_processes() as processes:
        await AgentProgram(processes).run(Episode("e", None), ["sh", "-c", sys.argv[2]], {}, Path(sys.argv[1]))

asyncio.run(main())
"""


def episode_of(time_s: float = 60.0) -> Episode:
    return Episode("g0.0", None, EpisodeLimits(time_s=time_s))


async def play(episode: Episode, folder: Path, script: str, *, output_bytes: int = 1000, end_s: float = 0.1) -> None:
    async with agent_processes() as processes:
        program = AgentProgram(processes, output_bytes=output_bytes, end_s=end_s)
        environment = {**os.environ, **agent_environment(URL, episode)}
        await program.run(episode, ["sh", "-c", script], environment, folder)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def started(folder: Path) -> list[int]:
    """Wait until all processes of `STUBBORN` run, and return their pids."""
    async with asyncio.timeout(HANG_S):
        while not (file := folder / "all").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return [int(line) for line in file.read_text().split()]


async def test_program_gets_a_folder_and_its_episode_address(tmp_path: Path) -> None:
    episode = episode_of()
    script = "pwd; echo $OPENAI_BASE_URL $ANTHROPIC_BASE_URL; "
    script += '[ $OPENAI_API_KEY = $ANTHROPIC_API_KEY ] && [ -z "$ANTHROPIC_AUTH_TOKEN" ] && echo same'
    await play(episode, tmp_path, script)
    assert episode.status is RolloutStatus.COMPLETED
    url = f"{URL}/episodes/g0.0"
    assert (tmp_path / "output.txt").read_text().split() == [str(tmp_path), f"{url}/v1", url, "same"]


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("echo out; echo oh no >&2; exit 3", "exit code 3; its output ends: out\noh no ({output})"),
        ("kill -KILL $$", "exit code -9; it printed nothing"),
        ("echo gone; rm -rf $PWD; exit 3", "exit code 3; its output ends: gone ({output})"),
    ],
)
async def test_crash_sets_the_episode_status(tmp_path: Path, script: str, error: str) -> None:
    episode = episode_of()
    folder = make_folder(tmp_path, "own")
    await play(episode, folder, script)
    error = f"the agent ended with {error.format(output=folder / 'output.txt')}"
    assert (episode.status, episode.error) == (RolloutStatus.ERROR_ENV, error)


async def test_missing_program_sets_the_episode_status(tmp_path: Path) -> None:
    episode = episode_of()
    async with agent_processes() as processes:
        await AgentProgram(processes).run(episode, [str(tmp_path / "none")], {}, tmp_path)
    assert episode.status is RolloutStatus.ERROR_ENV
    assert "could not be started: FileNotFoundError" in (episode.error or "")


async def test_episode_end_kills_the_program_and_its_descendants(tmp_path: Path) -> None:
    episode = episode_of()
    running = asyncio.create_task(play(episode, tmp_path, STUBBORN))
    pids = await started(tmp_path)
    assert len(pids) == 4
    assert all(map(lives, pids))
    episode.end(RolloutStatus.TRUNCATED_TIME)
    await running
    assert not any(map(lives, pids))
    assert episode.status is RolloutStatus.TRUNCATED_TIME


async def test_cancellation_kills_the_program_and_its_descendants(tmp_path: Path) -> None:
    episode = episode_of()
    running = asyncio.create_task(play(episode, tmp_path, STUBBORN))
    pids = await started(tmp_path)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not any(map(lives, pids))


async def test_descendants_left_by_a_program_are_killed(tmp_path: Path) -> None:
    episode = episode_of()
    script = "(setsid sh -c 'echo $$ > pid; mv pid left; sleep 60' &) ; while ! [ -e left ]; do sleep 0.02; done"
    await play(episode, tmp_path, script)
    assert episode.status is RolloutStatus.COMPLETED
    assert not lives(int((tmp_path / "left").read_text()))


async def test_agents_end_when_their_owner_is_killed(tmp_path: Path) -> None:
    """Also when it is killed, so that it cannot end them itself."""
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, str(tmp_path), STUBBORN, stdout=asyncio.subprocess.DEVNULL
    )
    pids = await started(tmp_path)
    owner.kill()
    await owner.wait()
    async with asyncio.timeout(HANG_S):
        while any(map(lives, pids)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_output_is_bounded_and_errors_quote_its_end(tmp_path: Path) -> None:
    episode = episode_of()
    await play(episode, tmp_path, "echo first; seq 100000; echo last; exit 1", output_bytes=1000)
    kept = (tmp_path / "output.txt").read_text()
    assert kept.startswith("first\n1\n2\n")
    assert "bytes are left out" in kept
    assert kept.endswith("100000\nlast\n")
    assert len(kept) < 1000 + 5000
    assert (episode.error or "").endswith(f"100000\nlast ({tmp_path / 'output.txt'})")


async def test_output_that_fits_is_kept_unchanged(tmp_path: Path) -> None:
    for number, size in enumerate((999, 1000, 1001, 3000)):
        folder = make_folder(tmp_path, str(number))
        await play(episode_of(), folder, f"head -c {size} /dev/zero | tr '\\0' x", output_bytes=1000)
        assert (folder / "output.txt").read_text() == "x" * size


def test_make_folder_returns_unique_folders(tmp_path: Path) -> None:
    names = [make_folder(tmp_path / "agents", "a.b").name for _ in range(3)]
    assert names == ["a.b", "a.b-2", "a.b-3"]


async def test_failed_process_scan_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(owner: str, marks: object = None) -> None:
        raise OSError("too many open files")

    async def run() -> None:
        async with asyncio.timeout(HANG_S), processes.running(["true"], dict(os.environ), subprocess.DEVNULL):
            pass

    async with agent_processes() as processes:
        with monkeypatch.context() as failing:
            failing.setattr(reaper, "kill_marked", fail)
            with pytest.raises(OSError, match="too many open files"):
                await run()
        await run()
