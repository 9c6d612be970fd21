"""The library's own curricula by name."""

from __future__ import annotations

from titan_rl.scheduling.mix.curricula import ByDifficulty, InOrder, Stages
from titan_rl.settings import Section

BY_NAME: dict[str, type[Section]] = {"in_order": InOrder, "by_difficulty": ByDifficulty, "stages": Stages}
"""Those that `curriculum = {type = ...}` names."""
