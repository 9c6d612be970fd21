"""Kuhn poker as a task: deals, hands, and the exploitability of the policy."""

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
"""Probability that a beginner calls a bet, by card."""


class KuhnPoker(SeatedTask):
    """Task of one hand with two seats, by default both the policy's. The held-out samples are the 12 information sets,
    from which hands are played to their end."""

    seat_names = SEATS

    def train_sample(self, seed: int, index: int) -> Deal:
        """Deal of a hand. Every six samples contain each of the six deals once, so that no batch favours a card."""
        order = random.Random(f"{seed}/{index // len(DEALS)}").sample(DEALS, len(DEALS))
        return Deal(order[index % len(DEALS)])

    def validation_samples(self, count: int) -> Sequence[Deal]:
        return [situation(card, history) for card, history in INFORMATION_SETS][:count]

    def game(self, sample: Deal) -> SeatedMessageEnv:
        return KuhnHand(sample)

    def rubric(self) -> Rubric:
        """Rubric of the chips won. An answer that cannot be parsed or is cut off costs as much as the largest loss."""
        return Rubric([env_reward(REWARD)], truncated_reward=-2.0, error_reward=-2.0)

    def demonstrations(self, count: int) -> Iterable[Demonstration]:
        """Yield hands of beginners, who open with a bet half of the time, and call more often with a better card."""
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
        """Exploitability of the policy, if all 12 information sets are among the held-out samples."""
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
    """Make a deal in which the seat to act has this card and has seen these actions."""
    other = next(other for other in CARDS if other != card)
    return Deal((card, other) if to_act(history) == "first" else (other, card), history)
