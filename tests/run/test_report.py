"""What the report says: which rewards it draws, which transcripts it shows, and that its page holds them."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path

from titan_rl.run.observability.report import Chart, make_report, write_report


class Page(HTMLParser):
    """Keeps the texts of elements by tag, and what would be fetched from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {}
        self.fetched: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)
        self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[self.open[-1]][-1] += data


def curves(chart: Chart) -> dict[str, list[tuple[float, float | None]]]:
    return {one.label: list(one.points) for one in chart.series}


def test_the_curve_is_of_all_groups_that_finished_and_of_those_trained_on_where_nothing_else_is_known():
    records = [
        {"step": 1, "rollout/finished_reward_mean": 0.75, "rollout/reward_mean": 0.5},
        {"step": 2, "rollout/reward_mean": 0.25},
    ]
    report = make_report("run", records, [], "")
    assert curves(report.reward)["train"] == [(1.0, 0.75), (2.0, 0.25)]
    (panel,) = report.panels
    assert curves(panel) == {"all that finished": [(1.0, 0.75)], "trained on": [(1.0, 0.5), (2.0, 0.25)]}


def test_a_value_that_is_no_number_leaves_a_gap():
    records = [{"step": step, "train/loss": value} for step, value in ((1, 0.5), (2, None), (3, math.inf), (4, 0.25))]
    (panel,) = make_report("run", records, [], "").panels
    assert curves(panel) == {"loss": [(1.0, 0.5), (2.0, None), (3.0, None), (4.0, 0.25)]}


def rollout(text: str, **more: object) -> dict:
    return {
        "step": 1,
        "phase": "train",
        "status": "completed",
        "messages": [{"role": "user", "content": text}],
    } | more


def test_transcripts_of_dropped_groups_are_shown_only_where_there_are_no_others():
    dropped, kept = rollout("dull", dropped="zero_variance"), rollout("bright")
    assert make_report("run", [], [dropped, kept], "").pairs == [[kept]]
    assert make_report("run", [], [dropped], "").pairs == [[dropped]]


def test_transcripts_are_of_the_same_prompt_in_the_first_and_the_last_step():
    first, middle, last, other = rollout("a"), rollout("a", step=2), rollout("a", step=3), rollout("b", step=3)
    report = make_report("run", [], [first, middle, other, last], "")
    assert report.pairs == [(first, last)]
    assert report.pairs_are_of == "Train rollouts of step 1, and of step 3."


def test_the_page_holds_everything_and_fetches_nothing(tmp_path: Path):
    tag = "</script><b>&"
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "rollout/reward_mean": None, "train/loss": 0.5}))
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(rollout(tag, reward=0.5, error=tag)))
    (tmp_path / "config.toml").write_text(f'seed = 1 # "{tag}"')

    page = Page(write_report(tmp_path).read_text())

    assert (page.fetched, page.open) == ([], [])
    assert page.texts["pre"] == [tag, f'seed = 1 # "{tag}"']
    loss, library, drawing = page.texts["script"]
    assert json.loads(loss)["series"][0]["points"] == [[1.0, 0.5]]
    assert "Permission is hereby granted" in library
    assert "new uPlot" in drawing
    assert tmp_path.name in page.texts["title"]
    assert tag in page.texts["p"][-1]


def test_a_run_without_a_single_record_has_a_page(tmp_path: Path):
    assert "no data" in Page(write_report(tmp_path).read_text()).texts["p"]
