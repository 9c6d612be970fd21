"""One hand of Kuhn poker, in which each seat has its own conversation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from examples.kuhn_poker.rules import SEATS, Cards, History, chips, is_over, to_act
from titan_rl import Message, MessageSeat

REWARD = "chips"


@dataclass(frozen=True, slots=True)
class Deal:
    """Start of a hand.

    Args:
        opening: Actions taken before the first seat is asked.
    """

    cards: Cards
    opening: History = ()


def action_of(said: object) -> str:
    """Action in an answer; anything but "bet" is a pass."""
    return "bet" if str(said).strip() == "bet" else "pass"


def question(card: str, history: History) -> Message:
    """Question to the seat that is to act. A seat's first question names its card."""
    heard = f"They {history[-1]}." if history else "You begin."
    return {"role": "user", "content": f"You have the {card}. {heard}" if len(history) < len(SEATS) else heard}


def conversation(card: str, history: History) -> list[Message]:
    """Messages of the seat that is to act, up to its next question."""
    own = [history[:turn] for turn in range(len(history) % 2, len(history), 2)]
    said = [{"role": "assistant", "content": history[len(before)]} for before in own]
    heard = [question(card, before) for before in (*own, history)]
    return [message for pair in zip(heard, said, strict=False) for message in pair] + heard[-1:]


class KuhnHand:
    """A `SeatedMessageEnv` that plays one hand."""

    def __init__(self, deal: Deal) -> None:
        self._deal = deal

    async def play_seats(self, seats: Mapping[str, MessageSeat]) -> None:
        cards: dict[str, str] = dict(zip(SEATS, self._deal.cards, strict=True))
        history = self._deal.opening
        asked: set[str] = set()
        while not is_over(history):
            name = to_act(history)
            card = cards[name]
            so_far = [question(card, history)] if name in asked else conversation(card, history)
            asked.add(name)
            answer = await seats[name].ask(so_far)
            history = (*history, action_of(answer["content"]))
        won = chips(self._deal.cards, history)
        for name, seat, other in zip(SEATS, seats.values(), reversed(SEATS), strict=True):
            own = won if name == "first" else -won
            seat.tell([{"role": "user", "content": f"They had the {cards[other]}. You win {own}."}])
            seat.reward(REWARD, own)

    async def close(self) -> None: ...
