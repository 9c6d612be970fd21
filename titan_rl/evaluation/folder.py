"""The folder of one evaluation. Its files are an interface, as those of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from titan_rl.core.errors import ConfigError
from titan_rl.evaluation.playing import Suite, finished_lines
from titan_rl.run.directory import read_jsonl
from titan_rl.run.json_lines import JsonLines, cut_records


class _Rollout(msgspec.Struct, gc=False):
    rollout_id: str
    prompt_digest: str


class EvaluationFolder:
    """Where an evaluation is kept, so that one that was stopped goes on from its finished prompts.

    rollouts.jsonl   {"task": "sums", "prompt": 3, "phase": "evaluation", "messages": [...], "reward": 0.7, ...}
    results.json     the figures, and the rewards of each prompt
    settings.json    what they were made with
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._rollouts = JsonLines(self.rollouts)

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts.jsonl"

    def begin(self, made_with: Mapping[str, Any], suites: Sequence[Suite]) -> list[Mapping[str, Any]]:
        """
        Args:
            made_with: what the halves of an evaluation must have in common, as plain data.

        Returns:
            the lines of prompts that are finished. Others are taken out of the file.

        Raises:
            ConfigError: an evaluation that was made otherwise is there.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        settings = self.path / "settings.json"
        text = json.dumps(made_with, indent=2, default=str) + "\n"
        if settings.exists() and settings.read_text(encoding="utf-8") != text:
            raise ConfigError(
                f"--out: {self.path} has an evaluation with other settings, see {settings.name}; name another folder"
            )
        settings.write_text(text, encoding="utf-8")
        finished = finished_lines(read_jsonl(self.rollouts), suites)
        kept = {(line["rollout_id"], line["prompt_digest"]) for line in finished}
        cut_records(self.rollouts, _Rollout, lambda found: (found.rollout_id, found.prompt_digest) in kept)
        return finished

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """
        Raises:
            OSError: the disk is full.
        """
        for line in lines:
            self._rollouts.append(line)

    def close(self) -> None:
        self._rollouts.close()
