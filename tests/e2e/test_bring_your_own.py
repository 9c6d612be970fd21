"""Inputs as people have them, written as docs/how_to/bring_your_own.md shows them, are trained on by the real stack."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")
pytest.importorskip("vllm", reason="needs the cpu or gpu extra")
pytest.importorskip("pyarrow", reason="needs the rows extra")
pytest.importorskip("datasets", reason="needs the datasets extra")

import pyarrow
import pyarrow.parquet
from depth import in_depth
from docs.pages import ROOT, files
from e2e.runs import Run, run_training

from titan_rl.run.directory import read_jsonl

PAGE = ROOT / "docs" / "how_to" / "bring_your_own.md"
REWARDS = {
    "gsm8k": {"correctness_reward_func", "soft_format_reward_func"},
    "countdown": {"score"},
    "math": {"score"},
    "guess": {"guessed", "quick"},
}
SMALL = {
    "model__max_context": 768,
    "sampling__max_tokens": 24,
    "generation__kv_cache_gib": 0.25,
    "training__steps": 2,
    "training__row_tokens": 2048,
    "validation__num_prompts": 1,
    "logging__transcripts_per_step": 8,
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the files of the page, and verl's rows as Parquet."""
    folder = tmp_path_factory.mktemp("inputs")
    for name, text in files(PAGE).items():
        (folder / name).write_text(text)
    rows = list(map(json.loads, (folder / "math.jsonl").read_text().splitlines()))
    for name, part in (("train.parquet", rows[:2]), ("test.parquet", rows[2:])):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(part), folder / name)
    return folder


def assert_learns_chats(run: Run, model: Path) -> None:
    assert run.wait() == 0, run.output
    steps = [record for record in run.metrics() if "train/loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert steps[-1]["train/loss"] < steps[0]["train/loss"]
    assert (model / "model.safetensors").is_file()


def learning(inputs: Path, toml: str, model: Path, **settings: Any) -> Any:
    return run_training(
        model.parent,
        command="sft",
        config=str(inputs / toml),
        model__path=model,
        model__max_context=768,
        sft__start="",
        sft__tiny_model__parameters=60_000,
        sft__steps=3,
        sft__lr=2e-3,
        sft__held_out=0,
        **settings,
    )


@pytest.fixture(scope="module")
def base(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model that has learned the chats of both forms."""
    chats = inputs / "chats.jsonl"
    chats.write_text((inputs / "sharegpt.jsonl").read_text() + (inputs / "openai.jsonl").read_text())
    model = tmp_path_factory.mktemp("chats") / "base"
    with learning(inputs, "openai.toml", model, sft__data=chats) as run:
        assert_learns_chats(run, model)
    return model


def assert_trains(run: Run, tasks: set[str]) -> None:
    assert run.wait() == 0, run.output
    assert [record["step"] for record in run.metrics() if "train/loss" in record] == [1, 2]
    trained = [record for record in read_jsonl(run.folder / "rollouts.jsonl") if record["phase"] == "train"]
    assert {record["task"] for record in trained} == tasks
    for record in trained:
        assert record["status"] in ("completed", "truncated_length", "error_parse", "truncated_turns"), record
        if record["status"] == "completed":
            assert set(record["reward_breakdown"]) == REWARDS[record["task"]]
    assert "leave no room" not in run.output


def test_rows_rewards_and_environment_are_trained_on_together(inputs: Path, base: Path, tmp_path: Path) -> None:
    tasks = [{**tomllib.loads((inputs / f"{name}.toml").read_text())["task"], "name": name} for name in REWARDS]
    (inputs / "all.toml").write_text(tomli_w.dumps({"model": {"path": str(base)}, "tasks": tasks}))
    with run_training(tmp_path, config=str(inputs / "all.toml"), scheduling__groups_per_step=4, **SMALL) as run:
        assert_trains(run, set(REWARDS))


@in_depth
@pytest.mark.parametrize("name", REWARDS)
def test_each_input_is_trained_on_with_the_settings_of_the_page(
    inputs: Path, base: Path, tmp_path: Path, name: str
) -> None:
    settings = {**SMALL, "model__path": base, "scheduling__groups_per_step": 2}
    with run_training(tmp_path, config=str(inputs / f"{name}.toml"), **settings) as run:
        assert run.wait() == 0, run.output
        assert [record["step"] for record in run.metrics() if "train/loss" in record] == [1, 2]


@in_depth
@pytest.mark.parametrize("name", ["sharegpt", "openai"])
def test_each_file_of_chats_is_trained_on_with_the_settings_of_the_page(
    inputs: Path, tmp_path: Path, name: str
) -> None:
    with learning(inputs, f"{name}.toml", tmp_path / "model") as run:
        assert_learns_chats(run, tmp_path / "model")
