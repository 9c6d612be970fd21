"""Kuhn poker as a task: deals, hands, and how far the policy is from an equilibrium."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

from examples.kuhn_poker.exploitability import INFORMATION_SETS, exploitability
from examples.kuhn_poker.hand import REWARD, Deal, KuhnHand, action_of, conversation
from examples.kuhn_poker.policy import bet_probability
from examples.kuhn_poker.rules import CARDS, DEALS, SEATS, History, is_over, to_act
from titan_rl import Message, RolloutGroup, Rubric, SeatedMessageEnv, SeatedTask, env_reward
from titan_rl.rollout.task import Demonstration

CALLS = {"jack": 0.1, "queen": 0.5, "king": 0.9}
"""How often a beginner calls a bet."""


class KuhnPoker(SeatedTask):
    """Two seats, both the policy's by default. Held-out samples are the 12 information sets, from which hands are
    played to their end."""

    seat_names = SEATS

    def train_sample(self, seed: int, index: int) -> Deal:
        """Each deal comes once in every six, so that no batch favours a card."""
        order = random.Random(f"{seed}/{index // len(DEALS)}").sample(DEALS, len(DEALS))
        return Deal(order[index % len(DEALS)])

    def validation_samples(self, count: int) -> Sequence[Deal]:
        return [situation(card, history) for card, history in INFORMATION_SETS][:count]

    def game(self, sample: Deal) -> SeatedMessageEnv:
        return KuhnHand(sample)

    def rubric(self) -> Rubric:
        """An answer that cannot be read or does not end costs as much as the dearest hand."""
        return Rubric([env_reward(REWARD)], truncated_reward=-2.0, error_reward=-2.0)

    def demonstrations(self, count: int) -> Iterable[Demonstration]:
        """Hands of beginners, who open by the flip of a coin, and call the more often the better their card."""
        for number in range(count):
            chance = random.Random(number)
            cards, seat, history = chance.choice(DEALS), chance.choice(SEATS), ()
            messages: list[Message] = []
            while not is_over(history):
                card = cards[SEATS.index(to_act(history))]
                bets = CALLS[card] if history[-1:] == ("bet",) else 0.5
                action = "bet" if chance.random() < bets else "pass"
                if to_act(history) == seat:
                    messages = [*conversation(card, history), {"role": "assistant", "content": action}]
                history = (*history, action)
            yield Demonstration(messages)

    def measure(self, groups: Sequence[RolloutGroup]) -> Mapping[str, float]:
        """How much a best response to the policy wins, once all 12 information sets are among the held-out samples."""
        policy: dict[tuple[str, History], float] = {}
        for group in groups:
            deal: Deal = group.sample
            seat = to_act(deal.opening)
            asked = [rollout for rollout in group.by_seat.get(seat, []) if rollout.turns]
            if asked:
                card = deal.cards[SEATS.index(seat)]
                policy[card, deal.opening] = bet_probability(asked, action_of)
        if policy.keys() != set(INFORMATION_SETS):
            return {}
        return {"exploitability": exploitability(policy)}


def situation(card: str, history: History) -> Deal:
    """A hand in which who is to act has this card and has seen these actions."""
    other = next(other for other in CARDS if other != card)
    return Deal((card, other) if to_act(history) == "first" else (other, card), history)
