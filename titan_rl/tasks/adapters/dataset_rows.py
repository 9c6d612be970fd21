"""Rows of a data set of Hugging Face `datasets`, from the hub or from this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from titan_rl.core.calls.imports import require
from titan_rl.core.calls.user_code import summary
from titan_rl.core.errors import ConfigError
from titan_rl.tasks.adapters.names import check_name

KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".txt": "text"}


def load_rows(dataset: str, subset: str, split: str, revision: str) -> Any:
    """
    Args:
        dataset: a file, a folder of files or of `Dataset.save_to_disk`, or a data set's id on the hub.
        split: as `datasets` writes it, such as "train" or "train[:90%]". A single file has the split "train".

    Returns:
        A `datasets.Dataset`: it stays on disk, and has its rows as dictionaries by their number.

    Raises:
        ConfigError: there is no such data set or split, or it cannot be read.
        MissingExtraError: `datasets` is not installed.
    """
    datasets = require("datasets", "datasets")
    path = Path(dataset)
    try:
        if path.is_dir() and ((path / "state.json").exists() or (path / "dataset_dict.json").exists()):
            return _saved(datasets.load_from_disk(dataset), dataset, split)
        if path.is_file():
            return _of_file(datasets, path, split)
        return datasets.load_dataset(dataset, subset or None, split=split, revision=revision or None)
    except ConfigError:
        raise
    except Exception as error:
        where = (
            "" if path.exists() else f"; there is no such path in {Path.cwd()}, and it could not be had from the hub"
        )
        raise ConfigError(f"task.dataset = {dataset!r}, split {split!r}: {summary(error)}{where}") from error


def _of_file(datasets: Any, path: Path, split: str) -> Any:
    if path.suffix not in KINDS:
        raise ConfigError(f"task.dataset = {str(path)!r} is of no kind that has rows; give one of {', '.join(KINDS)}")
    options = {"delimiter": "\t"} if path.suffix == ".tsv" else {}
    return datasets.load_dataset(KINDS[path.suffix], data_files=str(path), split=split, **options)


def _saved(found: Any, dataset: str, split: str) -> Any:
    """What `save_to_disk` has written: one data set, or several by their splits."""
    if hasattr(found, "column_names") and isinstance(found.column_names, list):
        if split != "train":
            raise ConfigError(f"task.dataset = {dataset!r} was saved without splits, and split is {split!r}; set train")
        return found
    check_name("task.split", split, list(found), f"splits of {dataset}")
    return found[split]
