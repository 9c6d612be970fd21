"""League: frozen versions of this run play a seat, chosen by the results of the policy against them.

The choice is prioritized fictitious self-play (PFSP) of AlphaStar (Vinyals et al., 2019, Nature 575, "Prioritized
fictitious self-play" in Methods): with p the policy's estimated chance to win against a version, the version is chosen
with a probability proportional to

    hard      (1 - p)^2      the versions that win most
    even      p * (1 - p)    the versions of about the policy's strength
    uniform   1              fictitious self-play (Heinrich et al., 2015): the average of all versions

In a share of the groups the policy plays against itself (`self_play`). All games of a group have the same opponent, so
that advantages compare like with like. `LeagueCurriculum` encodes the choice in the number of a group's sample. So it
is recorded in the journal, and a resumed run repeats it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from titan_rl.core.settings import Section

Preference = Literal["hard", "even", "uniform"]

DECAY = 0.95
"""Factor by which a version's counts are multiplied at each of its groups, so that results of older policies lose
weight."""

State = dict[str, Any]


class LeagueSeat(Section):
    """Frozen versions of this run. One server holds the weights of one version at a time; versions are on the disk."""

    league: Preference
    """Preference for versions: those that win most, those of about equal strength, or none."""
    every: PositiveInt = 10
    """Steps between versions that are added. The initial model is a version, too."""
    keep: int = Field(default=16, ge=2)
    """Most versions. Beyond that, versions between the first and the newest are left out, so that the others are spread
    evenly."""
    self_play: float = Field(default=0.5, ge=0, lt=1)
    """Share of the groups in which the policy plays this seat, too."""
    draw: float = 0.0
    """Reward of a draw: a greater one is a win, a smaller one a loss."""
    settings: dict[str, str] = Field(default_factory=dict)
    """Settings of the server, such as {"generation.kv_cache_gib" = "0.5"}; `titan-rl serve --help` lists them."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature; by default the policy's."""
    start_s: PositiveFloat = 300.0
    """Longest time until the server listens."""
    timeout_s: PositiveFloat = 600.0
    """Longest time of one answer, including restarts of the server."""


def version_name(version: int) -> str:
    """Name of a frozen version, as a folder and as a model of the server."""
    return f"step-{version:06d}"


_INNER = 2**40  # number of samples; the 23 bits above them encode the opponent


def matched_number(sample: int, opponent: int | None) -> int:
    """Encode a sample and its opponent in one number.

    Args:
        sample: Number of the sample.
        opponent: Version of the opponent; None for the policy itself.

    Raises:
        ValueError: the number does not fit the 63 bits of the journal.
    """
    if not 0 <= sample < _INNER or not 0 <= (opponent or 0) < 2**22:
        raise ValueError(f"sample {sample} against version {opponent}: at most 2**40 samples and 2**22 steps")
    return sample if opponent is None else (opponent + 1) * _INNER + sample


def split_number(number: int) -> tuple[int, int | None]:
    """Decode the result of `matched_number` to (sample, opponent)."""
    above, sample = divmod(number, _INNER)
    return sample, above - 1 if above else None


class _Curriculum(Protocol):
    def begin(self) -> State: ...
    def next_sample(self, state: State) -> int: ...
    def given(self, state: State, sample: int) -> None: ...
    def finished(self, state: State, sample: int, rewards: Sequence[float]) -> None: ...


class LeagueCurriculum:
    """Curriculum that adds an opponent to each sample of another curriculum. Its state, which checkpoints contain, is

        {"inner": state of the other curriculum, "groups": 120,
         "versions": {"0": [18.3, 11.9], "10": [4.7, 1.0]}}    [groups played, share won], both decayed

    Args:
        inner: Chooses the samples.
        settings: Settings of the league.
        seed: Seed of the run, which seeds the choice of opponents.
    """

    def __init__(self, inner: _Curriculum, settings: LeagueSeat, seed: int) -> None:
        self.inner = inner
        self.settings = settings
        self._seed = seed

    def begin(self) -> State:
        return {"inner": self.inner.begin(), "groups": 0, "versions": {"0": [0.0, 0.0]}}

    def next_sample(self, state: State) -> int:
        return matched_number(self.inner.next_sample(state["inner"]), self._opponent(state))

    def given(self, state: State, sample: int) -> None:
        number, opponent = split_number(sample)
        self.inner.given(state["inner"], number)
        state["groups"] += 1
        if opponent is not None:
            self.frozen(state, opponent)  # the version may be unknown in a run continued from an earlier checkpoint

    def finished(self, state: State, sample: int, rewards: Sequence[float]) -> None:
        number, opponent = split_number(sample)
        self.inner.finished(state["inner"], number, rewards)
        if opponent is None or not rewards or (counts := state["versions"].get(str(opponent))) is None:
            return
        draw = self.settings.draw
        won = sum(1.0 if reward > draw else 0.5 if reward == draw else 0.0 for reward in rewards) / len(rewards)
        counts[:] = [DECAY * counts[0] + 1.0, DECAY * counts[1] + won]

    def frozen(self, state: State, version: int) -> None:
        """Add a version. If there are more than `keep`, the version whose neighbours are closest to each other is
        removed; the first and the newest always stay."""
        versions: dict[str, list[float]] = state["versions"]
        if str(version) in versions:
            return
        versions[str(version)] = [0.0, 0.0]
        steps = sorted(map(int, versions))
        if len(steps) > self.settings.keep:
            gaps = [(after - before, step) for before, step, after in zip(steps, steps[1:], steps[2:], strict=False)]
            steps.remove(min(gaps)[1])
        state["versions"] = {str(step): versions[str(step)] for step in steps}

    def _opponent(self, state: State) -> int | None:
        chance = random.Random(f"{self._seed}/league/{state['groups']}")
        if chance.random() < self.settings.self_play:
            return None
        weights = [preference(self.settings.league, rate) for rate in win_rates(state).values()]
        return chance.choices([int(version) for version in state["versions"]], weights)[0]


def win_rates(state: Mapping[str, Any]) -> dict[int, float]:
    """Estimated chance of the policy to win against each version, where a draw counts half; 0.5 before any game."""
    return {int(version): (won + 0.5) / (played + 1) for version, (played, won) in state["versions"].items()}


def preference(kind: Preference, win_rate: float) -> float:
    """Weight of a version in the choice, given the policy's chance to win against it; see the module."""
    if kind == "hard":
        return (1 - win_rate) ** 2
    return win_rate * (1 - win_rate) if kind == "even" else 1.0
