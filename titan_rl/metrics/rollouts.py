"""Metrics of rollouts: rewards, endings and lengths."""

from __future__ import annotations

from titan_rl.metrics.metric import Metric, MetricGroup

REWARD, ENDS = MetricGroup.REWARD, MetricGroup.ENDS

_EQUAL_REWARDS = (
    "If no answer is right: easier samples, or titan-rl sft on demonstrations. If all are: harder samples. In "
    'general: a larger rollout.group_size, a higher sampling.temperature, or scheduling.filters = ["zero_variance"].'
)

ROLLOUT_METRICS = (
    Metric(
        "rollout/finished_reward_mean",
        "reward",
        "Mean reward of all finished rollouts, before filters: the best measure of the policy.",
        REWARD,
        "It rises over tens of steps, and varies from step to step by about its standard deviation divided by "
        "the square root of the number of rollouts.",
        "Flat from the start: see rollout/zero_variance_groups and train/entropy. Rising, then falling: a "
        "lower training.lr. In either case, read the answers first: rollouts.jsonl.",
    ),
    Metric(
        "rollout/reward_mean",
        "reward",
        "Mean reward of the rollouts that the step was trained on. Filters affect it, so "
        "rollout/finished_reward_mean is the better measure of the policy.",
        REWARD,
    ),
    Metric(
        "rollout/reward_std",
        "reward",
        "Standard deviation (population) of the rewards that the step was trained on.",
        REWARD,
        "Above 0.",
    ),
    Metric("rollout/reward_min", "reward", "Lowest reward that the step was trained on.", REWARD),
    Metric("rollout/reward_max", "reward", "Highest reward that the step was trained on.", REWARD),
    Metric(
        "rollout/reward/<reward>",
        "reward",
        "Mean of one reward function of the rubric, unweighted, over the rollouts that have it. The rubric "
        "combines these into rollout/reward_mean, as a weighted mean or a weighted sum.",
        REWARD,
        "All of them rise or stay constant.",
        "If one falls while the total rises, the policy trades it away: change its weight in the rubric.",
    ),
    Metric("rollout/seat/<seat>/reward_mean", "reward", "Mean reward of one seat of a game.", REWARD),
    Metric(
        "rollout/zero_variance_groups",
        "share",
        "Share of the groups in which all rewards are equal, so that they contribute no gradient.",
        REWARD,
        "0.1 to 0.7.",
        _EQUAL_REWARDS,
    ),
    Metric("rollout/num_groups", "groups", "Groups that the step was trained on.", ENDS),
    Metric("rollout/num_rollouts", "rollouts", "Rollouts that the step was trained on.", ENDS),
    Metric(
        "rollout/finished_groups",
        "groups",
        "Groups that the step was trained on, and groups that were dropped in favour of them.",
        ENDS,
    ),
    Metric("rollout/finished_rollouts", "rollouts", "Rollouts in rollout/finished_groups.", ENDS),
    Metric(
        "rollout/finished_errors",
        "rollouts",
        "Finished rollouts that ended in an error.",
        ENDS,
        "0, or few.",
        "The terminal shows the first error of each kind, with its line of code; logs/controller.log has all errors.",
    ),
    Metric(
        "rollout/status/completed",
        "share",
        "Share of the rollouts that ended regularly.",
        ENDS,
        "Near 1.",
        "The other shares show how the rest ended.",
    ),
    Metric(
        "rollout/status/truncated_length",
        "share",
        "Share in which a completion reached sampling.max_tokens.",
        ENDS,
        "Below 0.1.",
        "A larger sampling.max_tokens, or a prompt that asks for less.",
    ),
    Metric(
        "rollout/status/truncated_prompt",
        "share",
        "Share in which the next prompt left no room for an answer.",
        ENDS,
        "Near 0.",
        "A larger model.max_context, fewer turns, or shorter observations.",
    ),
    Metric(
        "rollout/status/truncated_turns",
        "share",
        "Share that reached rollout.max_turns.",
        ENDS,
        "Near 0.",
        "A larger rollout.max_turns, or a reward for ending.",
    ),
    Metric(
        "rollout/status/truncated_time",
        "share",
        "Share that exceeded rollout.rollout_timeout_s, not counting waits for generation.",
        ENDS,
        "Near 0.",
        "A longer rollout.rollout_timeout_s, or a faster environment.",
    ),
    Metric(
        "rollout/status/undecided",
        "share",
        "Share of seats that never had a turn, or whose game ended early because of another seat.",
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
        "Check that model.renderer fits the model; titan-rl sft on demonstrations teaches the format.",
    ),
    Metric(
        "rollout/status/error_timeout",
        "share",
        "Share in which an environment or a reward did not answer in time.",
        ENDS,
        "0.",
        "Raise the timeouts of [rollout], or find out what the environment waits for.",
    ),
    Metric(
        "rollout/status/error_env",
        "share",
        "Share in which the environment raised an exception.",
        ENDS,
        "0.",
        "The message in the terminal has the line of your code.",
    ),
    Metric(
        "rollout/status/error_generate",
        "share",
        "Share with a request that could not be answered.",
        ENDS,
        "0.",
        "logs/ has the generator's messages.",
    ),
    Metric(
        "rollout/completion_tokens_mean",
        "tokens",
        "Mean completion tokens of a rollout, over all its turns.",
        ENDS,
        "Steady, or changing for a reason visible in the answers.",
        "Growing while the reward does not: reward shorter answers. Shrinking to 0: the reward favours silence.",
    ),
    Metric("rollout/completion_tokens_max", "tokens", "Completion tokens of the longest rollout.", ENDS),
    Metric("rollout/turns_mean", "turns", "Turns of a rollout.", ENDS),
    Metric(
        "rollout/branches_per_rollout",
        "samples",
        "Training samples per rollout.",
        ENDS,
        "1, as long as each prompt extends the one before.",
        "More: the history is edited between turns, and each branch is trained with its full context.",
    ),
    Metric(
        "rollout/constrained_fraction",
        "share",
        "Share of completion tokens that were restricted by a forced tool or a schema. Absent if there are none.",
        ENDS,
        "Depends on the agent. `correction.constrained` configures how these tokens are trained.",
        'Near 1 with `correction.constrained = "masked"`: hardly anything is trained.',
    ),
    Metric(
        "rollout/constraint_weight_mean",
        "share",
        "Mean over constrained rollouts of the probability that the policy gives to the allowed texts: "
        'the weight of `correction.constrained = "corrected"`.',
        ENDS,
        "Rises as the policy learns to satisfy the constraints by itself.",
        'Near 0: with "corrected" hardly anything is learned from these rollouts.',
    ),
    Metric("rollout/metrics/seconds", "s", "Mean time of a rollout from its reset to its end.", ENDS),
    Metric(
        "rollout/metrics/own_seconds",
        "s",
        "Mean time of a rollout in its environment and its agent, without waiting for generation.",
        ENDS,
        "Less than half of rollout/metrics/seconds.",
        "Steps wait for the environment: make it faster, or allow more rollouts in flight.",
    ),
    Metric(
        "rollout/metrics/env_seconds",
        "s",
        "Mean time of a rollout in calls of its environment, or of its agent without the requests.",
        ENDS,
        "Less than half of rollout/metrics/seconds.",
        "Steps wait for the environment: make it faster, or allow more rollouts in flight.",
    ),
    Metric("rollout/metrics/reward_seconds", "s", "Mean time of a rollout in reward functions.", ENDS, "Near 0."),
    Metric(
        "rollout/metrics/teacher_seconds",
        "s",
        "Mean time until a teacher has scored a rollout, outages included. Other groups are generated meanwhile.",
        ENDS,
        "Less than rollout/metrics/seconds.",
        "The teacher's server is too slow, or down: logs/controller.log.",
    ),
    Metric(
        "rollout/metrics/teacher_kl",
        "nats",
        "Mean of the policy's logprob minus the teacher's, over the sampled tokens: an estimate of the reverse KL "
        "divergence for each token.",
        REWARD,
        "It falls.",
        "Constant: see train/clip_fraction, or a larger training.lr. Large from the start: the policy's answers are "
        "unlike the teacher's; titan-rl sft on the teacher's answers first.",
    ),
    Metric("rollout/metrics/retries", "retries", "Mean number of restarts of a rollout.", ENDS, "0."),
    Metric(
        "rollout/metrics/close_failed",
        "rollouts",
        "1 for a rollout whose environment failed to close; mean over the rollouts.",
        ENDS,
    ),
    Metric("rollout/metrics/branches", "samples", "Mean number of branches of an agent's conversation.", ENDS),
    Metric("rollout/metrics/completion_tokens", "tokens", "Tokens that an endpoint reports for its completions.", ENDS),
    Metric("rollout/metrics/<metric>", "", "Mean of a metric that your environment reports.", ENDS),
    Metric(
        "rollout/values_left_out",
        "values",
        "Rewards and metrics that are not finite numbers, and are excluded from all means.",
        ENDS,
        "0.",
        "A reward or metric is NaN, infinite or not a number.",
    ),
    Metric(
        "transcripts/left_out",
        "rollouts",
        "Rollouts with an error, or of dropped groups, whose transcripts are not written because enough of the "
        "same kind have been.",
        ENDS,
    ),
    Metric(
        "transcripts/lost",
        "rollouts",
        "Transcripts that could not be written, in the whole run.",
        ENDS,
        "0.",
        "The disk is full, or the folder is not writable.",
    ),
)
