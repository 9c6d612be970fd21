"""Minimum number of replicas: requests wait while fewer serve, and a retiring replica finishes its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from titan_rl.core.errors import NoReplicaError
from titan_rl.generation.router import GeneratorRouter, Limits
from titan_rl.types import Completion, FinishReason, SamplingParams, VersionSpan

SAMPLING = SamplingParams(max_tokens=4)


class Gated:
    """Replica that answers once `open` is set."""

    def __init__(self, name: str, *, is_open: bool = True) -> None:
        self.name = name
        self.open, self.asked = asyncio.Event(), asyncio.Event()
        if is_open:
            self.open.set()

    async def generate(self, prompt_token_ids: Sequence[int], *, request_id, session_id=None, sampling) -> Completion:
        self.asked.set()
        await self.open.wait()
        return Completion(request_id, [1], [0.0], FinishReason.STOP, (VersionSpan(0, 1),))

    async def pull(self, version: int) -> None: ...

    async def pause(self, mode: str) -> None: ...

    async def resume(self) -> None: ...

    async def abort(self, request_ids: Sequence[str]) -> None: ...

    async def close(self) -> None: ...


def ask(router: GeneratorRouter, name: str = "r") -> asyncio.Task[Completion]:
    return asyncio.ensure_future(router.generate([1], request_id=name, sampling=SAMPLING))


async def test_requests_wait_until_least_replicas_are_serving():
    router = GeneratorRouter([Gated("a")], least_replicas=2)
    request = ask(router)
    await asyncio.sleep(0)
    assert not request.done()
    assert router.trouble() == "1 generator serves, but at least 2 must"
    await router.add_replica(Gated("b"))
    assert (await request).finish_reason is FinishReason.STOP
    assert router.trouble() is None
    router.remove_replica("a")
    assert router.trouble() == "1 generator serves, but at least 2 must"
    router.remove_replica("b")
    assert router.trouble() == "there are no generators"
    await router.close()


async def test_too_few_replicas_error_names_the_required_number():
    router = GeneratorRouter([Gated("a")], least_replicas=3, limits=Limits(no_replica_s=0.01))
    with pytest.raises(NoReplicaError, match=r"fewer than 3 replicas served within 0\.01 s"):
        await ask(router)
    await router.close()


async def test_pull_reaches_replicas_even_when_they_are_too_few():
    router = GeneratorRouter([Gated("a")], least_replicas=2)
    assert (await router.pull_state_dict(1)).pulled == ("a",)
    assert (await router.pull_state_dict(2, "drain")).pulled == ("a",)
    await router.close()


async def test_router_reports_no_trouble_while_draining():
    a, b = Gated("a", is_open=False), Gated("b", is_open=False)
    router = GeneratorRouter([a, b], least_replicas=2)
    first, second = ask(router, "1"), ask(router, "2")
    await asyncio.gather(a.asked.wait(), b.asked.wait())
    pulling = asyncio.ensure_future(router.pull_state_dict(1, "drain"))
    while all(replica.serving for replica in router.replicas):  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert router.trouble() is None
    a.open.set()
    b.open.set()
    await asyncio.gather(pulling, first, second)
    await router.close()


@pytest.mark.parametrize("finishes", [True, False])
async def test_retiring_replica_finishes_or_hands_over_its_requests(finishes: bool):
    a, b = Gated("a", is_open=False), Gated("b")
    router = GeneratorRouter([a])
    old = ask(router, "old")
    await a.asked.wait()
    await router.add_replica(b)
    retiring = asyncio.ensure_future(router.retire_replica("a", finish_s=60 if finishes else 0.01))
    await asyncio.sleep(0)
    await ask(router, "new")
    assert b.asked.is_set()
    b.asked.clear()
    if finishes:
        assert not retiring.done()
        a.open.set()
    await retiring
    assert (await old).finish_reason is FinishReason.STOP
    assert b.asked.is_set() is not finishes
    assert [replica.name for replica in router.replicas] == ["b"]
    await router.close()
