"""Metrics of the optimizer's steps."""

from __future__ import annotations

from titan_rl.metrics.metric import MetricGroup

OPTIMIZATION, OFF_POLICY = MetricGroup.OPTIMIZATION, MetricGroup.OFF_POLICY

TRAINING_METRICS = (
    OPTIMIZATION.metric(
        "train/loss",
        "",
        "Loss that the optimizer minimizes. In reinforcement learning its value does not measure progress. In "
        "titan-rl sft it is the mean negative log-likelihood per token.",
        "Around 0 in reinforcement learning. Falls in titan-rl sft.",
        "If it rises in titan-rl sft, lower training.lr.",
    ),
    OPTIMIZATION.metric(
        "train/grad_norm",
        "",
        "Norm of the gradient before clipping to training.max_grad_norm.",
        "Stays within one order of magnitude.",
        "If it grows tenfold or more, lower training.lr. If it is 0, all rewards within each group are equal.",
    ),
    OPTIMIZATION.metric("train/lr", "", "Learning rate."),
    OPTIMIZATION.metric(
        "train/skipped_steps",
        "steps",
        "Steps, since the run was started or resumed, whose weight update was skipped or incomplete because the "
        "loss or the gradient was not finite, or because no token could be trained on.",
        "0.",
        "The messages name the rollouts; in rollouts.jsonl they have dropped = skipped_step. Bound extreme "
        "rewards. If the number keeps growing, lower training.lr.",
    ),
    OPTIMIZATION.metric(
        "train/respawns",
        "",
        "Restarts of a trainer that died, reported with the step in progress, or with the next one if it died "
        "between steps.",
        "Absent.",
        "The messages name the process that died; logs/trainer.log gives the reason.",
    ),
    OPTIMIZATION.metric(
        "train/recovery_s",
        "s",
        "Time from the trainer's death until it has reached the same version again, which includes starting it, "
        "loading the checkpoint and repeating the steps since that checkpoint.",
        "Absent.",
        "If it takes minutes, lower checkpoint.interval, so that fewer steps are repeated.",
    ),
    OPTIMIZATION.metric(
        "train/entropy",
        "nats",
        "Mean entropy of the policy at the trained tokens.",
        "Falls slowly.",
        "If it is near 0 while the reward is low, the policy no longer explores: lower training.lr or raise "
        "sampling.temperature. If it keeps rising, lower training.lr.",
    ),
    OPTIMIZATION.metric(
        "train/teacher_kl",
        "nats",
        "Mean KL divergence from the teacher, computed over the most likely tokens of the teacher, at the positions "
        "for "
        'which the teacher has computed logprobs. Absent with training.distill = "sampled".',
        "Falls.",
        "If it is constant, raise training.lr or training.distill_coef.",
    ),
    OPTIMIZATION.metric(
        "train/value_loss",
        "",
        "Loss of the critic: half the mean squared difference between values and targets, before its optimizer step. "
        "Absent without training.critic.",
        "Falls.",
        "If it grows, lower training.critic_lr.",
    ),
    OPTIMIZATION.metric(
        "train/explained_variance",
        "",
        "Share of the variance of the value targets that the critic's values explain, at the start of the step. Absent "
        "without training.critic, or where all targets are the same.",
        "Rises from 0; 1 is a perfect critic.",
        "If it stays at 0 or below, the values are no better than a constant: raise training.critic_epochs or "
        "training.critic_lr.",
    ),
    OPTIMIZATION.metric(
        "train/reference_kl",
        "nats",
        "Estimated KL divergence to the reference model; 0 without training.kl_coef.",
        "Grows slowly and levels off.",
        "If it grows fast, raise training.kl_coef or lower training.lr.",
    ),
    OPTIMIZATION.metric("train/num_tokens", "tokens", "Number of tokens trained on."),
    OPTIMIZATION.metric("train/num_samples", "sequences", "Number of token sequences trained on."),
    OPTIMIZATION.metric(
        "train/num_dropped_samples",
        "sequences",
        "Number of token sequences that were dropped because they are longer than training.row_tokens.",
        "0.",
        "Raise training.row_tokens.",
    ),
    OPTIMIZATION.metric(
        "train/num_nonfinite_tokens",
        "tokens",
        "Tokens that were excluded because one of their logprobs is not finite.",
        "0.",
        "The model's dtype has too little precision or range, or its weights are damaged: see sync/probe_diff.",
    ),
    OPTIMIZATION.metric(
        "train/padding_fraction",
        "share",
        "Share of the positions in a forward pass that are padding.",
        "Below 0.3.",
        "Raise training.row_tokens, so that rows are packed more tightly.",
    ),
    OPTIMIZATION.metric(
        "train/wait_for_copy_s",
        "s",
        "Time for which the optimizer waited until the weights of the previous version had been copied for publishing.",
        "Near 0.",
    ),
    OPTIMIZATION.metric(
        "train/idle_s",
        "s",
        "Idle time of the trainer's process since the end of the previous step.",
        "Near 0 if generation keeps up.",
        "See time/wait_for_rollouts_s and sync/wait_for_pull_s for the cause.",
    ),
    OFF_POLICY.metric(
        "train/staleness_mean",
        "steps",
        "Mean number of optimizer steps between the weights that sampled a token and the weights that are "
        "trained on it.",
        "At most scheduling.max_staleness.",
        "Lower scheduling.max_staleness, or speed up generation.",
    ),
    OFF_POLICY.metric("train/staleness_max", "steps", "Staleness of the oldest token."),
    OFF_POLICY.metric(
        "train/approx_kl",
        "nats",
        "Estimated KL divergence from the policy that sampled the tokens to the policy being trained.",
        "Below 0.05; about 0 if training is on-policy.",
        "Lower scheduling.max_staleness, training.minibatches or training.lr.",
    ),
    OFF_POLICY.metric(
        "train/ratio_mean",
        "",
        "Mean importance ratio: a token's probability under the policy being trained, divided by the probability with "
        "which it was sampled.",
        "1.",
    ),
    OFF_POLICY.metric(
        "train/ratio_max", "", "Largest importance ratio of a token.", "Below 10; 1 if training is on-policy."
    ),
    OFF_POLICY.metric(
        "train/clip_fraction",
        "share",
        "Share of tokens whose importance ratio the loss clipped.",
        "Below 0.2.",
        "See train/approx_kl.",
    ),
    OFF_POLICY.metric("train/correction_weight_mean", "", "Mean weight of the off-policy correction.", "Near 1."),
    OFF_POLICY.metric("train/correction_weight_max", "", "Largest weight of the off-policy correction."),
    OFF_POLICY.metric(
        "train/correction_masked_fraction",
        "share",
        "Share of tokens masked by the off-policy correction.",
        "Below 0.1.",
        "Widen the bounds in [correction], or reduce staleness.",
    ),
    OFF_POLICY.metric(
        "train/on_policy_logprob_diff_mean",
        "nats",
        "Mean absolute difference between the trainer's logprob of a token and that of the generator that sampled it, "
        "for tokens sampled with the weights that are being trained.",
        "About 1e-6 in float32, 1e-2 in bfloat16.",
        "If it is far above this, trainer and engine compute different functions. Compare their dtypes and "
        "temperatures, and check that the engine uses the published weights (sync/probe_diff).",
    ),
    OFF_POLICY.metric(
        "train/on_policy_logprob_diff_max",
        "nats",
        "Largest such difference; see train/on_policy_logprob_diff_mean.",
    ),
)
