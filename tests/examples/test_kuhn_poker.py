"""Kuhn poker: rules, exploitability, and hands that a policy plays against itself."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from examples.kuhn_poker.exploitability import INFORMATION_SETS, best_response, exploitability
from examples.kuhn_poker.hand import conversation
from examples.kuhn_poker.rules import DEALS, History, chips, histories, is_over, to_act
from examples.kuhn_poker.task import KuhnPoker
from titan_rl import Completion, FinishReason, Rollouter, RolloutStatus, SamplingParams, VersionSpan
from titan_rl.rollout.renderer import ChatTemplateRenderer
from titan_rl.rollout.renderer.tokenizer import load_tokenizer
from titan_rl.training.tiny_model import make_tiny_model

Policy = dict[tuple[str, History], float]


def equilibrium(bluff: float) -> Policy:
    """Kuhn's equilibrium with this bluffing probability, from 0 to 1/3."""
    first = {"jack": (bluff, 0.0), "queen": (0.0, bluff + 1 / 3), "king": (3 * bluff, 1.0)}
    second = {"jack": (1 / 3, 0.0), "queen": (0.0, 1 / 3), "king": (1.0, 1.0)}
    policy: Policy = {}
    for card in first:
        policy[card, ()], policy[card, ("pass", "bet")] = first[card]
        policy[card, ("pass",)], policy[card, ("bet",)] = second[card]
    return policy


def test_twelve_information_sets() -> None:
    assert len(INFORMATION_SETS) == 12
    assert sorted(histories()) == [(), ("bet",), ("pass",), ("pass", "bet")]


@pytest.mark.parametrize(
    ("cards", "history", "won"),
    [
        (("king", "jack"), ("pass", "pass"), 1),
        (("jack", "queen"), ("bet", "bet"), -2),
        (("jack", "king"), ("bet", "pass"), 1),
        (("king", "jack"), ("pass", "bet", "pass"), -1),
        (("queen", "jack"), ("pass", "bet", "bet"), 2),
    ],
)
def test_chips_won_by_each_history(cards: tuple[str, str], history: History, won: int) -> None:
    assert is_over(history)
    assert chips(cards, history) == won


@pytest.mark.parametrize("bluff", [0.0, 0.2, 1 / 3])
def test_kuhn_equilibria_have_zero_exploitability(bluff: float) -> None:
    policy = equilibrium(bluff)
    assert exploitability(policy) == pytest.approx(0.0, abs=1e-12)
    assert best_response("second", policy) == pytest.approx(1 / 18)  # the value of the game, to the second seat


def test_exploitability_of_known_policies() -> None:
    assert exploitability(dict.fromkeys(INFORMATION_SETS, 0.5)) == pytest.approx(0.458333, abs=1e-6)
    assert exploitability(dict.fromkeys(INFORMATION_SETS, 0.0)) == pytest.approx(1.0)  # a bet always wins the ante


def test_best_response_equals_the_best_pure_strategy() -> None:
    policy = {known: random.Random(str(known)).random() for known in INFORMATION_SETS}
    for seat in ("first", "second"):
        own = [known for known in INFORMATION_SETS if to_act(known[1]) == seat]
        values = [worth(seat, policy | dict(zip(own, bets, strict=True))) for bets in product((0.0, 1.0), repeat=6)]
        assert best_response(seat, policy) == pytest.approx(max(values))


def worth(seat: str, policy: Policy) -> float:
    def value(cards: tuple[str, str], history: History) -> float:
        if is_over(history):
            return chips(cards, history)
        bets = policy[cards[len(history) % 2], history]
        return bets * value(cards, (*history, "bet")) + (1 - bets) * value(cards, (*history, "pass"))

    mean = sum(value(cards, ()) for cards in DEALS) / len(DEALS)
    return mean if seat == "first" else -mean


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplateRenderer:
    folder: Path = tmp_path_factory.mktemp("kuhn") / "start"
    texts = [str(message["content"]) for shown in KuhnPoker().demonstrations(64) for message in shown.messages]
    make_tiny_model(folder, texts=texts, parameters=150_000, max_context=64)
    return ChatTemplateRenderer(load_tokenizer(str(folder)))


class Player:
    """`GenerateFn` that samples actions with the probabilities of a policy."""

    def __init__(self, policy: Policy, renderer: ChatTemplateRenderer) -> None:
        asked: list[Any] = [{"role": "user", "content": "?"}]
        prompt = renderer.render_ids(asked, add_generation_prompt=True)
        (stop,) = renderer.get_stop_token_ids()
        self._answers: dict[str, list[int]] = {}
        for action in ("pass", "bet"):
            said = renderer.render_ids([*asked, {"role": "assistant", "content": action}])[len(prompt) :]
            self._answers[action] = said[: said.index(stop) + 1]
        self._bets = {
            tuple(renderer.render_ids(conversation(*known), add_generation_prompt=True)): bets
            for known, bets in policy.items()
        }

    async def __call__(
        self, prompt_token_ids: Sequence[int], *, request_id: str, session_id: Any = None, sampling: SamplingParams
    ) -> Completion:
        bets = self._bets[tuple(prompt_token_ids)]
        action, chance = ("bet", bets) if random.Random(sampling.seed).random() < bets else ("pass", 1 - bets)
        tokens = self._answers[action]
        logprobs = [math.log(chance)] + [0.0] * (len(tokens) - 1)
        return Completion(request_id, tokens, logprobs, FinishReason.STOP, [VersionSpan(0, len(tokens))])


async def test_hands_are_played_and_exploitability_is_measured(renderer: ChatTemplateRenderer) -> None:
    policy = {known: 0.1 + 0.8 * random.Random(str(known)).random() for known in INFORMATION_SETS}
    task, player = KuhnPoker(), Player(policy, renderer)
    rollouter = Rollouter(lambda sample: task.make_env(sample, renderer), task.rubric(), max_context=64)
    sampling = SamplingParams(max_tokens=4)
    groups = [
        await rollouter.run_group(player, deal, group_id=f"v{number}", group_size=4, sampling=sampling)
        for number, deal in enumerate(task.validation_samples(12))
    ]
    assert task.measure(groups)["exploitability"] == pytest.approx(exploitability(policy))
    assert task.measure(groups[1:]) == {}

    group = await rollouter.run_group(player, task.train_sample(0, 0), group_id="g", group_size=8, sampling=sampling)
    assert {rollout.status for rollout in group.rollouts} == {RolloutStatus.COMPLETED}
    for first, second in zip(group.by_seat["first"], group.by_seat["second"], strict=True):
        assert first.reward == -(second.reward or 0) != 0
        assert first.messages[0]["content"].startswith(f"You have the {group.sample.cards[0]}. You begin.")
        assert str(second.messages[-1]["content"]).startswith(f"They had the {group.sample.cards[0]}.")


def test_each_six_samples_cover_all_deals() -> None:
    deals = [KuhnPoker().train_sample(3, index).cards for index in range(12)]
    assert sorted(deals[:6]) == sorted(deals[6:]) == sorted(DEALS)
    assert deals[:6] != deals[6:]
