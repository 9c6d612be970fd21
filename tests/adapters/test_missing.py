"""Error of an adapter whose library is not installed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from titan_rl.core.errors import MissingExtraError
from titan_rl.tasks.adapters.openenv import OpenEnv
from titan_rl.tasks.adapters.reasoning_gym import ReasoningGym
from titan_rl.tasks.adapters.textarena import TextArena
from titan_rl.tasks.adapters.trl import TRLTask

TASKS: dict[str, Any] = {
    "reasoning-gym": (["reasoning_gym", "reasoning_gym.factory"], lambda: ReasoningGym(dataset="maze")),
    "textarena": (["textarena", "textarena.envs.registration"], lambda: TextArena(env_id="Nim-v0")),
    "openenv": (["websockets", "websockets.asyncio.client"], lambda: OpenEnv(url="http://localhost")),
    "datasets": (["datasets"], lambda: TRLTask(dataset=str(Path(__file__)), reward_funcs=("json:dumps",))),
}


@pytest.mark.parametrize("extra", TASKS)
def test_missing_extra_error_gives_the_install_command(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modules, make = TASKS[extra]
    for name in modules:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=rf"run: pip install 'titan-rl\[{extra}\]'"):
        make().check_settings()
