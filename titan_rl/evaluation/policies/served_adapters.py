"""Adapters of a server: several policies on the same engines, each of which answers under its own name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from titan_rl.config.model_folder import check_adapter_weights
from titan_rl.config.serve import ServeConfig, load_serve_config
from titan_rl.core.calls.threads import in_thread
from titan_rl.core.errors import ConfigError, StateDictError
from titan_rl.core.model_identity import model_identity
from titan_rl.evaluation.policies.policy_export import export_weights
from titan_rl.evaluation.policies.policy_source import PolicySource, newest_checkpoint, single_policy
from titan_rl.generation.continuation import RequestFn
from titan_rl.generation.engine import AdapterSpec
from titan_rl.generation.registry import find_engine
from titan_rl.run.directory import adapters_of_run
from titan_rl.training.models.peft_settings import CONFIG, WEIGHTS, hf_name, peft_settings
from titan_rl.training.settings import TARGETS, ModelConfig
from titan_rl.weights.types import Manifest, StateDictTransport

if TYPE_CHECKING:
    from titan_rl.cluster.adapter_routers import AdapterRouters


def source_of_adapters(run: Path) -> tuple[PolicySource, dict[str, str]]:
    """Find the model of a run with several adapters, and the folders of the adapters that have a checkpoint, by name.

    Raises:
        ConfigError: No adapter has a checkpoint yet.
    """
    folders = {name: str(folder) for name, folder in adapters_of_run(run).items() if newest_checkpoint(folder)}
    if not folders:
        raise ConfigError(f"{run} is a run of several adapters, none of which has a checkpoint yet; wait for one")
    return PolicySource(f"the model of {run}", toml=run / "config.toml"), folders


def find_adapters(config: ServeConfig, source: PolicySource) -> dict[str, PolicySource]:
    """Find `server.adapters`, and check that the model can be served with them.

    Raises:
        ConfigError: A folder has no adapter, an adapter is of another model, or other settings exclude adapters.
        ModelError: A folder in PEFT's format is damaged, or is of another model.
    """
    adapters, server, generation = config.server.adapters, config.server, config.generation
    if not adapters:
        return {}
    if source.checkpoint is not None or (source.run is not None and not adapters_of_run(source.run)):
        raise ConfigError(f"server.adapters with {source.name}: name the folder of the model that they change")
    if server.follow_s is not None or server.versions is not None:
        raise ConfigError("server.adapters with server.follow_s (--follow) or server.versions: leave these out")
    if generation.speculative.method != "none":
        raise ConfigError(
            f'server.adapters with generation.speculative.method = "{generation.speculative.method}": drafts would '
            'come without the adapter; set it to "none"'
        )
    if not getattr(find_engine(generation.engine), "several_adapters", False):
        raise ConfigError(
            f'server.adapters with generation.engine = "{generation.engine}", which does not support adapters'
        )
    if server.model in adapters:
        raise ConfigError(f"server.adapters has {server.model!r}, the name of the model; set server.model or rename it")
    return {
        name: _find(f"server.adapters.{name} = {folder!r}", Path(folder), config) for name, folder in adapters.items()
    }


def _find(where: str, folder: Path, config: ServeConfig) -> PolicySource:
    if (folder / "config.toml").is_file():
        try:
            folder = single_policy(folder)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        found = newest_checkpoint(folder)
        if found is None or found.toml is None:
            raise ConfigError(f"{where} has no checkpoint yet")
        base = Path(load_serve_config(found.toml, (), policy=None).model.path)
        if model_identity(base)["weights"] != model_identity(Path(config.model.path))["weights"]:
            raise ConfigError(f"{where} changes the model {base}, whose weights are not those of {config.model.path}")
        return found
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{where} is neither RUN/adapters/NAME nor a folder in PEFT's format, with an {CONFIG}")
    check_adapter_weights(folder, Path(config.model.path), peft_settings(folder, where).rank, where, None)
    return PolicySource(f"the adapter {folder}", checkpoint=folder.resolve(), version=1)


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """Adapter of a server whose checkpoint has been read.

    Attributes:
        folder: Folder in PEFT's format.
        version: Number of optimizer steps of its training; 1 for an adapter that was given in PEFT's format, which does
            not record it.
    """

    folder: Path
    spec: AdapterSpec
    version: int


async def read_adapters(
    sources: Mapping[str, PolicySource], model: ModelConfig, directory: Path, log: Path
) -> dict[str, ReadAdapter]:
    """Write those adapters that are checkpoints as folders in PEFT's format, one after the other.

    Raises:
        CheckpointError: A checkpoint cannot be read, or has no adapter.
    """
    read: dict[str, ReadAdapter] = {}
    for name, source in sources.items():
        assert source.checkpoint is not None
        folder = source.checkpoint
        if source.toml is not None:
            folder = directory / name
            await export_weights(model, source.checkpoint, folder, log, as_adapter=True)
        settings = peft_settings(folder)
        spec = AdapterSpec(settings.rank, settings.alpha, settings.targets or TARGETS)
        read[name] = ReadAdapter(folder, spec, source.version)
    return read


class ServedAdapters:
    """`Versions` of a server whose versions are adapters, which answer under their names.

    Args:
        routers: Routers of the adapters, and of the model itself, whose name is "".
    """

    def __init__(self, adapters: Mapping[str, ReadAdapter], routers: AdapterRouters) -> None:
        self._adapters = adapters
        self._routers = routers

    async def load(self, transports: Mapping[str, StateDictTransport], model: ModelConfig) -> None:
        """Publish all adapters, and load them into the generators.

        Args:
            transports: Transport of each adapter, by name.

        Raises:
            StateDictError: A generator could not load and verify an adapter.
        """
        for name, adapter in self._adapters.items():
            publish = partial(publish_adapter, transports[name], adapter.folder, model.dtype, adapter.version)
            self._routers.published[name].announce(await in_thread(publish))
            report = await self._routers.by_adapter[name].pull_state_dict(adapter.version)
            if report.failed:
                raise StateDictError(f"{', '.join(sorted(report.failed))} could not load the adapter {name}")

    def names(self) -> Sequence[str]:
        """Names of all adapters."""
        return list(self._adapters)

    def version_of(self, name: str) -> int | None:
        """Return the version of an adapter; None if there is no adapter of this name."""
        return self._adapters[name].version if name in self._adapters else None

    def stream_of(self, name: str | None) -> RequestFn | None:
        """Return the streaming generation of an adapter; None if there is no adapter of this name."""
        return self._routers.by_adapter[name].stream if name and name in self._adapters else None


def publish_adapter(transport: StateDictTransport, folder: Path, dtype: str, version: int) -> Manifest:
    """Publish the matrices of a folder in PEFT's format, with their checksums, as the trainer publishes its
    versions."""
    import torch
    from safetensors.torch import load_file

    from titan_rl.weights.verification import with_checksums

    tensors = load_file(folder / WEIGHTS)
    named = [(hf_name(name), tensor.to(getattr(torch, dtype))) for name, tensor in tensors.items()]
    return with_checksums(transport.publish(version, named), named)
