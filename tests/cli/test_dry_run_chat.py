"""Chat lines of a dry run: renderer, turns, tool calls, stop tokens. Templates that cannot be extended are rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("renderers")

from titan_rl.cli.main import main
from titan_rl.core.errors import ModelError
from titan_rl.rollout.renderer.registry import suitable_renderer
from titan_rl.rollout.renderer.tokenizer import load_tokenizer
from titan_rl.tasks import PromptTask, ToolEnv
from titan_rl.training.tiny_model import make_tiny_model

COUNTING = (
    "{{- messages | length -}}{%- for m in messages -%}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
"""A template whose first token changes with each new message."""


class Sums(PromptTask):
    def sample(self, rng: Any) -> tuple[int, int]:
        return rng.randint(0, 99), rng.randint(0, 99)

    def prompt(self, sample: tuple[int, int]) -> str:
        return f"What is {sample[0]} + {sample[1]}?"

    def reward(self, sample: tuple[int, int], answer: str) -> float:
        return float(answer.strip() == str(sum(sample)))


class SumsWithTools(Sums):
    def env(self, sample: tuple[int, int]) -> ToolEnv:
        return ToolEnv(self.prompt(sample))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    make_tiny_model(path, texts=["What is 3 + 4?", "7"] * 10, parameters=100_000, max_context=256)
    return path


def config(folder: Path, task: type, *lines: str) -> str:
    toml = folder.parent / "config.toml"
    text = f'[model]\npath = "model"\nmax_context = 256\n[task]\ntype = "{__name__}:{task.__name__}"\n'
    toml.write_text(text + "\n".join(lines))
    return str(toml)


def test_dry_run_shows_the_renderer_and_the_reason(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", config(folder, Sums), "--dry-run"]) == 0
    err = capsys.readouterr().err
    assert "model.renderer is Qwen3Renderer: it renders as the model's chat template does" in err
    assert "turns extend token by token: yes, earlier answers stay as sampled" in err
    assert "tool calls: of Qwen3Renderer" in err
    assert "stop tokens: <|im_end|> <|endoftext|>" in err


def test_template_that_changes_earlier_turns_is_rejected_for_several_turns(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "chat_template.jinja").write_text(COUNTING)
    assert main(["train", config(folder, SumsWithTools), "--dry-run"]) == 2
    assert "cannot be extended turn by turn: it changes earlier messages" in capsys.readouterr().err


@pytest.mark.parametrize(("task", "lines"), [(Sums, ()), (SumsWithTools, ("[rollout]", "max_turns = 1"))])
def test_template_that_changes_earlier_turns_is_accepted_for_a_single_turn(
    folder: Path, task: type, lines: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "chat_template.jinja").write_text(COUNTING)
    assert main(["train", config(folder, task, *lines), "--dry-run"]) == 0
    err = capsys.readouterr().err
    assert "turns extend token by token: no, the chat template of" in err
    assert "it changes earlier messages when new ones are added" in err
    assert "tool calls: not parsed, the chat template shows no tools" in err


def test_renderer_of_a_changing_template_raises_on_the_next_turn(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(COUNTING)
    renderer = suitable_renderer(load_tokenizer(folder), single_turn=True)
    prompt = renderer.render_ids([{"role": "user", "content": "7"}], add_generation_prompt=True)
    with pytest.raises(ModelError, match="changes earlier messages"):
        renderer.bridge_to_next_turn(prompt, renderer.get_stop_token_ids(), [{"role": "user", "content": "7"}])
