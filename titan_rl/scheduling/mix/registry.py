"""The library's own curricula by name."""

from __future__ import annotations

from titan_rl.core.settings import Section
from titan_rl.scheduling.mix.curricula import ByDifficulty, InOrder, Stages

BY_NAME: dict[str, type[Section]] = {"in_order": InOrder, "by_difficulty": ByDifficulty, "stages": Stages}
"""Those that `curriculum = {type = ...}` names."""
