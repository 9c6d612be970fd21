"""Metrics of rollouts: rewards, outcomes and lengths."""

from __future__ import annotations

from titan_rl.metrics.metric import MetricGroup

REWARD, ENDS = MetricGroup.REWARD, MetricGroup.ENDS

_EQUAL_REWARDS = (
    "If no answer is right, use easier samples, or run titan-rl sft on demonstrations. If all are right, use harder "
    "samples. Otherwise raise rollout.group_size or sampling.temperature, or set "
    'scheduling.filters = ["zero_variance"].'
)

ROLLOUT_METRICS = (
    REWARD.metric(
        "rollout/finished_reward_mean",
        "reward",
        "Mean reward of all finished rollouts, before filters: the best measure of the policy's performance.",
        "Rises over tens of steps. From step to step it fluctuates by at least rollout/reward_std divided by the "
        "square root of the number of rollouts.",
        "Read some transcripts first (rollouts.jsonl). If it is flat from the start, see "
        "rollout/zero_variance_groups and train/entropy. If it rises and then falls, lower training.lr.",
    ),
    REWARD.metric(
        "rollout/reward_mean",
        "reward",
        "Mean reward of the rollouts in the training batch. It depends on the filters, so use "
        "rollout/finished_reward_mean to judge the policy.",
    ),
    REWARD.metric(
        "rollout/reward_std",
        "reward",
        "Population standard deviation of the rewards in the training batch.",
        "Above 0.",
    ),
    REWARD.metric("rollout/reward_min", "reward", "Lowest reward in the training batch."),
    REWARD.metric("rollout/reward_max", "reward", "Highest reward in the training batch."),
    REWARD.metric(
        "rollout/reward/<reward>",
        "reward",
        "Unweighted mean of one reward function of the rubric, over the rollouts that it scored. The rubric "
        "combines its functions into the reward, as a weighted mean or a weighted sum.",
        "All of them rise or stay constant.",
        "If one falls while the total rises, the policy sacrifices it for the others: change its weight in the rubric.",
    ),
    REWARD.metric("rollout/seat/<seat>/reward_mean", "reward", "Mean reward of one seat of a game."),
    REWARD.metric(
        "league/versions",
        "versions",
        "Number of earlier versions of the policy in the league: they may play against it.",
    ),
    REWARD.metric(
        "league/win_rate",
        "share",
        "Estimated probability that the policy beats a version of its league, from recent games; mean over the "
        "versions. A draw counts as half a win.",
        "Above 0.5.",
        "If it stays below 0.5, the policy forgets how to beat earlier versions: lower self_play or training.lr.",
    ),
    REWARD.metric(
        "rollout/zero_variance_groups",
        "share",
        "Share of the groups in which all rewards are equal, so that they contribute no gradient.",
        "0.1 to 0.7.",
        _EQUAL_REWARDS,
    ),
    REWARD.metric(
        "rollout/metrics/teacher_kl",
        "nats",
        "Estimate of the reverse KL divergence from the teacher per token: the mean of the policy's logprob "
        "minus the teacher's, over the sampled tokens.",
        "Falls.",
        "If it is constant, see train/clip_fraction, or raise training.lr. If it is large from the start, the "
        "policy's answers are unlike the teacher's: run titan-rl sft on answers of the teacher first.",
    ),
    ENDS.metric("rollout/num_groups", "groups", "Groups in the training batch."),
    ENDS.metric("rollout/num_rollouts", "rollouts", "Rollouts in the training batch."),
    ENDS.metric(
        "rollout/finished_groups",
        "groups",
        "Groups in the training batch, plus finished groups that were dropped instead of joining it.",
    ),
    ENDS.metric("rollout/finished_rollouts", "rollouts", "Rollouts in rollout/finished_groups."),
    ENDS.metric(
        "rollout/finished_errors",
        "rollouts",
        "Finished rollouts that ended in an error.",
        "0, or few.",
        "The terminal shows the first error of each kind, with its line of code; logs/controller.log has all errors.",
    ),
    ENDS.metric(
        "rollout/status/completed",
        "share",
        "Share of rollouts that ran to completion.",
        "Near 1.",
        "The other statuses show how the remaining rollouts ended.",
    ),
    ENDS.metric(
        "rollout/status/truncated_length",
        "share",
        "Share of rollouts with a completion that reached sampling.max_tokens.",
        "Below 0.1.",
        "Raise sampling.max_tokens, or ask for shorter answers in the prompt.",
    ),
    ENDS.metric(
        "rollout/status/truncated_prompt",
        "share",
        "Share of rollouts whose next prompt left no room for an answer in model.max_context.",
        "Near 0.",
        "Raise model.max_context, or use fewer turns or shorter observations.",
    ),
    ENDS.metric(
        "rollout/status/truncated_turns",
        "share",
        "Share of rollouts that reached rollout.max_turns.",
        "Near 0.",
        "Raise rollout.max_turns, or reward the policy for finishing.",
    ),
    ENDS.metric(
        "rollout/status/truncated_time",
        "share",
        "Share of rollouts that exceeded rollout.rollout_timeout_s, not counting the time in which requests wait.",
        "Near 0.",
        "Raise rollout.rollout_timeout_s, or speed up the environment or the generation.",
    ),
    ENDS.metric(
        "rollout/status/undecided",
        "share",
        "Share of rollouts without an outcome, because their seat never had a turn or because another seat of their "
        "game ended it early.",
    ),
    ENDS.metric(
        "rollout/status/aborted",
        "share",
        "Share of rollouts that ended early because one of their requests or their whole group was aborted.",
        "0, or few.",
    ),
    ENDS.metric(
        "rollout/status/error_parse",
        "share",
        "Share of rollouts with an answer that could not be parsed, which is an error of the policy.",
        "Falls.",
        "Check that model.renderer fits the model. Run titan-rl sft on demonstrations to teach the format.",
    ),
    ENDS.metric(
        "rollout/status/error_timeout",
        "share",
        "Share of rollouts in which a call of the environment or of a reward function timed out.",
        "0.",
        "Find out what the environment waits for, or raise the timeouts in [rollout].",
    ),
    ENDS.metric(
        "rollout/status/error_env",
        "share",
        "Share of rollouts in which the environment raised an exception.",
        "0.",
        "The message in the terminal names the line of your code.",
    ),
    ENDS.metric(
        "rollout/status/error_generate",
        "share",
        "Share of rollouts in which a generation request failed.",
        "0.",
        "See the generators' messages in logs/.",
    ),
    ENDS.metric(
        "rollout/completion_tokens_mean",
        "tokens",
        "Mean number of completion tokens per rollout, over all its turns.",
        "Steady, or changing for a reason that the transcripts show.",
        "If it grows while the reward does not, reward shorter answers. If it shrinks to 0, the reward favours "
        "empty answers.",
    ),
    ENDS.metric("rollout/completion_tokens_max", "tokens", "Number of completion tokens of the longest rollout."),
    ENDS.metric("rollout/turns_mean", "turns", "Mean number of turns per rollout."),
    ENDS.metric(
        "rollout/branches_per_rollout",
        "sequences",
        "Mean number of token sequences to train on per rollout: one for each branch of its conversation.",
        "1 if each prompt extends the previous one.",
        "Above 1, the history is edited between turns, so that a new branch begins. Each branch is trained on with its "
        "full context, which costs time.",
    ),
    ENDS.metric(
        "rollout/constrained_fraction",
        "share",
        "Share of completion tokens whose choice a forced tool or a schema restricted. Absent if there are none.",
        "Depends on the agent. correction.constrained sets how these tokens are trained on.",
        'If it is near 1 and correction.constrained = "masked", almost no tokens are trained on.',
    ),
    ENDS.metric(
        "rollout/constraint_weight_mean",
        "share",
        "Probability that the policy, if it were not constrained, would satisfy the constraints of a rollout; mean "
        "over "
        'the constrained rollouts. It is the weight used by correction.constrained = "corrected".',
        "Rises as the policy learns to satisfy the constraints by itself.",
        'If it is near 0 and correction.constrained = "corrected", almost nothing is learned from these rollouts.',
    ),
    ENDS.metric("rollout/metrics/seconds", "s", "Mean time from a rollout's reset to its end."),
    ENDS.metric(
        "rollout/metrics/own_seconds",
        "s",
        "Mean part of rollout/metrics/seconds that counts against rollout.rollout_timeout_s: the time of the "
        "environment or agent, and of requests while they are generated, but not while they wait in a queue or are "
        "interrupted.",
        "Well below rollout.rollout_timeout_s.",
        "If it approaches the limit, rollouts are cut off: see rollout/status/truncated_time.",
    ),
    ENDS.metric(
        "rollout/metrics/env_seconds",
        "s",
        "Mean part of rollout/metrics/seconds that is spent in the environment or, for an agent, outside of requests. "
        "Generation is not included.",
        "Less than half of rollout/metrics/seconds.",
        "Steps wait for the environment: speed it up, or allow more rollouts in flight.",
    ),
    ENDS.metric(
        "rollout/metrics/reward_seconds", "s", "Mean time that a rollout spends in reward functions.", "Near 0."
    ),
    ENDS.metric(
        "rollout/metrics/teacher_seconds",
        "s",
        "Mean time from the end of a group until the teacher has computed the logprobs of one of its rollouts, "
        "including outages. Other groups are generated in the meantime.",
        "Less than rollout/metrics/seconds.",
        "The teacher's server is too slow or unavailable: see logs/controller.log.",
    ),
    ENDS.metric(
        "rollout/metrics/retries",
        "retries",
        "Mean number of times that a rollout was run again after an error (rollout.max_retries).",
        "0.",
    ),
    ENDS.metric(
        "rollout/metrics/close_failed",
        "",
        "1 if the environment of any rollout failed to close; absent otherwise.",
    ),
    ENDS.metric("rollout/metrics/branches", "branches", "Mean number of branches in the conversation of an agent."),
    ENDS.metric(
        "rollout/metrics/completion_tokens",
        "tokens",
        "Mean number of completion tokens of a rollout whose answers come from an external chat API (titan-rl eval), "
        "as reported by that API.",
    ),
    ENDS.metric("rollout/metrics/<metric>", "", "Mean of a metric that your environment reports."),
    ENDS.metric(
        "rollout/values_left_out",
        "values",
        "Number of rewards and metrics that are excluded from all means because they are not finite numbers.",
        "0.",
        "Find the reward or metric that is NaN, infinite or not a number.",
    ),
    ENDS.metric(
        "transcripts/left_out",
        "rollouts",
        "Number of rollouts, failed or of dropped groups, whose transcripts are not written, because the limit on such "
        "transcripts per step is reached.",
    ),
    ENDS.metric(
        "transcripts/lost",
        "rollouts",
        "Number of transcripts in the whole run that could not be written.",
        "0.",
        "Check that the disk is not full and that the run's folder is writable.",
    ),
)
