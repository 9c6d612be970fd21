"""Reward of word problems: 1 if the answer gives the right number."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from titan_rl import answer_of

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def is_right(row: Mapping[str, Any], text: str) -> float:
    """Compare the final numbers of the row and the answer. With math-verify (`pip install 'titan-rl[math]'`), LaTeX
    such as "\\boxed{\\frac{1}{2}}" is evaluated, too. That may take long, so call this in a thread."""
    right = final_number(row["answer"])
    if right is None:
        raise ValueError(f"the row's answer {row['answer']!r} has no number")
    answer = answer_of(text)  # a number in the thought is not an answer
    said = final_number(answer)
    return float(said == right or _is_equal(right, answer))


def final_number(text: str) -> Decimal | None:
    """Number after the last "####"; without one, the last number of the text.

    >>> final_number("9 + 6 = 15\\n#### 1,015")
    Decimal('1015')
    """
    _, marked, after = text.rpartition("####")
    numbers = _NUMBER.findall(after if marked else text)
    return Decimal((numbers[0] if marked else numbers[-1]).replace(",", "")) if numbers else None


def _is_equal(right: Decimal, answer: str) -> bool:
    if "\\" not in answer:  # no LaTeX
        return False
    try:
        import math_verify
    except ImportError:
        return False
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would warn at each call without a time limit
    untimed: Any = None  # its time limits use signals, which only work in the main thread
    said = math_verify.parse(answer, parsing_timeout=untimed)
    return math_verify.verify(math_verify.parse(str(right), parsing_timeout=untimed), said, timeout_seconds=None)
