"""Metrics of rollouts: what they earned, how they ended, how long they are."""

from __future__ import annotations

from titan_rl.metrics.metric import Metric, MetricGroup

REWARD, ENDS = MetricGroup.REWARD, MetricGroup.ENDS

_EQUAL_REWARDS = (
    "Where no answer is right: easier samples, or titan-rl sft on demonstrations. Where all are: harder samples. "
    'Elsewhere a larger rollout.group_size, a higher sampling.temperature, or scheduling.filters = ["zero_variance"].'
)

ROLLOUT_METRICS = (
    Metric(
        "rollout/finished_reward_mean",
        "reward",
        "Mean reward of all rollouts that finished, before filters leave any out: what the policy earns.",
        REWARD,
        "It rises over tens of steps, and swings from step to step by about its standard deviation over the root of "
        "the number of rollouts.",
        "Flat from the start: see rollout/zero_variance_groups and train/entropy. Rising and then falling: a lower "
        "training.lr. What the answers look like says most: rollouts.jsonl.",
    ),
    Metric(
        "rollout/reward_mean",
        "reward",
        "Mean reward of the rollouts that the step was trained on. Filters move it, so that it says less of the policy "
        "than rollout/finished_reward_mean.",
        REWARD,
    ),
    Metric("rollout/reward_std", "reward", "Standard deviation (population) of those rewards.", REWARD, "Above 0."),
    Metric("rollout/reward_min", "reward", "Smallest of those rewards.", REWARD),
    Metric("rollout/reward_max", "reward", "Largest of those rewards.", REWARD),
    Metric(
        "rollout/reward/<reward>",
        "reward",
        "Mean of one reward of the rubric, unweighted, over the rollouts that have it. rollout/reward_mean is made of "
        "these as the rubric says: their weighted mean, or their weighted sum.",
        REWARD,
        "All of them rise, or stay.",
        "One that falls while the reward rises is being traded away: change its weight in the rubric.",
    ),
    Metric("rollout/seat/<seat>/reward_mean", "reward", "Mean reward of what one seat of a game did.", REWARD),
    Metric(
        "rollout/zero_variance_groups",
        "share",
        "Share of the groups in which all rewards are equal. They teach nothing.",
        REWARD,
        "0.1 to 0.7.",
        _EQUAL_REWARDS,
    ),
    Metric("rollout/num_groups", "groups", "Groups that the step was trained on.", ENDS),
    Metric("rollout/num_rollouts", "rollouts", "Rollouts in them.", ENDS),
    Metric(
        "rollout/finished_groups",
        "groups",
        "Groups that the step was trained on and those that made room for them.",
        ENDS,
    ),
    Metric("rollout/finished_rollouts", "rollouts", "Rollouts in them.", ENDS),
    Metric(
        "rollout/finished_errors",
        "rollouts",
        "Those of them that ended in an error.",
        ENDS,
        "0, or few.",
        "The first of each kind is on the screen, with its line; logs/controller.log has each in full.",
    ),
    Metric(
        "rollout/status/completed",
        "share",
        "Share of the rollouts that came to their own end.",
        ENDS,
        "Near 1.",
        "The other shares say what ended the rest.",
    ),
    Metric(
        "rollout/status/truncated_length",
        "share",
        "Share in which a completion used up sampling.max_tokens.",
        ENDS,
        "Below 0.1.",
        "A larger sampling.max_tokens, or a prompt that asks for less.",
    ),
    Metric(
        "rollout/status/truncated_prompt",
        "share",
        "Share in which the next prompt would leave no room to answer.",
        ENDS,
        "Near 0.",
        "A larger model.max_context, fewer turns, or shorter observations.",
    ),
    Metric(
        "rollout/status/truncated_turns",
        "share",
        "Share that were still going on at rollout.max_turns.",
        ENDS,
        "Near 0.",
        "More rollout.max_turns, or a reward for ending.",
    ),
    Metric(
        "rollout/status/truncated_time",
        "share",
        "Share whose own time was used up.",
        ENDS,
        "Near 0.",
        "A longer rollout.rollout_timeout_s, or a faster environment.",
    ),
    Metric(
        "rollout/status/undecided",
        "share",
        "Share of seats that were never asked, or whose game another seat kept from its end.",
        ENDS,
    ),
    Metric(
        "rollout/status/aborted",
        "share",
        "Share that ended early because generation was stopped.",
        ENDS,
        '0, or few with scheduling.on_batch_ready = "abort".',
    ),
    Metric(
        "rollout/status/error_parse",
        "share",
        "Share whose answer could not be parsed: the policy's own error.",
        ENDS,
        "It falls.",
        "The model.renderer that is made for this model; titan-rl sft on demonstrations, for the form of calls.",
    ),
    Metric(
        "rollout/status/error_timeout",
        "share",
        "Share in which an environment or a reward did not answer in time.",
        ENDS,
        "0.",
        "The timeouts of [rollout], or what the environment waits for.",
    ),
    Metric(
        "rollout/status/error_env",
        "share",
        "Share in which the environment raised.",
        ENDS,
        "0.",
        "The message on the screen has the line of your code.",
    ),
    Metric(
        "rollout/status/error_generate",
        "share",
        "Share whose request could not be answered.",
        ENDS,
        "0.",
        "logs/ has what the generator said.",
    ),
    Metric(
        "rollout/completion_tokens_mean",
        "tokens",
        "Completion tokens of a rollout, all turns together.",
        ENDS,
        "Steady, or changing for a reason that the answers show.",
        "Growing without more reward: reward shorter answers. Shrinking towards 0: the reward pays for silence.",
    ),
    Metric("rollout/completion_tokens_max", "tokens", "The same, of the longest rollout.", ENDS),
    Metric("rollout/turns_mean", "turns", "Turns of a rollout.", ENDS),
    Metric(
        "rollout/branches_per_rollout",
        "samples",
        "Training samples that a rollout's turns make.",
        ENDS,
        "1, as long as each prompt extends the one before.",
        "More: the history is edited between turns, and each branch costs its whole context again.",
    ),
    Metric("rollout/metrics/seconds", "s", "Mean time of a rollout from its reset to its end.", ENDS),
    Metric(
        "rollout/metrics/own_seconds",
        "s",
        "Of that, what its environment and its agent took, without waiting for generation.",
        ENDS,
        "Less than half of rollout/metrics/seconds.",
        "The environment is what a step waits for: make it faster, or allow more rollouts in flight.",
    ),
    Metric(
        "rollout/metrics/env_seconds",
        "s",
        "Mean time of a rollout in calls of its environment, or of its agent without the requests.",
        ENDS,
        "Less than half of rollout/metrics/seconds.",
        "The environment is what a step waits for: make it faster, or allow more rollouts in flight.",
    ),
    Metric("rollout/metrics/reward_seconds", "s", "Mean time that the rewards of a rollout took.", ENDS, "Near 0."),
    Metric("rollout/metrics/retries", "retries", "Mean number of times that a rollout was begun anew.", ENDS, "0."),
    Metric("rollout/metrics/close_failed", "rollouts", "1 of a rollout whose environment did not close.", ENDS),
    Metric("rollout/metrics/branches", "samples", "Mean number of branches of an agent's conversation.", ENDS),
    Metric("rollout/metrics/completion_tokens", "tokens", "Tokens that a policy behind a URL says it wrote.", ENDS),
    Metric("rollout/metrics/<metric>", "", "Mean of a metric that your environment gives its rollouts.", ENDS),
    Metric(
        "rollout/values_left_out",
        "values",
        "Rewards and metrics that are no finite number, and are in no mean.",
        ENDS,
        "0.",
        "The reward gives NaN or infinity, or something that is no number.",
    ),
    Metric(
        "transcripts/left_out",
        "rollouts",
        "Rollouts with an error, or of dropped groups, that are not written because enough of their kind are.",
        ENDS,
    ),
    Metric(
        "transcripts/lost",
        "rollouts",
        "Transcripts that could not be written, in the whole run.",
        ENDS,
        "0.",
        "The disk is full, or the folder may not be written to.",
    ),
)
