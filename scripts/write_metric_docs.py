"""Write docs/metrics.md from the table of metrics."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from titan_rl.metrics.metric import Metric
from titan_rl.metrics.table import METRICS

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"

HEAD = """\
# Metrics

This page lists the meaning of each metric, its normal range, and what to do if it is outside. A run writes its
metrics to `metrics.jsonl` in its folder, one line per step:
`{"step": 3, "time_s": 12.5, "rollout/reward_mean": 0.41, ...}`.

A part in angle brackets stands for a name of your run: a task, a reward, a filter's reason. Each metric of `rollout/`
and `completion/` is also computed on held-out samples: `validation/turns_mean` with one suite, and
`validation/sums/turns_mean` for the suite `sums` if there are several. The metrics `titan_rl_...` are those that the
server of `titan-rl serve` exports to Prometheus at `/metrics`.

The metrics of `hosts/` exist if a run has or had several hosts. The state and the history of each host are on the page
of `titan-rl view` and in `titan-rl hosts RUN list` ([several hosts](hosts.md#when-hosts-come-and-go)).

`scripts/write_metric_docs.py` writes this page from `titan_rl/metrics/`.
"""


def page() -> str:
    """Text of the page."""
    sections = [HEAD]
    for group, metrics in groupby(METRICS, key=lambda metric: metric.group):
        rows = "\n".join(row(metric) for metric in metrics)
        sections.append(
            f"## {group}\n\n| metric | unit | meaning | normal | otherwise |\n|---|---|---|---|---|\n{rows}\n"
        )
    return "\n".join(sections)


def row(metric: Metric) -> str:
    texts = [metric.unit, metric.help, metric.normal, metric.otherwise]
    return f"| `{metric.name}` | {' | '.join(text.replace('<', '&lt;') for text in texts)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
