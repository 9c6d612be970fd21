"""Program that plays a group of agents over scripted engines, with the journal of a run, and kills itself.

python killed.py FOLDER ANSWERS     # is killed at the first request after ANSWERS completions
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from test_agent_task import stage

from titan_rl import Completion, RolloutGroup, resume_on_abort
from titan_rl.run.journal.run_journal import RunJournal


async def play(folder: Path, answers: int | None = None) -> tuple[RolloutGroup, list[str]]:
    """Play a group, and return it with the requests that reached an engine.

    Args:
        answers: Number of completions after which the process is killed.
    """
    journal, asked = RunJournal(folder / "journal"), list[str]()
    async with stage(folder, keep="none") as it:

        async def generate(prompt_token_ids, *, request_id, session_id=None, sampling) -> Completion:
            if len(asked) == answers:
                journal.drain()
                os.kill(os.getpid(), signal.SIGKILL)
            asked.append(f"{request_id} {prompt_token_ids}")
            return await it.router.generate(
                prompt_token_ids, request_id=request_id, session_id=session_id, sampling=sampling
            )

        return await it.group(generate=resume_on_abort(journal.record(generate, 1))), asked


if __name__ == "__main__":
    asyncio.run(play(Path(sys.argv[1]), int(sys.argv[2])))
