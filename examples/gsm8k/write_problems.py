"""Write problems in the style of GSM8K, with numbers small enough for a tiny model.

    python -m examples.gsm8k.write_problems > examples/gsm8k/problems.jsonl

A line is `{"question": "Mia has 3 shells ...", "answer": "3 + 4 = 7\\n#### 7"}`: the steps, then the number.
"""

from __future__ import annotations

import json
import random

COUNT = 800
NAMES = "Mia Ben Tara Hugo Lena Omar".split()  # noqa: SIM905
THINGS = "shells cards coins books pears".split()  # noqa: SIM905


def problem(rng: random.Random) -> dict[str, str]:
    who, other = rng.sample(NAMES, 2)
    things = rng.choice(THINGS)
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    kind = rng.choice((more, fewer, bags, found_and_lost))
    question, steps = kind(who, other, things, max(a, b), min(a, b), rng.randint(1, 2))
    return {"question": question, "answer": f"{steps}\n#### {steps.rpartition(' ')[2]}"}


def more(who: str, other: str, things: str, a: int, b: int, c: int) -> tuple[str, str]:
    question = f"{who} has {a} {things}. {other} gives {who} {b} more. How many {things} does {who} have?"
    return question, f"{a} + {b} = {a + b}"


def fewer(who: str, other: str, things: str, a: int, b: int, c: int) -> tuple[str, str]:
    question = f"{who} has {a} {things} and gives {b} of them to {other}. How many {things} are left?"
    return question, f"{a} - {b} = {a - b}"


def bags(who: str, other: str, things: str, a: int, b: int, c: int) -> tuple[str, str]:
    question = f"{who} has {c + 1} bags with {a} {things} in each. How many {things} is that?"
    return question, f"{c + 1} * {a} = {(c + 1) * a}"


def found_and_lost(who: str, other: str, things: str, a: int, b: int, c: int) -> tuple[str, str]:
    question = f"{who} has {a} {things}, finds {b} and loses {c}. How many {things} does {who} have?"
    return question, f"{a} + {b} = {a + b}\n{a + b} - {c} = {a + b - c}"


def main() -> None:
    rng = random.Random(0)
    problems: dict[str, dict[str, str]] = {}
    while len(problems) < COUNT:
        made = problem(rng)
        problems[made["question"]] = made
    for made in problems.values():
        print(json.dumps(made))


if __name__ == "__main__":
    main()
