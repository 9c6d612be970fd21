"""Waterfall of a run's core seconds: the time that all cores have, broken down from the work to what nobody uses.

It is computed from `metrics.jsonl` alone. Work is the time that processors spend in engine steps, and in loss, forward,
backward and optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping

AVAILABLE = "processor/available_s"
USED = {
    "processor/generators_s": "generators, besides steps",
    "processor/trainer_s": "trainer, besides steps",
    "processor/rollout_workers_s": "rollout workers",
    "processor/controller_s": "controller",
}
"""Parts by the metric of a process's whole time."""
STEPS = {
    "processor/engine_steps_s": ("engine steps", "processor/generators_s"),
    "processor/trainer_steps_s": ("trainer steps", "processor/trainer_s"),
}
"""Parts that are work, and the metric whose time includes them."""
UNUSED = "idle, or used by other programs"


def waterfall(seconds: Mapping[str, float]) -> dict[str, float]:
    """Break down core seconds.

    Args:
        seconds: Sums of the metrics processor/... over steps.

    Returns:
        Core seconds by part, the work first. Their sum is that of all cores, or the used time if that is more: reports
        of processes are up to a second old. Empty if the time of all cores is unknown.

    Example: `{"processor/available_s": 10.0, "processor/trainer_s": 6.0, "processor/trainer_steps_s": 5.0}` gives
    `{"trainer steps": 5.0, "trainer, besides steps": 1.0, "idle, or used by other programs": 4.0}`.
    """
    if not seconds.get(AVAILABLE):
        return {}
    parts = {name: seconds[metric] for metric, (name, _) in STEPS.items() if metric in seconds}
    for metric, name in USED.items():
        if metric in seconds:
            steps = sum(seconds.get(step, 0.0) for step, (_, whole) in STEPS.items() if whole == metric)
            parts[name] = max(0.0, seconds[metric] - steps)
    parts[UNUSED] = max(0.0, seconds[AVAILABLE] - sum(parts.values()))
    return parts
