"""User-defined provider from docs/hosts.md."""

from pathlib import Path

import pytest
from docs.pages import ROOT, blocks

from titan_rl.cluster.providers.registry import find_provider
from titan_rl.cluster.providers.spec import ChangingWorkers, ProviderSpec
from titan_rl.config.hosts import ProviderSettings
from titan_rl.core.console import ConsoleLines
from titan_rl.core.errors import ConfigError


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProviderSpec:
    (tmp_path / "my_cloud.py").write_text(blocks(ROOT / "docs" / "hosts.md", "python")[0])
    monkeypatch.syspath_prepend(tmp_path)
    return ProviderSpec(ProviderSettings(provider="my_cloud:rented", port=700), tmp_path)


async def test_documented_provider_yields_its_workers(own: ProviderSpec):
    console = ConsoleLines()
    provider = find_provider("my_cloud:rented")
    async with provider.workers(ProviderSpec(own.settings, own.logs, console)) as addresses:
        assert isinstance(addresses, ChangingWorkers)
        assert list(addresses) == await addresses.current() == ["10.0.0.2:700", "10.0.0.3:700"]
        assert console == []
    assert console == ["returning 2 machines"]
    assert provider.render is None


@pytest.mark.usefixtures("own")
def test_missing_provider_function_error_lists_the_others():
    with pytest.raises(ConfigError, match="my_cloud has no function lent; it has: rented"):
        find_provider("my_cloud:lent")
