"""Metrics of rollouts: rewards, endings and lengths."""

from __future__ import annotations

from titan_rl.metrics.metric import Metric, MetricGroup

REWARD, ENDS = MetricGroup.REWARD, MetricGroup.ENDS

_EQUAL_REWARDS = (
    "If no answer is right, use easier samples, or run titan-rl sft on demonstrations. If all are right, use harder "
    "samples. Otherwise raise rollout.group_size or sampling.temperature, or set "
    'scheduling.filters = ["zero_variance"].'
)

ROLLOUT_METRICS = (
    Metric(
        "rollout/finished_reward_mean",
        "reward",
        "Mean reward of all finished rollouts, before filters: the best measure of the policy's performance.",
        REWARD,
        "Rises over tens of steps. From step to step it fluctuates by about rollout/reward_std divided by the "
        "square root of the number of rollouts.",
        "Read some transcripts first (rollouts.jsonl). If it is flat from the start, see "
        "rollout/zero_variance_groups and train/entropy. If it rises and then falls, lower training.lr.",
    ),
    Metric(
        "rollout/reward_mean",
        "reward",
        "Mean reward of the rollouts in the training batch. It depends on the filters, so use "
        "rollout/finished_reward_mean to judge the policy.",
        REWARD,
    ),
    Metric(
        "rollout/reward_std",
        "reward",
        "Population standard deviation of the rewards in the training batch.",
        REWARD,
        "Above 0.",
    ),
    Metric("rollout/reward_min", "reward", "Lowest reward in the training batch.", REWARD),
    Metric("rollout/reward_max", "reward", "Highest reward in the training batch.", REWARD),
    Metric(
        "rollout/reward/<reward>",
        "reward",
        "Unweighted mean of one reward function of the rubric, over the rollouts that it scored. The rubric "
        "combines its functions into the reward, as a weighted mean or a weighted sum.",
        REWARD,
        "All of them rise or stay constant.",
        "If one falls while the total rises, the policy sacrifices it for the others: change its weight in the rubric.",
    ),
    Metric("rollout/seat/<seat>/reward_mean", "reward", "Mean reward of one seat of a game.", REWARD),
    Metric(
        "league/versions",
        "versions",
        "Number of frozen versions of the run that may play seats of its games.",
        REWARD,
    ),
    Metric(
        "league/win_rate",
        "share",
        "Estimated chance of the policy to win against a version of its league, draws counting half: the mean over "
        "the versions, from recent games.",
        REWARD,
        "Above 0.5.",
        "If it stays below 0.5, the policy forgets how to beat earlier versions: lower self_play or training.lr.",
    ),
    Metric(
        "rollout/zero_variance_groups",
        "share",
        "Share of the groups in which all rewards are equal, so that they contribute no gradient.",
        REWARD,
        "0.1 to 0.7.",
        _EQUAL_REWARDS,
    ),
    Metric(
        "rollout/metrics/teacher_kl",
        "nats",
        "Estimate of the reverse KL divergence from the teacher per token: the mean of the policy's logprob "
        "minus the teacher's, over the sampled tokens.",
        REWARD,
        "Falls.",
        "If it is constant, see train/clip_fraction, or raise training.lr. If it is large from the start, the "
        "policy's answers are unlike the teacher's: run titan-rl sft on answers of the teacher first.",
    ),
    Metric("rollout/num_groups", "groups", "Groups in the training batch.", ENDS),
    Metric("rollout/num_rollouts", "rollouts", "Rollouts in the training batch.", ENDS),
    Metric(
        "rollout/finished_groups",
        "groups",
        "Groups in the training batch, plus finished groups that were dropped instead of joining it.",
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
        "Share of rollouts that ran to completion.",
        ENDS,
        "Near 1.",
        "The other statuses show how the remaining rollouts ended.",
    ),
    Metric(
        "rollout/status/truncated_length",
        "share",
        "Share of rollouts with a completion that reached sampling.max_tokens.",
        ENDS,
        "Below 0.1.",
        "Raise sampling.max_tokens, or ask for shorter answers in the prompt.",
    ),
    Metric(
        "rollout/status/truncated_prompt",
        "share",
        "Share of rollouts whose next prompt left no room for an answer in model.max_context.",
        ENDS,
        "Near 0.",
        "Raise model.max_context, or use fewer turns or shorter observations.",
    ),
    Metric(
        "rollout/status/truncated_turns",
        "share",
        "Share of rollouts that reached rollout.max_turns.",
        ENDS,
        "Near 0.",
        "Raise rollout.max_turns, or reward the policy for finishing.",
    ),
    Metric(
        "rollout/status/truncated_time",
        "share",
        "Share of rollouts that exceeded rollout.rollout_timeout_s, not counting waits for generation.",
        ENDS,
        "Near 0.",
        "Raise rollout.rollout_timeout_s, or speed up the environment.",
    ),
    Metric(
        "rollout/status/undecided",
        "share",
        "Share of rollouts of a seat that never had a turn, or whose game ended early because of another seat.",
        ENDS,
    ),
    Metric(
        "rollout/status/aborted",
        "share",
        "Share of rollouts that ended early because generation was stopped.",
        ENDS,
        '0, or few with scheduling.on_batch_ready = "abort".',
    ),
    Metric(
        "rollout/status/error_parse",
        "share",
        "Share of rollouts with an answer that could not be parsed, which is an error of the policy.",
        ENDS,
        "Falls.",
        "Check that model.renderer fits the model. Run titan-rl sft on demonstrations to teach the format.",
    ),
    Metric(
        "rollout/status/error_timeout",
        "share",
        "Share of rollouts in which a call of the environment or of a reward function timed out.",
        ENDS,
        "0.",
        "Find out what the environment waits for, or raise the timeouts in [rollout].",
    ),
    Metric(
        "rollout/status/error_env",
        "share",
        "Share of rollouts in which the environment raised an exception.",
        ENDS,
        "0.",
        "The message in the terminal names the line of your code.",
    ),
    Metric(
        "rollout/status/error_generate",
        "share",
        "Share of rollouts in which a generation request failed.",
        ENDS,
        "0.",
        "See the generators' messages in logs/.",
    ),
    Metric(
        "rollout/completion_tokens_mean",
        "tokens",
        "Mean number of completion tokens per rollout, over all its turns.",
        ENDS,
        "Steady, or changing for a reason that the transcripts show.",
        "If it grows while the reward does not, reward shorter answers. If it shrinks to 0, the reward favours "
        "empty answers.",
    ),
    Metric("rollout/completion_tokens_max", "tokens", "Number of completion tokens of the longest rollout.", ENDS),
    Metric("rollout/turns_mean", "turns", "Mean number of turns per rollout.", ENDS),
    Metric(
        "rollout/branches_per_rollout",
        "samples",
        "Training samples per rollout.",
        ENDS,
        "1 as long as each prompt extends the previous one.",
        "Above 1, the history is edited between turns. Each branch is trained with its full context, which costs time.",
    ),
    Metric(
        "rollout/constrained_fraction",
        "share",
        "Share of completion tokens that were restricted by a forced tool or a schema. Absent if there are none.",
        ENDS,
        "Depends on the agent. correction.constrained sets how these tokens are trained.",
        'Near 1 with correction.constrained = "masked", almost no tokens are trained.',
    ),
    Metric(
        "rollout/constraint_weight_mean",
        "share",
        "Mean probability, over constrained rollouts, that the policy assigns to the outputs that the constraint "
        'allows. It is the weight used by correction.constrained = "corrected".',
        ENDS,
        "Rises as the policy learns to satisfy the constraints by itself.",
        'Near 0 with correction.constrained = "corrected", almost nothing is learned from these rollouts.',
    ),
    Metric("rollout/metrics/seconds", "s", "Mean time from a rollout's reset to its end.", ENDS),
    Metric(
        "rollout/metrics/own_seconds",
        "s",
        "Mean time that a rollout spends in its environment and its agent, excluding waits for generation.",
        ENDS,
        "Less than half of rollout/metrics/seconds.",
        "Steps wait for the environment: speed it up, or allow more rollouts in flight.",
    ),
    Metric(
        "rollout/metrics/env_seconds",
        "s",
        "Mean time that a rollout spends in calls of its environment or, for an agent, outside of requests.",
        ENDS,
        "Less than half of rollout/metrics/seconds.",
        "Steps wait for the environment: speed it up, or allow more rollouts in flight.",
    ),
    Metric(
        "rollout/metrics/reward_seconds", "s", "Mean time that a rollout spends in reward functions.", ENDS, "Near 0."
    ),
    Metric(
        "rollout/metrics/teacher_seconds",
        "s",
        "Mean time until the teacher has scored a rollout, including outages. Other groups are generated in the "
        "meantime.",
        ENDS,
        "Less than rollout/metrics/seconds.",
        "The teacher's server is too slow or unavailable: see logs/controller.log.",
    ),
    Metric("rollout/metrics/retries", "retries", "Mean number of times that a rollout was restarted.", ENDS, "0."),
    Metric(
        "rollout/metrics/close_failed",
        "rollouts",
        "1 if the environment of a rollout failed to close; absent otherwise.",
        ENDS,
    ),
    Metric("rollout/metrics/branches", "samples", "Mean number of branches of an agent's conversation.", ENDS),
    Metric("rollout/metrics/completion_tokens", "tokens", "Tokens that an endpoint reports for its completions.", ENDS),
    Metric("rollout/metrics/<metric>", "", "Mean of a metric that your environment reports.", ENDS),
    Metric(
        "rollout/values_left_out",
        "values",
        "Number of rewards and metrics that are excluded from all means because they are not finite numbers.",
        ENDS,
        "0.",
        "Find the reward or metric that is NaN, infinite or not a number.",
    ),
    Metric(
        "transcripts/left_out",
        "rollouts",
        "Number of failed rollouts, and rollouts of dropped groups, whose transcripts are omitted because enough "
        "transcripts of that kind have been written.",
        ENDS,
    ),
    Metric(
        "transcripts/lost",
        "rollouts",
        "Number of transcripts in the whole run that could not be written.",
        ENDS,
        "0.",
        "Check that the disk is not full and that the run's folder is writable.",
    ),
)
