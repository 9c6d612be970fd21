"""Which reward the report draws, and which transcripts it shows."""

from __future__ import annotations

from titan_rl.run.observability.report import render_report


def test_the_curve_is_of_all_groups_that_finished_and_of_those_trained_on_where_nothing_else_is_known():
    records = [
        {"step": 1, "rollout/finished_reward_mean": 0.75, "rollout/reward_mean": 0.5},
        {"step": 2, "rollout/reward_mean": 0.25},
    ]
    page = render_report("run", records, [], "")
    assert "train, step 1: 0.75" in page
    assert "train, step 2: 0.25" in page
    assert "train, step 1: 0.5<" not in page
    assert "trained on, step 1: 0.5" in page


def test_transcripts_of_dropped_groups_are_shown_only_where_there_are_no_others():
    def rollout(text: str, **more: str) -> dict:
        return {
            "step": 1,
            "phase": "train",
            "status": "completed",
            "messages": [{"role": "user", "content": text}],
        } | more

    dropped = rollout("dull", dropped="zero_variance")
    assert "dull" not in render_report("run", [], [dropped, rollout("bright")], "")
    assert "dull" in render_report("run", [], [dropped], "")
