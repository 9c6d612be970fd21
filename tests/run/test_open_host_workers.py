"""Workers that a provider starts for a run, which uses only their addresses."""

import asyncio
import contextlib
from pathlib import Path

import pytest
from background import in_background
from run.test_controller import Counting

from titan_rl.cluster.hosts.elastic import ASK_S
from titan_rl.cluster.providers.spec import ProviderSpec
from titan_rl.config.run import RunConfig
from titan_rl.config.tasks import TaskSource
from titan_rl.core.errors import ConfigError, ProviderError
from titan_rl.run.open_host_workers import start_workers

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


async def test_provider_workers_live_until_the_block_ends(tmp_path: Path):
    events.clear()
    given = config(provider=f"{__name__}:two", train=2)
    with contextlib.suppress(ZeroDivisionError):
        async with start_workers(given, tmp_path) as started:
            hosts = started.config.hosts
            assert hosts.addresses == ("10.0.0.2:22222", "10.0.0.3:22222")
            assert (hosts.provider, hosts.train) == (None, 2)
            assert started.config.model == given.model
            assert started.provided is None
            assert events == [f"logs go to {tmp_path.name}"]
            raise ZeroDivisionError
    assert events[1:] == ["ended"]


async def test_config_is_unchanged_without_a_provider(tmp_path: Path):
    given = config(addresses=("10.0.0.2:22222",))
    async with start_workers(given, tmp_path) as started:
        assert started.config is given


async def test_provider_failure_prevents_the_run(tmp_path: Path):
    with pytest.raises(ProviderError, match="no machine is to be had"):
        async with start_workers(config(provider=f"{__name__}:none"), tmp_path):
            pytest.fail("the run began")


async def test_provider_with_too_few_hosts_prevents_the_run(tmp_path: Path):
    with pytest.raises(ProviderError, match=r"_workers:two.*hosts.train is 3, and there are 2 hosts; lower it"):
        async with start_workers(config(provider=f"{__name__}:two", train=3), tmp_path):
            pytest.fail("the run began")


class Rented(list[str]):
    async def current(self) -> list[str]:
        return [*self, "10.0.0.9"]


@contextlib.asynccontextmanager
async def more(spec: ProviderSpec):
    yield Rented(["10.0.0.2:22222"])


@pytest.mark.looptime
async def test_provider_can_add_hosts_later(tmp_path: Path):
    async with start_workers(config(provider=f"{__name__}:more"), tmp_path) as started:
        assert started.config.hosts.addresses == ("10.0.0.2:22222",)
        assert started.provided is not None
        async with in_background(started.provided.watch()):
            await asyncio.sleep(2 * ASK_S)
            assert started.provided.read() == {"10.0.0.2:22222", "10.0.0.9:22222"}


given = list[object]()


@contextlib.asynccontextmanager
async def giving(spec: ProviderSpec):
    yield given[0]


def broke(spec: ProviderSpec):
    raise RuntimeError("no credit")


@contextlib.asynccontextmanager
async def out_of_order(spec: ProviderSpec):
    raise RuntimeError("no credit")
    yield


async def no_block(spec: ProviderSpec) -> list[str]:
    return ["10.0.0.2"]


@pytest.mark.parametrize(
    ("workers", "problem"),
    [
        ([], "giving yielded no workers"),
        (None, "giving yielded None; have it yield a list of addresses"),
        ("10.0.0.2", "giving yielded '10.0.0.2'; have it yield a list of addresses"),
        (["0.0.0.0:22222"], "giving yielded '0.0.0.0:22222' stands for all interfaces"),
        ([22222], "giving yielded 22222, which must be HOST or HOST:PORT"),
        (["10.0.0.2", "10.0.0.2:22222"], "giving yielded 10.0.0.2:22222 more than once"),
    ],
)
async def test_invalid_provider_addresses_are_rejected(tmp_path: Path, workers: object, problem: str):
    given[:] = [workers]
    with pytest.raises(ConfigError, match=rf"hosts\.provider .*{problem}"):
        async with start_workers(config(provider=f"{__name__}:giving"), tmp_path):
            pytest.fail("the run began")


async def test_provider_address_without_a_port_gets_the_default_port(tmp_path: Path):
    given[:] = [("10.0.0.2",)]
    async with start_workers(config(provider=f"{__name__}:giving"), tmp_path) as started:
        assert started.config.hosts.addresses == ("10.0.0.2:22222",)


@pytest.mark.parametrize("name", ["broke", "out_of_order"])
async def test_provider_error_names_the_provider_and_its_line(tmp_path: Path, name: str):
    with pytest.raises(ProviderError, match=rf":{name}: RuntimeError: no credit \(.*host_workers.py:\d+ in {name}\)"):
        async with start_workers(config(provider=f"{__name__}:{name}"), tmp_path):
            pytest.fail("the run began")


async def test_provider_must_be_an_async_context_manager(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no_block returns a coroutine.*contextlib\.asynccontextmanager"):
        async with start_workers(config(provider=f"{__name__}:no_block"), tmp_path):
            pytest.fail("the run began")


@contextlib.asynccontextmanager
async def sticky(spec: ProviderSpec):
    try:
        yield ["10.0.0.2"]
    finally:
        raise RuntimeError("they do not go")


async def test_provider_cleanup_error_does_not_hide_other_errors(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    with pytest.raises(ProviderError, match="sticky: RuntimeError: they do not go"):
        async with start_workers(config(provider=f"{__name__}:sticky"), tmp_path):
            pass
    with pytest.raises(ZeroDivisionError):
        async with start_workers(config(provider=f"{__name__}:sticky"), tmp_path):
            raise ZeroDivisionError
    assert "sticky: RuntimeError: they do not go" in capfd.readouterr().err
