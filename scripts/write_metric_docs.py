"""Write docs/metrics.md from the table of metrics."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from titan_rl.metrics.metric import Metric
from titan_rl.metrics.table import METRICS

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"

HEAD = """\
# Metrics

This page explains each metric, its normal range, and what to do when a value is outside that range. A run writes its
metrics to `metrics.jsonl` in its folder, one JSON object per step:
`{"step": 3, "time_s": 12.5, "rollout/reward_mean": 0.41, ...}`.

A part in angle brackets is a placeholder for a name in your run, such as that of a task or a reward. Every `rollout/`
and `completion/` metric also exists for held-out samples: as `validation/turns_mean` if there is one suite, or as
`validation/sums/turns_mean` for the suite `sums` if there are several. The `titan_rl_...` metrics are exported to
Prometheus by `titan-rl serve`, at `/metrics`.

Some words are used throughout; the [glossary](glossary.md) has the others. A *sample* is one item of a task's data, a
*rollout* is one conversation about it, and a *group* is all rollouts of one sample. To train, rollouts are converted to
*token sequences*, which are packed into *rows* of `training.row_tokens` tokens. A *suite* is a set of held-out samples,
by default one for each task. A group holds a *slot* from its admission until the generators have loaded the version of
the weights trained on it. A *generator* is a process that runs an *engine*, such as vLLM. It *pulls* each version
of the weights that the trainer *publishes*.

The `hosts/` metrics exist only for a run that has, or once had, several hosts. `titan-rl view` and
`titan-rl hosts RUN list` show the state and the history of each host
([several hosts](hosts.md#when-hosts-come-and-go)).

This page is generated from `titan_rl/metrics/` by `scripts/write_metric_docs.py`.
"""


def page() -> str:
    """Make the text of the page."""
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
