"""What a group may be at, from its admission until it gives its slot back."""

from __future__ import annotations

from enum import StrEnum


class GroupState(StrEnum):
    """What a group that holds a slot does. In this order, but for suspensions."""

    PENDING = "pending"  # waits until its rollouts fit beside those in flight
    RUNNING = "running"
    SUSPENDED = "suspended"  # waits, with its tokens, for the tail batch
    DONE = "done"  # waits for its batch
    TRAINING = "training"  # in a batch, until the version trained on it is pulled
