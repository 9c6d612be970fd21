"""Read the settings of a supervised run, which makes the model that the others of a file begin with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from titan_rl.config.explain import COMMAND_LINE, Origins
from titan_rl.config.load import read_config
from titan_rl.config.load_task import check_task
from titan_rl.config.model_folder import (
    check_chat_template,
    check_model_folder,
    check_training_fit,
    find_model_folder,
    told_places,
)
from titan_rl.config.run import RunConfig
from titan_rl.config.sft import SFTConfig
from titan_rl.core.errors import ConfigError
from titan_rl.training.settings import MADE_BY_SFT


def load_sft_config(paths: str | Path | Sequence[str | Path], overrides: Sequence[tuple[str, str]] = ()) -> RunConfig:
    """As `load_config`, but that `model.path` is what is made, and `sft.start` what has to be there. The config's
    `sft.start`, `sft.data` and `sft.out` are absolute, `sft.out` also where it is not set.

    Raises:
        ConfigError: names each wrong setting, its value, where it came from and what is allowed.
        ModelError: the folder to start from lacks a file.
    """
    config, origins = read_config(paths, overrides)
    sft = config.sft.model_copy(
        update={
            "start": _start(config, origins),
            "data": _data(config.sft, origins),
            "out": str(_out(config, origins)),
        }
    )
    _check_out(sft)
    if sft.start:
        model = config.model.model_copy(update={"path": sft.start})
        check_model_folder(model, config.generation, [Path()])
        check_chat_template(model)
        check_training_fit(config.model_copy(update={"model": model}))
    for table, source in config.tables_of_tasks():
        check_task(source.task, origins, table)
    return config.model_copy(update={"sft": sft})


def _start(config: RunConfig, origins: Origins) -> str:
    start = config.sft.start
    if not start:
        return ""
    places = origins.folders_for("sft.start")
    if (folder := find_model_folder(start, places)) is None:
        raise ConfigError(
            f"{origins.of('sft.start')}: sft.start = {start!r} is not a folder {told_places(places)}; leave it out "
            "to have a tiny model made, or name a Hugging Face folder"
        )
    return str(folder)


def _data(sft: SFTConfig, origins: Origins) -> str:
    if not sft.data:
        return ""
    places = origins.folders_for("sft.data")
    found = next((path for place in places if (path := place / os.path.expanduser(sft.data)).exists()), None)
    if found is None:
        raise ConfigError(
            f"{origins.of('sft.data')}: sft.data = {sft.data!r} is not there, {told_places(places)}; name a file "
            "of chats in JSON lines, or the folder of a run"
        )
    if found.is_dir() and not (found / "rollouts.jsonl").is_file():
        raise ConfigError(
            f"{origins.of('sft.data')}: sft.data = {sft.data!r} is a folder without rollouts.jsonl; name that of a run"
        )
    return str(found.resolve())


def _out(config: RunConfig, origins: Origins) -> Path:
    """Where a relative path is in no folder yet, it is beside the file that sets it."""
    key = "sft.out" if config.sft.out else "model.path"
    path = config.sft.out or config.model.path
    places = origins.folders_for(key)
    if (folder := find_model_folder(path, places)) is not None:
        return folder
    return (places[0 if origins.of(key) == COMMAND_LINE else 1] / os.path.expanduser(path)).absolute()


def _check_out(sft: SFTConfig) -> None:
    out = Path(sft.out)
    if out.exists() and not (out / MADE_BY_SFT).is_file():
        raise ConfigError(
            f"{sft.out} is there already, and not made by titan-rl sft: it is not replaced. To teach that model, set "
            "sft.start to it and sft.out to another folder; to make a tiny one, set model.path to another folder"
        )
    if sft.out == sft.start:
        raise ConfigError(f"sft.start = {sft.start!r} would be replaced by what is made of it; set sft.out")
