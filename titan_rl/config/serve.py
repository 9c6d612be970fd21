"""Settings of a server: the settings of a run that its generators need, and those of the server itself."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import tomli_w
from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt

from titan_rl.config.function_names import SearchPath, check_functions, named_modules
from titan_rl.config.hosts import HostsConfig
from titan_rl.config.model_folder import check_model_folder, find_model_folder
from titan_rl.config.run import RunConfig
from titan_rl.config.sections import GenerationConfig, RoutingConfig
from titan_rl.config.unchecked_tables import override, read_tables, validated
from titan_rl.config.validation_errors import COMMAND_LINE, Origins
from titan_rl.core.errors import ConfigError
from titan_rl.core.settings import FilePath, PathText, Section, refusal, with_value
from titan_rl.training.settings import ModelConfig


def _are_folder_names(adapters: dict[str, str]) -> dict[str, str]:
    """Check the names of adapters, which are also names of folders with their weights."""
    for name in adapters:
        if not re.fullmatch(r"(?!\.)[\w.:@+=-]{1,100}", name):
            allowed = "letters, digits and -_.:@+=, 1 to 100, and no dot at the beginning"
            raise refusal(f"has the name {name!r}; use {allowed}")
    return adapters


AdapterFolders = Annotated[dict[str, FilePath], AfterValidator(_are_folder_names)]
"""Adapter folders in PEFT's format, by the names of the adapters."""


class ServerConfig(Section):
    """Address and name under which a policy is served. Keys come from the environment: TITAN_RL_API_KEY for clients,
    TITAN_RL_ADMIN_KEY for the admin calls."""

    host: str = "127.0.0.1"
    """Address of this machine to listen on. Any address but loopback requires TITAN_RL_API_KEY."""
    port: int = Field(default=8000, ge=0, lt=2**16)
    """Port to listen on; 0 takes a free one."""
    model: str = Field(default="policy", min_length=1)
    """Name of the model in requests."""
    any_model: bool = False
    """Answer requests for any other model name, too, for agents with a fixed one."""
    num_places: PositiveInt = 4096
    """Most completions at a time; further requests receive a 429."""
    request_s: PositiveFloat = 3600.0
    """Longest time until a request is answered in full; then it receives a 504."""
    versions: FilePath | None = None
    """Folder with a Hugging Face folder for each version of the policy, all of one architecture. A request to
    /inference/v1/generate whose model is the name of one is answered with its weights, which are loaded into the same
    generators once no other version's requests run."""
    adapters: AdapterFolders = Field(default_factory=dict[str, FilePath])
    """LoRA adapters served in addition to the model, by the names of their models in requests: folders in PEFT's
    format, or RUN/adapters/NAME. The batches of an engine mix their requests. For a run of several adapters, by default
    all that have a checkpoint."""
    follow_s: PositiveFloat | None = Field(default=None, le=3600.0)
    """Seconds between checks for a newer checkpoint of the served run, whose weights are then loaded. By default there
    are no checks; --follow sets 5."""


class ServeConfig(Section):
    """The settings of a server."""

    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seeds the sampling of requests without a seed."""
    pythonpath: tuple[PathText, ...] = Field(default=(), strict=False)
    """Folders in which modules that settings name are searched, after the current one."""
    model: ModelConfig
    generation: GenerationConfig = GenerationConfig()
    routing: RoutingConfig = RoutingConfig()
    hosts: HostsConfig = HostsConfig()
    server: ServerConfig = ServerConfig()


def load_serve_config(toml: Path | None, overrides: Sequence[tuple[str, str]], *, policy: Path | None) -> ServeConfig:
    """Load the settings of a server.

    Args:
        toml: File with settings of a run or of a server. Tables of a run that a server does not have are ignored.
        overrides: Dotted settings and their values; see `load_config`.
        policy: Folder of the model; by default, `model.path` of the file.

    Raises:
        ConfigError: A setting is wrong. The message names each such setting, its value, its origin and what is allowed.
        ModelError: The model folder lacks a file.
    """
    tables, origins = read_tables(() if toml is None else (toml,), ())
    for name in {*RunConfig.model_fields, "task"} - ServeConfig.model_fields.keys():
        tables.pop(name, None)
    override(tables, overrides, origins)
    if policy is not None:
        if origins.of("model.path") == COMMAND_LINE:
            raise ConfigError(
                f"command line: --model.path: the policy is already given as {policy}; leave --model.path out"
            )
        override(tables, [("model.path", str(policy))], origins)
    config = validated(ServeConfig, tables, origins)
    for problem in config.hosts.of_generators_alone.too_few():
        raise ConfigError(problem)
    search_path = SearchPath(config.pythonpath, origins)
    check_functions(config, config.generation, config.routing, origins)
    config = with_value(config, "pythonpath", search_path.needed_for(named_modules(config)))
    folders = origins.folders_for("model.path")
    if (folder := find_model_folder(config.model.path, folders)) is not None:
        config = with_value(config, "model.path", str(folder))
    check_model_folder(config.model, config.generation, folders)
    return config


def check_server_settings(given: Mapping[str, str], name: str, origins: Origins) -> None:
    """Check settings for a server that is started by a run.

    Args:
        given: Values by dotted name; see `load_config`.
        name: Name of the setting that contains these settings.

    Raises:
        ConfigError: A setting is wrong. The message names each such setting, its value and what is allowed.
    """
    tables, of_server = read_tables((), ())
    override(tables, [("model.path", "unknown"), *given.items()], of_server)
    try:
        validated(ServeConfig, tables, of_server)
    except ConfigError as error:
        lines = str(error).replace(f"{COMMAND_LINE}: ", "")
        raise ConfigError("\n".join(f"{origins.of(name)}: {name}: {line}" for line in lines.splitlines())) from None


def dump_serve_config(config: ServeConfig) -> str:
    """Dump the settings as TOML, including defaults. `load_serve_config` reads an equal config from it."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))
