"""New weights through the router. Virtual time."""

from __future__ import annotations

import asyncio

import pytest

from titan_rl.core.errors import GenerationError, StateDictError, UnavailableWeightsError
from titan_rl.generation.router import GeneratorRouter, Limits
from titan_rl.testing.fake_replica import FakeReplica
from titan_rl.types import Completion, FinishReason, SamplingParams

pytestmark = pytest.mark.looptime


def ask(router: GeneratorRouter, request_id: str, tokens: int = 10) -> asyncio.Task[Completion]:
    return asyncio.create_task(router.generate([1], request_id=request_id, sampling=SamplingParams(max_tokens=tokens)))


def serving(router: GeneratorRouter) -> list[str]:
    return [replica.name for replica in router.replicas if replica.serving]


async def test_hot_swap_pulls_while_requests_run() -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    a.pull_s = b.pull_s = 2
    router = GeneratorRouter([a, b])
    running = [ask(router, "1"), ask(router, "2")]
    await asyncio.sleep(3.5)
    report = await router.pull_state_dict(1)
    assert (report.version, report.pulled, dict(report.failed)) == (1, ("a", "b"), {})
    for request in running:
        assert (await request).versions == [0] * 5 + [1] * 5
    assert router.version == 1
    await router.close()


async def test_drain_is_rolling_and_starts_with_the_least_busy() -> None:
    a, b, c = replicas = [FakeReplica(name) for name in "abc"]
    for replica in replicas:
        replica.pull_s = 3
    router = GeneratorRouter(replicas)
    running = [ask(router, "1", tokens=30), ask(router, "2", tokens=20), ask(router, "3", tokens=10)]
    await asyncio.sleep(0)
    pulling = asyncio.create_task(router.pull_state_dict(1, "drain"))
    order: list[str] = []
    out: list[set[str]] = []
    while not pulling.done():
        out.append(set("abc") - set(serving(router)))
        order += [replica.name for replica in replicas if replica.version == 1 and replica.name not in order]
        await asyncio.sleep(0.25)
    assert order[0] == "c"
    assert max(len(names) for names in out) == 1
    for request in running:
        assert (await request).versions == [0] * len((await request).token_ids)
    assert (await pulling).aborted == ()
    assert {a.version, b.version, c.version} == {1}
    await router.close()


async def test_drain_of_the_only_replica_makes_requests_wait() -> None:
    a = FakeReplica("a")
    a.pull_s = 5
    router = GeneratorRouter([a])
    running = ask(router, "1")
    await asyncio.sleep(1)
    pulling = asyncio.create_task(router.pull_state_dict(1, "drain"))
    await asyncio.sleep(1)
    late = ask(router, "2")
    await pulling
    assert set((await running).versions) == {0}
    assert set((await late).versions) == {1}
    await router.close()


async def test_drain_aborts_requests_that_exceed_its_limit() -> None:
    a = FakeReplica("a")
    router = GeneratorRouter([a], limits=Limits(drain_s=20))
    running = ask(router, "1", tokens=1000)
    await asyncio.sleep(0)
    report = await router.pull_state_dict(1, "drain")
    assert report.aborted == ("1",)
    assert (await running).finish_reason is FinishReason.ABORT
    assert set((await running).versions) == {0}
    await router.close()


@pytest.mark.parametrize("mode", ["hot_swap", "drain"])
async def test_replica_serves_nothing_until_its_failed_pull_succeeds(mode: str) -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    a.pull_error = StateDictError("torn")
    failed: list[str] = []
    router = GeneratorRouter([a, b], on_replica_failed=lambda replica, error: failed.append(replica.name))
    report = await router.pull_state_dict(1, mode)  # pyright: ignore[reportArgumentType]
    assert (report.pulled, dict(report.failed)) == (("b",), {"a": a.pull_error})
    assert failed == ["a"]
    for index in range(20):
        assert set((await ask(router, str(index))).versions) == {1}
    assert a.served == []
    assert "torn" in str(router.replicas[0].last_error)
    a.pull_error = None
    await asyncio.sleep(60)
    assert serving(router) == ["a", "b"]
    assert a.version == 1
    assert router.replicas[0].last_error is None
    await router.close()


async def test_pull_that_fails_on_every_replica_raises_the_cause() -> None:
    a = FakeReplica("a")
    a.pull_error = StateDictError("torn")
    router = GeneratorRouter([a])
    with pytest.raises(StateDictError, match=r"version 1.*torn") as caught:
        await router.pull_state_dict(1)
    assert caught.value.__cause__ is a.pull_error
    a.pull_error = None
    await router.pull_state_dict(2)
    assert a.version == 2
    await router.close()


@pytest.mark.parametrize("mode", ["hot_swap", "drain"])
@pytest.mark.parametrize("before", [None, 1])
async def test_unavailable_version_changes_nothing(mode: str, before: int | None) -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    router = GeneratorRouter([a, b])
    if before is not None:
        await router.pull_state_dict(before)
    running = [ask(router, "1", tokens=4), ask(router, "2", tokens=4)]
    await asyncio.sleep(0)
    a.pull_error = b.pull_error = UnavailableWeightsError("gone")
    with pytest.raises(UnavailableWeightsError, match=r"version 3.*gone"):
        await router.pull_state_dict(3, mode)  # pyright: ignore[reportArgumentType]
    assert router.version == before
    assert serving(router) == ["a", "b"]
    running.append(ask(router, "3"))
    assert [set((await request).versions) for request in running] == [{before or 0}] * 3
    a.pull_error = b.pull_error = None
    assert (await router.pull_state_dict(2)).pulled == ("a", "b")
    await router.close()


@pytest.mark.parametrize("mode", ["hot_swap", "drain"])
async def test_replica_waits_for_a_version_that_another_has_loaded(mode: str) -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    a.pull_error = UnavailableWeightsError("gone")
    router = GeneratorRouter([a, b])
    report = await router.pull_state_dict(1, mode)  # pyright: ignore[reportArgumentType]
    assert (report.pulled, router.version, serving(router)) == (("b",), 1, ["b"])
    a.pull_error = None
    await asyncio.sleep(60)
    assert serving(router) == ["a", "b"]
    await router.close()


async def test_replicas_recover_with_the_served_version_after_a_failed_pull() -> None:
    a = FakeReplica("a")
    router = GeneratorRouter([a], limits=Limits(no_replica_s=20))
    await router.pull_state_dict(1)
    a.pull_error = GenerationError("lost")
    with pytest.raises(StateDictError, match="version 2"):
        await router.pull_state_dict(2)
    a.pull_error = None
    assert router.version == 1
    assert set((await ask(router, "1")).versions) == {1}
    await router.close()


async def test_pull_survives_the_loss_of_the_last_replica() -> None:
    a = FakeReplica("a")
    a.pull_error = GenerationError("dead")
    router = GeneratorRouter([a], limits=Limits(no_replica_s=100))
    pulling = asyncio.create_task(router.pull_state_dict(1))
    await asyncio.sleep(10)
    router.remove_replica("a")
    await router.add_replica(FakeReplica("a"))
    assert (await pulling).pulled == ("a",)
    router.remove_replica("a")
    with pytest.raises(StateDictError, match="no replica serves with version 2"):
        await router.pull_state_dict(2)
    await router.close()


async def test_overlapping_pulls_skip_to_the_newest() -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    a.pull_s, b.pull_s = 10, 1
    router = GeneratorRouter([a, b])
    pulls = [asyncio.create_task(router.pull_state_dict(1))]
    await asyncio.sleep(2)
    pulls += [asyncio.create_task(router.pull_state_dict(version)) for version in (2, 3, 4)]
    reports = await asyncio.gather(*pulls)
    assert a.calls == ["pull 1", "pull 4"]
    assert b.calls == ["pull 1", "pull 4"]
    assert [report.version for report in reports] == [1, 2, 3, 4]
    assert (await router.pull_state_dict(3)).pulled == ("a", "b")
    assert a.version == 4
    await router.close()


async def test_pull_fails_at_its_time_limit() -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    a.pull_s = 1000
    router = GeneratorRouter([a, b], limits=Limits(pull_s=30))
    report = await router.pull_state_dict(1)
    assert report.pulled == ("b",)
    assert isinstance(report.failed["a"], TimeoutError)
    assert str(report.failed["a"]) == "the pull of version 1 took longer than 30 s"
    await router.close()


@pytest.mark.parametrize("mode", ["hot_swap", "drain"])
async def test_cancelled_pull_still_updates_every_replica(mode: str) -> None:
    a = FakeReplica("a")
    a.pull_s = 10
    failed: list[str] = []
    router = GeneratorRouter([a], on_replica_failed=lambda replica, error: failed.append(replica.name))
    pulling = asyncio.create_task(router.pull_state_dict(1, mode))  # pyright: ignore[reportArgumentType]
    await asyncio.sleep(5)
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    assert set((await ask(router, "1")).versions) == {1}
    assert failed == []
    await router.close()


@pytest.mark.parametrize("pause_at", [0.5, 15.0])
async def test_drain_limit_excludes_pause_time(pause_at: float) -> None:
    replicas = [FakeReplica("a"), FakeReplica("b")]
    router = GeneratorRouter(replicas, limits=Limits(drain_s=20))
    running = [ask(router, "1", tokens=12), ask(router, "2", tokens=30)]
    await asyncio.sleep(0)
    pulling = asyncio.create_task(router.pull_state_dict(1, "drain"))
    await asyncio.sleep(pause_at)
    await router.pause("keep")
    await asyncio.sleep(100)
    await router.resume()
    assert (await pulling).aborted == ()
    assert [len((await request).token_ids) for request in running] == [12, 30]
    assert [replica.version for replica in replicas] == [1, 1]
    await router.close()


async def test_paused_router_rejects_drain_and_allows_hot_swap() -> None:
    a = FakeReplica("a")
    router = GeneratorRouter([a])
    running = ask(router, "1")
    await asyncio.sleep(3.5)
    await router.pause("keep")
    with pytest.raises(RuntimeError, match="cannot drain while paused"):
        await router.pull_state_dict(1, "drain")
    await router.pull_state_dict(1)
    await router.resume()
    assert set((await running).versions) == {0, 1}
    with pytest.raises(ValueError, match=r"'swap'.*hot_swap, drain"):
        await router.pull_state_dict(2, "swap")  # pyright: ignore[reportArgumentType]
    await router.close()


async def test_router_records_the_version_that_a_replica_reports() -> None:
    """An abandoned pull arrived after the next one, or another caller has pulled a newer version."""

    class Reporting(FakeReplica):
        reported = 7

        async def pull(self, version: int) -> int:
            await super().pull(version)
            return self.reported

    a, b = Reporting("a"), FakeReplica("b")
    router = GeneratorRouter([a, b])
    report = await router.pull_state_dict(6)
    assert report.pulled == ("a", "b")
    assert [replica.version for replica in router.replicas] == [7, 6]
    await router.pull_state_dict(7)
    assert a.calls == ["pull 6"]  # there was nothing to do
    report = await router.pull_state_dict(8)
    assert report.pulled == ("b",)
    assert str(report.failed["a"]) == "replica a was asked to pull version 8, but has version 7"
    assert serving(router) == ["b"]
    a.reported = 8
    await asyncio.sleep(60)
    assert [(replica.version, replica.serving) for replica in router.replicas] == [(8, True), (8, True)]
    await router.close()
