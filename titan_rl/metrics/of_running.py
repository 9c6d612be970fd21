"""Metrics of where time goes: steps, slots, the way of the weights, hosts, the server."""

from __future__ import annotations

from titan_rl.metrics.metric import Metric, MetricGroup

SPEED, SCHEDULING = MetricGroup.SPEED, MetricGroup.SCHEDULING
SYNC, HOSTS, SERVER = MetricGroup.SYNC, MetricGroup.HOSTS, MetricGroup.SERVER

SPEED_METRICS = (
    Metric(
        "throughput/tokens_per_s",
        "tokens/s",
        "Tokens that steps take per second: of completions, or in titan-rl sft of whole conversations.",
        SPEED,
        "Steady.",
        "Falling: see which of time/wait_for_rollouts_s and the rest of time/step_s has grown.",
    ),
    Metric(
        "time/step_s",
        "s",
        "From one step to the next, without validations and the copies of checkpoints between them.",
        SPEED,
        "Steady.",
    ),
    Metric(
        "time/wait_for_rollouts_s",
        "s",
        "Of that, waiting until a batch of groups had finished.",
        SPEED,
        "Near 0 where training takes longer than generation; otherwise the rest of a step's time.",
        "Most of the step: generation or environments hold it up. A larger scheduling.max_staleness, more generators, "
        "or a faster environment (rollout/metrics/own_seconds).",
    ),
    Metric("time/samples_s", "s", "Of a step, making training samples of the batch.", SPEED, "Near 0."),
    Metric(
        "time/train_s",
        "s",
        "Of a step, from handing the samples to the trainer until it has the next version.",
        SPEED,
        "Most of the step, where nothing but training holds it up.",
    ),
    Metric("time/validation_s", "s", "Validation since the step before.", SPEED),
    Metric(
        "time/checkpoint_s",
        "s",
        "Copying a checkpoint since the step before, and waiting until the one before is written.",
        SPEED,
        "0 for most steps.",
        "The disk is slow: a larger checkpoint.interval.",
    ),
    Metric(
        "time/wait_for_tokens_s",
        "s",
        "In titan-rl sft: waiting until a step's demonstrations were tokens.",
        SPEED,
        "Near 0.",
        "The renderer is slower than the trainer.",
    ),
)

SCHEDULING_METRICS = (
    Metric("scheduling/slot_s/pending", "s", "Time of all slots, waiting for rollouts in flight to end.", SCHEDULING),
    Metric(
        "scheduling/slot_s/running",
        "s",
        "Time of all slots in which their groups were generated, played and scored.",
        SCHEDULING,
        "Most of all slots' time.",
    ),
    Metric(
        "scheduling/slot_s/suspended",
        "s",
        "Time of all slots, waiting with their tokens for a later batch.",
        SCHEDULING,
    ),
    Metric(
        "scheduling/slot_s/done",
        "s",
        "Time of all slots, waiting finished for their batch.",
        SCHEDULING,
        "Small.",
        "Most of it: training holds up generation, or one slow group holds up a batch "
        "(scheduling.window, scheduling.oversample).",
    ),
    Metric("scheduling/slot_s/training", "s", "Time of all slots, in a batch until its version is pulled.", SCHEDULING),
    Metric("scheduling/age/<age>", "groups", "Groups whose oldest token is so many versions old.", SCHEDULING),
    Metric("scheduling/age_mean", "steps", "Mean age of a group's oldest token, in versions.", SCHEDULING),
    Metric(
        "scheduling/dropped/<reason>",
        "groups",
        "Groups that were not trained on, by the reason: failed, reward_failed, aborted, too_few_siblings, too_old, "
        "too_stale, too_long, or what a filter gives.",
        SCHEDULING,
        "None, but for filters.",
        "failed and reward_failed: your code raises, see the messages. too_old, too_stale: generation is slower than "
        "training.",
    ),
    Metric(
        "scheduling/wasted_tokens",
        "tokens",
        "Completion tokens of dropped groups.",
        SCHEDULING,
        "A small part of train/num_tokens.",
        "A filter that drops most groups: samples of the right difficulty, or a curriculum.",
    ),
    Metric(
        "scheduling/accepted_tokens_mean",
        "tokens",
        "Completion tokens of a rollout, of those trained on, over the run.",
        SCHEDULING,
        "As scheduling/generated_tokens_mean.",
        "Less than that: the schedule prefers short answers; scheduling.window = 1 trains in data order.",
    ),
    Metric(
        "scheduling/generated_tokens_mean",
        "tokens",
        "Completion tokens of a rollout, of all that finished, over the run.",
        SCHEDULING,
    ),
)

SYNC_METRICS = (
    Metric("sync/publish_s", "s", "From the copy of the weights until all of a version can be read.", SYNC),
    Metric("sync/pull_s", "s", "Until every generator has loaded and verified it.", SYNC),
    Metric("sync/load_s", "s", "Loading it, of the slowest generator.", SYNC),
    Metric(
        "sync/readback_s",
        "s",
        "Reading the weights back and comparing their checksums with the trainer's, of the slowest generator.",
        SYNC,
        "A quarter of sync/load_s at most.",
    ),
    Metric("sync/verify_s", "s", "Verifying it, reading back and probes together, of the slowest generator.", SYNC),
    Metric(
        "sync/unverified_share",
        "share",
        "Part of the weights that a generator may not have loaded: they were not read back from its engine, and the "
        "probes cannot tell this version from the one before. The largest of all generators.",
        SYNC,
        "0 from the first version on, with the engines of the library.",
        "An engine without held_weights(), a layer that cannot be read back (the generator's log names it), or a "
        "transport whose manifests list no tensors: add what is missing, or more statedict.num_probes.",
    ),
    Metric(
        "sync/stall_s",
        "s",
        "Time in which an engine did not step for a pull, of the slowest generator.",
        SYNC,
        "A small part of time/step_s.",
        'Fewer statedict.num_probes; statedict.transport = "cuda_ipc" on GPUs of one host.',
    ),
    Metric(
        "sync/received_bytes",
        "bytes",
        'What a host was sent of it, of the one that was sent most, with statedict.transport = "tcp" on several hosts.',
        SYNC,
    ),
    Metric(
        "sync/received_share",
        "share",
        "The same as a share of all its bytes: 1 where it was sent whole.",
        SYNC,
        "Far below 1 but for every statedict.anchor_interval-th version, in bfloat16.",
        "In float32 nearly every number changes. In bfloat16 a large learning rate, or a host that joined just then.",
    ),
    Metric("sync/begin_publish_s", "s", "How long the trainer took to fix a version.", SYNC, "Near 0."),
    Metric(
        "sync/wait_for_pull_s",
        "s",
        "How long a step waited for the slowest pull of the version before.",
        SYNC,
        "Near 0.",
        "The step is shorter than a pull: see sync/pull_s.",
    ),
    Metric(
        "sync/probe_diff",
        "nats",
        "Mean difference between trainer and generator of a probe's logprobs, of the worst probe.",
        SYNC,
        "Below statedict.tolerance; a pull above it fails.",
        "The engine computes with other weights than it was given.",
    ),
    Metric(
        "sync/probe_margin",
        "",
        "Part of a step's change in the probes' logprobs that rounding can hide, of the worst generator.",
        SYNC,
        "Below 0.5, from where on a pull fails that loads nothing.",
        "A step changes little against rounding: more statedict.num_probes; above 0.5 a swap is compared with versions "
        "further back alone.",
    ),
    Metric(
        "sync/probe_missed",
        "",
        "Part of a step's change in the probes' logprobs that a generator does not show, or shows too much of.",
        SYNC,
        "Below sync/probe_margin; a pull above it fails where that is below 0.5.",
        "The engine did not load all weights that it was given.",
    ),
)

HOST_METRICS = (
    Metric("hosts/present", "hosts", "Hosts of the run, where it has or had several.", HOSTS, "Steady."),
    Metric("hosts/draining", "hosts", "Of these, hosts that are to go once their requests have ended or moved.", HOSTS),
    Metric("hosts/joined", "hosts", "Hosts that joined since the step before.", HOSTS),
    Metric("hosts/left", "hosts", "Hosts that were drained and have left since then.", HOSTS),
    Metric(
        "hosts/lost",
        "hosts",
        "Hosts that fell silent since then.",
        HOSTS,
        "0.",
        "`titan-rl hosts RUN list` has the reason of each; logs/controller.log when.",
    ),
    Metric("hosts/<host>/generators", "generators", "Generators on a host.", HOSTS),
    Metric(
        "hosts/<host>/silence_s",
        "s",
        "The longest time for which nothing was heard of a host since the step before.",
        HOSTS,
        "Below 1: four signs of life a second.",
        "Near hosts.silence_s: the network, or a machine without a free core. A larger hosts.silence_s.",
    ),
)

SERVER_METRICS = (
    Metric("titan_rl_responses", "responses", "Responses of a server, by path and status.", SERVER),
    Metric("titan_rl_completions_running", "completions", "Completions under way.", SERVER),
    Metric("titan_rl_prompt_tokens", "tokens", "Prompt tokens.", SERVER),
    Metric("titan_rl_completion_tokens", "tokens", "Sampled tokens.", SERVER),
    Metric("titan_rl_clients_gone", "requests", "Requests whose client went away before the answer.", SERVER, "Few."),
    Metric("titan_rl_time_to_first_token_seconds", "s", "From the request to the first token of a completion.", SERVER),
    Metric("titan_rl_completion_seconds", "s", "From the request to the last token of a completion.", SERVER),
)
