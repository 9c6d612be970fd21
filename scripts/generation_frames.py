"""Count the frames between a rollout's call of its `GenerateFn` and the router's send to a replica.

python scripts/generation_frames.py
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from types import FrameType

from titan_rl import (
    EngineLoop,
    GenerateFn,
    GeneratorRouter,
    LocalReplica,
    SamplingParams,
    ScriptedEngine,
)
from titan_rl.generation.continuation import Generation, Resume
from titan_rl.generation.router.dispatch import Dispatcher


def as_in_a_run(router: GeneratorRouter) -> GenerateFn:
    """Make a `GenerateFn` with the same surrounding steps as that of a run's training group."""
    steps = [lambda _: contextlib.nullcontext()] * 2  # stand for journal and suspension

    async def ready() -> None: ...

    return Generation(
        router.stream,
        around_attempt=steps,
        ready=ready,
        resume=Resume(router.wait_resumed),
    )


async def frames_to_send() -> list[str]:
    """Return the functions from the `GenerateFn` to the router's send to a replica, both included, outermost first."""
    replica = LocalReplica("engine-0", EngineLoop(ScriptedEngine), lambda version: [])
    await replica.loop.start()
    router = GeneratorRouter([replica])
    found: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        caller: FrameType | None = frame
        if event == "call" and frame.f_code is Dispatcher._send.__code__ and not found:
            while caller is not None and caller.f_code is not Generation.__call__.__code__:
                found.insert(0, caller.f_code.co_qualname)
                caller = caller.f_back
            found.insert(0, Generation.__call__.__qualname__)

    sys.setprofile(note)
    try:
        await as_in_a_run(router)([1, 2, 3], request_id="g/0/0", sampling=SamplingParams(max_tokens=4))
    finally:
        sys.setprofile(None)
        await router.close()
    return found


if __name__ == "__main__":
    found = asyncio.run(frames_to_send())
    print(len(found), " -> ".join(found))
