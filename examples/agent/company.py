"""Directory of a company, and questions that can only be answered by looking things up in it.

Every question has its own company, drawn from a seed, so that answers cannot be memorized.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

NAMES = """
    Mia Ben Tara Hugo Lena Omar Clara Simon Ada Pia Victor Jonas Greta Noah Yara Felix Ruth Elias Kim Dora Igor Wanda
    Quinn Zoe
""".split()  # noqa: SIM905
TOWNS = "Aarau Brest Calais Delft Essen Faro Genoa Havre Izmir Jena Kiel Lyon Metz Nancy Oslo Parma".split()  # noqa: SIM905

PERSON = "Who is "
TOWN = "In which town works "
MANAGER_OF = "the manager of "
MOST_LOOK_UPS = 3

DEMONSTRATION_SEED = 1_000_000_000
"""First seed of demonstrated questions."""

VALIDATION_SEED = 2_000_000_000
"""First seed of held-out questions."""


class Company:
    """Managers and towns of the people of a company.

    Example:

        company = Company(17)
        company.manager_of("Mia")   # "Clara", or "nobody" for the one at the top
        company.town_of("Clara")    # "Delft"
    """

    def __init__(self, seed: int) -> None:
        rng = random.Random(f"company/{seed}")
        self.people = rng.sample(NAMES, len(NAMES))  # each is managed by an earlier one
        self._managers = {
            person: self.people[rng.randrange(at)] if at else "nobody" for at, person in enumerate(self.people)
        }
        self._towns = {person: rng.choice(TOWNS) for person in self.people}

    def manager_of(self, name: str) -> str:
        return self._managers.get(name, "no such person")

    def town_of(self, name: str) -> str:
        return self._towns.get(name, "no such person")


@dataclass(frozen=True, slots=True)
class Question:
    """Question about a company.

    Example: the path of "In which town works the manager of the manager of Mia?" is Mia, Clara, Omar, and the answer is
    Omar's town.
    """

    seed: int  # of the company
    text: str
    path: tuple[str, ...]  # the person in the question, and the managers above up to the one in the answer
    answer: str

    @property
    def about_town(self) -> bool:
        return self.text.startswith(TOWN)


def draw_question(seed: int) -> Question:
    """Draw a question about the company with this seed. It takes 1 to `MOST_LOOK_UPS` look-ups."""
    rng, company = random.Random(f"question/{seed}"), Company(seed)
    about_town = rng.random() < 0.5
    levels = rng.randint(1, MOST_LOOK_UPS) - about_town
    paths = [path for person in company.people if (path := _upwards(company, person, levels)) is not None]
    path = rng.choice(paths)
    text = f"{TOWN if about_town else PERSON}{MANAGER_OF * levels}{path[0]}?"
    return Question(seed, text, path, company.town_of(path[-1]) if about_town else path[-1])


def _upwards(company: Company, person: str, levels: int) -> tuple[str, ...] | None:
    """Path from a person up through `levels` managers; None if there are fewer."""
    path = [person]
    for _ in range(levels):
        path.append(company.manager_of(path[-1]))
    return None if path[-1] not in company.people else tuple(path)
