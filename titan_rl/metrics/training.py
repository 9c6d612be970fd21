"""Metrics of the optimizer's steps."""

from __future__ import annotations

from titan_rl.metrics.metric import Metric, MetricGroup

OPTIMIZATION, OFF_POLICY = MetricGroup.OPTIMIZATION, MetricGroup.OFF_POLICY

TRAINING_METRICS = (
    Metric(
        "train/loss",
        "",
        "The loss that is minimized. In reinforcement learning it does not show progress; in titan-rl sft it "
        "is the mean negative log-likelihood of a token.",
        OPTIMIZATION,
        "Around 0 in reinforcement learning; falling in titan-rl sft.",
        "In titan-rl sft: if it rises, lower training.lr.",
    ),
    Metric(
        "train/grad_norm",
        "",
        "Norm of the gradient, before it is clipped to training.max_grad_norm.",
        OPTIMIZATION,
        "Stays within one order of magnitude.",
        "Growing tenfold or more: a lower training.lr. 0: all rewards of each group are equal.",
    ),
    Metric("train/lr", "", "Learning rate.", OPTIMIZATION),
    Metric(
        "train/skipped_steps",
        "steps",
        "Steps since the run was started or resumed whose weight update was skipped or incomplete, because "
        "loss or gradient was not finite or no token could be trained on.",
        OPTIMIZATION,
        "0.",
        "The messages name the rollouts; rollouts.jsonl has them, with skipped_step as dropped. Extreme "
        "rewards: bound them. More and more of them: a lower training.lr.",
    ),
    Metric(
        "train/respawns",
        "",
        "Restarts of the trainer after it died, reported for the step during or before which that happened.",
        OPTIMIZATION,
        "Absent.",
        "The messages name the process that died, logs/trainer.log the reason.",
    ),
    Metric(
        "train/recovery_s",
        "s",
        "Time from the trainer's death until it was at the same version again: starting it, loading the "
        "checkpoint, repeating the steps since.",
        OPTIMIZATION,
        "Absent.",
        "Minutes: a smaller checkpoint.interval, so that fewer steps are repeated.",
    ),
    Metric(
        "train/entropy",
        "nats",
        "Mean entropy of the policy at the trained tokens.",
        OPTIMIZATION,
        "It falls slowly.",
        "Near 0 while the reward is low: the policy no longer explores; a lower training.lr or a higher "
        "sampling.temperature. Rising without end: a lower training.lr.",
    ),
    Metric(
        "train/teacher_kl",
        "nats",
        "KL divergence from the teacher over its likeliest tokens, the mean over the tokens that it has scored. Absent "
        'with training.distill = "sampled".',
        OPTIMIZATION,
        "It falls.",
        "Constant: a larger training.lr or training.distill_coef.",
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
        "Token sequences dropped because they are longer than a row.",
        OPTIMIZATION,
        "0.",
        "A larger training.row_tokens.",
    ),
    Metric(
        "train/num_nonfinite_tokens",
        "tokens",
        "Tokens excluded because one of their logprobs is not finite.",
        OPTIMIZATION,
        "0.",
        "The dtype of the model is too coarse, or its weights are damaged: see sync/probe_diff.",
    ),
    Metric(
        "train/padding_fraction",
        "share",
        "Share of the positions of a forward pass that are padding.",
        OPTIMIZATION,
        "Below 0.3.",
        "A larger training.row_tokens packs better.",
    ),
    Metric(
        "train/wait_for_copy_s",
        "s",
        "Time in which the optimizer waited until the weights being published were copied.",
        OPTIMIZATION,
        "Near 0.",
    ),
    Metric(
        "train/idle_s",
        "s",
        "Idle time of the trainer's process since the end of the step before.",
        OPTIMIZATION,
        "Near 0 if generation keeps up.",
        "See time/wait_for_rollouts_s and sync/wait_for_pull_s for the reason.",
    ),
    Metric(
        "train/staleness_mean",
        "steps",
        "Mean number of optimizer steps between the weights that sampled a token and the weights that are "
        "trained on it.",
        OFF_POLICY,
        "At most scheduling.max_staleness.",
        "A smaller scheduling.max_staleness, or faster generation.",
    ),
    Metric("train/staleness_max", "steps", "Staleness of the oldest token.", OFF_POLICY),
    Metric(
        "train/approx_kl",
        "nats",
        "Estimated KL divergence from the policy that sampled the tokens to the one that is trained.",
        OFF_POLICY,
        "Below 0.05; about 0 on policy.",
        "A smaller scheduling.max_staleness, fewer training.minibatches, or a lower training.lr.",
    ),
    Metric("train/ratio_mean", "", "Mean ratio of trained to behaviour probability of a token.", OFF_POLICY, "1."),
    Metric(
        "train/ratio_max",
        "",
        "Largest ratio of trained to behaviour probability of a token.",
        OFF_POLICY,
        "Below 10; 1 on policy.",
    ),
    Metric(
        "train/clip_fraction",
        "share",
        "Share of tokens whose ratio the loss clipped.",
        OFF_POLICY,
        "Below 0.2.",
        "See train/approx_kl.",
    ),
    Metric("train/correction_weight_mean", "", "Mean weight of the off-policy correction.", OFF_POLICY, "Near 1."),
    Metric("train/correction_weight_max", "", "Largest weight of the off-policy correction.", OFF_POLICY),
    Metric(
        "train/correction_masked_fraction",
        "share",
        "Share of tokens that the off-policy correction masks.",
        OFF_POLICY,
        "Below 0.1.",
        "Wider bounds in [correction], or data that is less stale.",
    ),
    Metric(
        "train/on_policy_logprob_diff_mean",
        "nats",
        "Mean difference between the trainer's and the generator's logprob of a token under the same weights.",
        OFF_POLICY,
        "1e-6 in float32, 1e-2 in bfloat16.",
        "Trainer and engine compute different things: another dtype, another temperature, weights that are not "
        "used (see sync/probe_diff).",
    ),
    Metric("train/on_policy_logprob_diff_max", "nats", "Largest such difference of a token.", OFF_POLICY),
)
