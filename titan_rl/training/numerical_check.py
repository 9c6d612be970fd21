"""Numerical check: comparison of two computations of the same numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NumericalCheck:
    """Largest difference between two computations, and the largest that rounding explains.

    Attributes:
        name: Short name, such as "logprobs".
        subject: The two computations, for example "the trainer's against transformers'".
        unit: "nats", or "relative" for a difference relative to the largest entry.

    Example: `NumericalCheck("logprobs", "the trainer's against transformers'", 1.2e-6, 2e-5, "nats")`
    """

    name: str
    subject: str
    difference: float
    tolerance: float
    unit: str

    @property
    def holds(self) -> bool:
        """Whether the difference is within the tolerance; False if it is not a number."""
        return self.difference <= self.tolerance

    def __str__(self) -> str:
        return f"{self.difference:.2g} {self.unit}, at most {self.tolerance:.0g}: {self.subject}"
