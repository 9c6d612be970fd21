"""`RunConfig`: all settings of one run, which fit together."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from titan_rl.config.conflicts import conflicts
from titan_rl.config.sections import RunTables


class RunConfig(RunTables):
    """Settings of one run.

    In TOML `tasks` are the tables `[[tasks]]`, or one table `[task]`, where `type = "module:Class"` names a `Section`
    that implements `titan_rl.rollout.task.Task` and whose fields are the other keys.

    Raises:
        pydantic.ValidationError: also if settings conflict.
    """

    @model_validator(mode="after")
    def _settings_fit_together(self) -> Self:
        if problems := dict.fromkeys(conflicts(self)):  # several adapters may have the same problem
            raise ValueError("\n".join(problems))
        return self
