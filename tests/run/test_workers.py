"""Behind the start of its workers, a run knows hosts by their addresses alone."""

import asyncio
import contextlib
from pathlib import Path

import pytest
from run.test_controller import Counting

from titan_rl.config.run import RunConfig
from titan_rl.config.tasks import TaskSource
from titan_rl.errors import ProviderError
from titan_rl.providers.spec import ProviderSpec
from titan_rl.run.hosts.provided import ASK_S
from titan_rl.run.workers import workers_started

events = list[str]()


@contextlib.asynccontextmanager
async def two(spec: ProviderSpec):
    events.append(f"logs go to {spec.logs.name}")
    try:
        yield ["10.0.0.2:22222", "10.0.0.3:22222"]
    finally:
        events.append("ended")


@contextlib.asynccontextmanager
async def none(spec: ProviderSpec):
    raise ProviderError("no machine is to be had")
    yield


def config(**hosts: object) -> RunConfig:
    tasks = [TaskSource(task=Counting())]  # pyright: ignore[reportArgumentType]
    return RunConfig.model_validate({"model": {"path": "policy", "max_context": 256}, "tasks": tasks, "hosts": hosts})


async def test_a_providers_workers_are_there_for_the_block_however_it_ends(tmp_path: Path):
    events.clear()
    given = config(provider=f"{__name__}:two", train=2)
    with contextlib.suppress(ZeroDivisionError):
        async with workers_started(given, tmp_path) as started:
            hosts = started.config.hosts
            assert hosts.addresses == ("10.0.0.2:22222", "10.0.0.3:22222")
            assert (hosts.provider, hosts.train) == (None, 2)
            assert started.config.model == given.model
            assert started.provided is None
            assert events == [f"logs go to {tmp_path.name}"]
            raise ZeroDivisionError
    assert events[1:] == ["ended"]


async def test_without_a_provider_settings_are_as_they_were(tmp_path: Path):
    given = config(addresses=("10.0.0.2:22222",))
    async with workers_started(given, tmp_path) as started:
        assert started.config is given


async def test_a_provider_that_has_none_keeps_the_run_from_starting(tmp_path: Path):
    with pytest.raises(ProviderError, match="no machine is to be had"):
        async with workers_started(config(provider=f"{__name__}:none"), tmp_path):
            pytest.fail("it began")


async def test_a_provider_that_has_fewer_hosts_than_settings_name_keeps_the_run_from_starting(tmp_path: Path):
    with pytest.raises(ProviderError, match=r"test_workers:two.*hosts.train is 3, and there are 2 hosts; lower it"):
        async with workers_started(config(provider=f"{__name__}:two", train=3), tmp_path):
            pytest.fail("it began")


class Rented(list[str]):
    async def current(self) -> list[str]:
        return [*self, "10.0.0.9"]


@contextlib.asynccontextmanager
async def more(spec: ProviderSpec):
    yield Rented(["10.0.0.2:22222"])


@pytest.mark.looptime
async def test_a_provider_may_tell_of_further_hosts_later(tmp_path: Path):
    async with workers_started(config(provider=f"{__name__}:more"), tmp_path) as started:
        assert started.config.hosts.addresses == ("10.0.0.2:22222",)
        assert started.provided is not None
        watching = asyncio.ensure_future(started.provided.watch())
        await asyncio.sleep(2 * ASK_S)
        assert started.provided.read() == {"10.0.0.2:22222", "10.0.0.9:22222"}
        watching.cancel()
