"""Writes docs/metrics.md from the table of metrics."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from titan_rl.metrics.metric import Metric
from titan_rl.metrics.table import METRICS

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"

HEAD = """\
# Metrics

What each metric means, what is normal, and what to do when it is not. A run writes all that it has of them to
`metrics.jsonl` of its folder, a line a step: `{"step": 3, "time_s": 12.5, "rollout/reward_mean": 0.41, ...}`.

A part in angle brackets stands for a name of your run: a task, a reward, a filter's reason. Each metric of `rollout/`
and `completion/` is there of held-out samples, too: `validation/turns_mean` of the only suite, and
`validation/sums/turns_mean` of the suite `sums` where there are several. Those of `titan_rl_...` are what the server of
`titan-rl serve` tells Prometheus at `/metrics`.

Those of `hosts/` are there where a run has or had several hosts. What became of each, and why, is on the page of
`titan-rl view` and in `titan-rl hosts RUN list` ([several hosts](hosts.md#when-hosts-come-and-go)).

`scripts/write_metric_docs.py` writes this page from `titan_rl/metrics/`.
"""

COLUMNS = "| metric | unit | what it is | normal | what to do else |\n|---|---|---|---|---|"


def page() -> str:
    """The page, as it should be."""
    sections = [HEAD]
    for group, metrics in groupby(METRICS, key=lambda metric: metric.group):
        rows = "\n".join(row(metric) for metric in metrics)
        sections.append(
            f"## {group}\n\n| metric | unit | what it is | normal | else |\n|---|---|---|---|---|\n{rows}\n"
        )
    return "\n".join(sections)


def row(metric: Metric) -> str:
    texts = [metric.unit, metric.help, metric.normal, metric.otherwise]
    return f"| `{metric.name}` | {' | '.join(text.replace('<', '&lt;') for text in texts)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
