"""Metrics of the optimizer's steps."""

from __future__ import annotations

from titan_rl.metrics.metric import Metric, MetricGroup

OPTIMIZATION, OFF_POLICY = MetricGroup.OPTIMIZATION, MetricGroup.OFF_POLICY

TRAINING_METRICS = (
    Metric(
        "train/loss",
        "",
        "The loss that is minimized. In reinforcement learning it says nothing of progress; in titan-rl sft it is the "
        "mean negative log-likelihood of a token.",
        OPTIMIZATION,
        "Around 0 in reinforcement learning; falling in titan-rl sft.",
        "In titan-rl sft: rising means too high a training.lr.",
    ),
    Metric(
        "train/grad_norm",
        "",
        "Norm of the gradient, before it is clipped to training.max_grad_norm.",
        OPTIMIZATION,
        "Of one order of magnitude throughout.",
        "Growing by tens: a lower training.lr. 0: no group has rewards that differ.",
    ),
    Metric("train/lr", "", "Learning rate.", OPTIMIZATION),
    Metric(
        "train/skipped_steps",
        "steps",
        "Steps, since the run was started or resumed, that changed no weights, or less than they should have, because "
        "loss or gradient was not finite or no token could be trained on.",
        OPTIMIZATION,
        "0.",
        "The messages say which rollouts; rollouts.jsonl has them, with skipped_step as dropped. Extreme rewards: "
        "bound them. More of them as the run goes on: a lower training.lr.",
    ),
    Metric(
        "train/respawns",
        "",
        "How often the trainer has died and was started again, as of a step in which or before which it did; no other "
        "step has it.",
        OPTIMIZATION,
        "No step has it.",
        "One that does: the messages say what died, logs/trainer.log why.",
    ),
    Metric(
        "train/recovery_s",
        "s",
        "From such a death until the trainer was at its version again: its start, the checkpoint, and the steps since.",
        OPTIMIZATION,
        "No step has it.",
        "Minutes: a smaller checkpoint.interval, so that fewer steps are trained again.",
    ),
    Metric(
        "train/entropy",
        "nats",
        "Mean entropy of the distributions that the trained tokens were drawn from.",
        OPTIMIZATION,
        "It falls slowly.",
        "Near 0 while the reward is low: the policy explores no more; a lower training.lr or a higher "
        "sampling.temperature. Rising without end: a lower training.lr.",
    ),
    Metric(
        "train/reference_kl",
        "nats",
        "Estimated KL divergence to the reference model; 0 without training.kl_coef.",
        OPTIMIZATION,
        "It grows slowly, and levels off.",
        "Growing fast: a larger training.kl_coef or a lower training.lr.",
    ),
    Metric("train/num_tokens", "tokens", "Tokens that the step was trained on.", OPTIMIZATION),
    Metric("train/num_samples", "samples", "Token sequences that the step was trained on.", OPTIMIZATION),
    Metric(
        "train/num_dropped_samples",
        "samples",
        "Token sequences that are longer than a row, and are left out.",
        OPTIMIZATION,
        "0.",
        "A larger training.row_tokens.",
    ),
    Metric(
        "train/num_nonfinite_tokens",
        "tokens",
        "Tokens left out because one of their logprobs is not finite.",
        OPTIMIZATION,
        "0.",
        "The model computes in a type that is too coarse, or its weights are damaged: see sync/probe_diff.",
    ),
    Metric(
        "train/padding_fraction",
        "share",
        "Share of the positions of a forward pass that hold no token.",
        OPTIMIZATION,
        "Below 0.3.",
        "Larger training.row_tokens pack better.",
    ),
    Metric(
        "train/wait_for_copy_s",
        "s",
        "Time in which the optimizer waited for the copy of the weights that are being published.",
        OPTIMIZATION,
        "Near 0.",
    ),
    Metric(
        "train/idle_s",
        "s",
        "Time since the end of the step before in which the trainer's process had nothing to do.",
        OPTIMIZATION,
        "Near 0 where generation keeps up.",
        "See time/wait_for_rollouts_s and sync/wait_for_pull_s for what it waited for.",
    ),
    Metric(
        "train/staleness_mean",
        "steps",
        "Optimizer steps between the weights that sampled a token and those that are trained on it.",
        OFF_POLICY,
        "At most scheduling.max_staleness.",
        "A smaller scheduling.max_staleness, or faster generation.",
    ),
    Metric("train/staleness_max", "steps", "The same, of the oldest token.", OFF_POLICY),
    Metric(
        "train/approx_kl",
        "nats",
        "Estimated KL divergence from the policy that sampled the tokens to the one that is trained.",
        OFF_POLICY,
        "Below 0.05; about 0 on policy.",
        "A smaller scheduling.max_staleness, fewer training.minibatches, or a lower training.lr.",
    ),
    Metric("train/ratio_mean", "", "Mean ratio of trained to behaviour probability of a token.", OFF_POLICY, "1."),
    Metric("train/ratio_max", "", "The largest such ratio.", OFF_POLICY, "Below 10; 1 on policy."),
    Metric(
        "train/clip_fraction",
        "share",
        "Share of tokens whose ratio was bounded by the loss.",
        OFF_POLICY,
        "Below 0.2.",
        "As for train/approx_kl.",
    ),
    Metric("train/correction_weight_mean", "", "Mean weight of the off-policy correction.", OFF_POLICY, "Near 1."),
    Metric("train/correction_weight_max", "", "The largest such weight.", OFF_POLICY),
    Metric(
        "train/correction_masked_fraction",
        "share",
        "Share of tokens that the off-policy correction leaves out.",
        OFF_POLICY,
        "Below 0.1.",
        "Wider bounds in [correction], or data that is less stale.",
    ),
    Metric(
        "train/on_policy_logprob_diff_mean",
        "nats",
        "Difference between the trainer's and the generator's logprob of a token under the same weights.",
        OFF_POLICY,
        "1e-6 in float32, 1e-2 in bfloat16.",
        "Trainer and engine do not compute the same model: another dtype, another temperature, weights that are not "
        "used (see sync/probe_diff).",
    ),
    Metric("train/on_policy_logprob_diff_max", "nats", "The same, of the worst token.", OFF_POLICY),
)
