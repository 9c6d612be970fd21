"""Metrics of speed, scheduling, weight sync, engines, hosts and the server."""

from __future__ import annotations

from titan_rl.metrics.metric import MetricGroup

SPEED, SCHEDULING, SYNC = MetricGroup.SPEED, MetricGroup.SCHEDULING, MetricGroup.SYNC
ENGINES, HOSTS, SERVER = MetricGroup.ENGINES, MetricGroup.HOSTS, MetricGroup.SERVER

SPEED_METRICS = (
    SPEED.metric(
        "throughput/tokens_per_s",
        "tokens/s",
        "Tokens trained per second: completion tokens or, in titan-rl sft, tokens of whole conversations.",
        "Steady.",
        "If it falls, compare time/wait_for_rollouts_s with the rest of time/step_s, and see which of them grows.",
    ),
    SPEED.metric(
        "time/step_s",
        "s",
        "Time from the end of one step to the end of the next, excluding validation and checkpoints.",
        "Steady.",
    ),
    SPEED.metric(
        "time/wait_for_rollouts_s",
        "s",
        "Part of time/step_s spent waiting for the groups of a batch to finish.",
        "Near 0 if training takes longer than generation; otherwise about time/step_s minus time/train_s.",
        "If it is most of the step, generation or environments are the bottleneck: raise "
        "scheduling.max_staleness, add generators, or speed up the environment (rollout/metrics/env_seconds).",
    ),
    SPEED.metric(
        "time/samples_s", "s", "Part of time/step_s spent converting the batch to token sequences.", "Near 0."
    ),
    SPEED.metric(
        "time/train_s",
        "s",
        "Part of time/step_s from the submission of the token sequences to the trainer until it has computed "
        "the next version.",
        "Most of the step if training is the bottleneck.",
    ),
    SPEED.metric("time/validation_s", "s", "Time spent on validation since the previous step."),
    SPEED.metric(
        "time/checkpoint_s",
        "s",
        "Time since the previous step spent copying the state for a checkpoint, and waiting until the previous "
        "checkpoint is written.",
        "0 for most steps.",
        "If it is often above 0, the disk is slow: raise checkpoint.interval or checkpoint.interval_s.",
    ),
    SPEED.metric(
        "time/wait_for_tokens_s",
        "s",
        "Time that a step waited for its demonstrations to be tokenized (titan-rl sft only).",
        "Near 0.",
        "The renderer is slower than the trainer.",
    ),
    SPEED.metric(
        "processor/available_s",
        "core s",
        "Time of all processor cores of the run's hosts since the previous step: their number times the time passed. "
        "Each process reports its processor time once a second, so that of one short step is approximate.",
    ),
    SPEED.metric(
        "processor/engine_steps_s",
        "core s",
        "Part of processor/generators_s spent in engine steps.",
        "With processor/trainer_steps_s, most of processor/available_s, if neither computes on GPUs.",
        "See the waterfall on the page of titan-rl view.",
    ),
    SPEED.metric(
        "processor/trainer_steps_s",
        "core s",
        "Part of processor/trainer_s spent in loss, forward, backward and optimizer.",
    ),
    SPEED.metric("processor/generators_s", "core s", "Processor time of the generators."),
    SPEED.metric("processor/trainer_s", "core s", "Processor time of the trainer's ranks."),
    SPEED.metric("processor/rollout_workers_s", "core s", "Processor time of the rollout workers."),
    SPEED.metric(
        "processor/controller_s",
        "core s",
        "Processor time of the controller, and of programs that it has started and that have ended.",
    ),
)

SCHEDULING_METRICS = (
    SCHEDULING.metric(
        "scheduling/slot_s/pending",
        "s",
        "Total time for which groups with a slot waited until their rollouts fitted into "
        "scheduling.max_running_rollouts.",
    ),
    SCHEDULING.metric(
        "scheduling/slot_s/running",
        "s",
        "Total time for which groups with a slot were running: generation, environments and rewards.",
        "Most of the slots' total time.",
    ),
    SCHEDULING.metric(
        "scheduling/slot_s/suspended",
        "s",
        "Total time for which groups with a slot were suspended. They keep their tokens, and continue in a later step.",
    ),
    SCHEDULING.metric(
        "scheduling/slot_s/done",
        "s",
        "Total time for which finished groups with a slot waited for their batch.",
        "A small part of the slots' total time.",
        "If it is most of the time, training is the bottleneck, or one slow group delays a batch "
        "(scheduling.window, scheduling.oversample).",
    ),
    SCHEDULING.metric(
        "scheduling/slot_s/training",
        "s",
        "Total time for which groups with a slot were in a training batch, until the generators had loaded the version "
        "that was trained on it.",
    ),
    SCHEDULING.metric(
        "scheduling/age/<age>",
        "groups",
        "Groups in the training batch of this age. The age of a group is the number of steps between the weights that "
        "sampled its oldest token and those that are trained on it.",
    ),
    SCHEDULING.metric("scheduling/age_mean", "steps", "Mean age of the groups in the training batch."),
    SCHEDULING.metric(
        "scheduling/dropped/<reason>",
        "groups",
        "Groups that were dropped, by reason: failed, reward_failed, aborted, too_few_siblings, too_old (still "
        "running, and started too many versions ago: scheduling.tail), too_stale (finished, but no token is young "
        "enough to be trained on: scheduling.max_token_age), or the reason given by a filter, such as too_long.",
        "0, except for filters.",
        "failed, reward_failed: your code raises exceptions; see the messages. too_old, too_stale: generation is "
        "slower than training.",
    ),
    SCHEDULING.metric(
        "scheduling/wasted_tokens",
        "tokens",
        "Completion tokens of dropped groups.",
        "A small fraction of train/num_tokens.",
        "If a filter drops most groups, use samples of suitable difficulty, or a curriculum.",
    ),
    SCHEDULING.metric(
        "scheduling/accepted_tokens_mean",
        "tokens",
        "Mean number of completion tokens of the rollouts trained on, over the whole run.",
        "Equal to scheduling/generated_tokens_mean.",
        "If it is lower, long answers are dropped or overtaken more often than short ones. To prevent this, set "
        'scheduling.tail = "carry_over" and scheduling.window = 1 (data order).',
    ),
    SCHEDULING.metric(
        "scheduling/generated_tokens_mean",
        "tokens",
        "Mean number of completion tokens of all finished rollouts, over the whole run.",
    ),
)

SYNC_METRICS = (
    SYNC.metric(
        "sync/publish_s",
        "s",
        "Time from the start of copying the weights until the whole version can be read by the generators.",
    ),
    SYNC.metric(
        "sync/pull_s",
        "s",
        "Time from the moment at which a version can be read until every generator in service has loaded and verified "
        "it.",
    ),
    SYNC.metric("sync/load_s", "s", "Time that the slowest generator took to load a version."),
    SYNC.metric(
        "sync/readback_s",
        "s",
        "Time that the slowest generator took to read its weights back and compare their checksums with the trainer's.",
        "At most a quarter of sync/load_s.",
    ),
    SYNC.metric(
        "sync/verify_s",
        "s",
        "Time that the slowest generator took to verify a version, by reading its weights back and by computing the "
        "logprobs of the probes.",
    ),
    SYNC.metric(
        "sync/unverified_share",
        "share",
        "Share of the weights that could be verified in neither way: they cannot be read back from the engine, and the "
        "probes cannot distinguish this version from the previous one. Maximum over the generators.",
        "0 if all weights can be read back from the engine.",
        "Causes are an engine without held_weights(), a layer that cannot be read back (named in the generator's "
        "log), and a transport whose manifests list no tensors. Fix the cause, or raise statedict.num_probes.",
    ),
    SYNC.metric(
        "sync/stall_s",
        "s",
        "Time for which a generator stopped generating in order to load and verify a version; maximum over the "
        "generators.",
        "A small fraction of time/step_s.",
        'Lower statedict.num_probes, or use statedict.transport = "cuda_ipc" on GPUs of one host.',
    ),
    SYNC.metric(
        "sync/received_bytes",
        "bytes",
        'Bytes that a host received for a version; maximum over the hosts. Only with statedict.transport = "tcp" on '
        "several hosts.",
    ),
    SYNC.metric(
        "sync/received_share",
        "share",
        "sync/received_bytes divided by the size of the version: 1 if it was sent as a whole.",
        "Far below 1 in bfloat16, except for every statedict.anchor_interval-th version.",
        "Normal in float32, where nearly every number changes. Likely causes in bfloat16: a large learning rate, or "
        "a host that has just joined.",
    ),
    SYNC.metric(
        "sync/begin_publish_s",
        "s",
        "Time that the trainer took to prepare a version for publishing, before the copy starts in the background.",
        "Near 0.",
    ),
    SYNC.metric(
        "sync/wait_for_pull_s",
        "s",
        "Time that a step waited for the slowest pull of the previous version.",
        "Near 0.",
        "Steps are shorter than pulls: see sync/pull_s.",
    ),
    SYNC.metric(
        "sync/probe_diff",
        "nats",
        "Mean difference between the trainer's and the generator's logprobs of a probe; maximum over the probes.",
        "Below statedict.tolerance. Above it, the pull fails.",
        "The engine does not compute with the weights that it received.",
    ),
    SYNC.metric(
        "sync/probe_margin",
        "",
        "Precision of the probe check. A new version changes the logprobs of the probes, and this share of the change "
        "could be missing without being noticed, because of rounding; maximum over the generators.",
        "Below 0.5, so that a pull that loads nothing is noticed and fails.",
        "A step changes the logprobs little compared with rounding: raise statedict.num_probes. Above 0.5, the check "
        "compares with an older version instead of the previous one.",
    ),
    SYNC.metric(
        "sync/probe_missed",
        "",
        "Result of the probe check: the share of the change in the probes' logprobs that is missing in a generator, or "
        "exceeds it. 0 if everything was loaded, 1 if nothing was; maximum over the generators.",
        "Below sync/probe_margin. If it is not, and the margin is below 0.5, the pull fails.",
        "The engine did not load all of the weights that it received.",
    ),
)

HOST_METRICS = (
    HOSTS.metric(
        "hosts/present", "hosts", "Number of hosts in the run. Absent if the run has only ever had one.", "Steady."
    ),
    HOSTS.metric(
        "hosts/draining",
        "hosts",
        "Number of hosts that are draining: they leave once their requests have ended or moved to other hosts.",
    ),
    HOSTS.metric("hosts/joined", "hosts", "Number of hosts that joined since the previous step."),
    HOSTS.metric("hosts/left", "hosts", "Number of drained hosts that left since the previous step."),
    HOSTS.metric(
        "hosts/lost",
        "hosts",
        "Number of hosts that stopped responding since the previous step.",
        "0.",
        "`titan-rl hosts RUN list` shows the reason for each host, and logs/controller.log the time.",
    ),
    HOSTS.metric("hosts/<host>/generators", "generators", "Generators on a host."),
    HOSTS.metric(
        "hosts/<host>/silence_s",
        "s",
        "Longest time between two heartbeats of a host since the previous step.",
        "Below 1: a host sends four heartbeats per second.",
        "If it approaches hosts.silence_s, the network is slow or the machine has no free core: raise hosts.silence_s.",
    ),
)

SERVER_METRICS = (
    SERVER.metric("titan_rl_responses", "responses", "Number of responses of the server, by path and status."),
    SERVER.metric("titan_rl_completions_running", "completions", "Number of completions in progress."),
    SERVER.metric("titan_rl_prompt_tokens", "tokens", "Number of prompt tokens."),
    SERVER.metric("titan_rl_completion_tokens", "tokens", "Number of sampled tokens."),
    SERVER.metric(
        "titan_rl_clients_gone",
        "requests",
        "Number of requests whose client disconnected before the response was complete.",
        "Few.",
    ),
    SERVER.metric(
        "titan_rl_time_to_first_token_seconds", "s", "Time from a request to the first token of a completion."
    ),
    SERVER.metric("titan_rl_completion_seconds", "s", "Time from a request to the last token of a completion."),
)

ENGINE_METRICS = (
    ENGINES.metric("generation/requests_in_flight_max", "requests", "Largest number of requests in flight."),
    ENGINES.metric(
        "generation/moved_requests",
        "requests",
        "Number of requests that moved to a less loaded generator since the previous step (routing.move_below).",
        "Few.",
        "Each moved request is recomputed on the other generator: lower routing.move_below.",
    ),
    ENGINES.metric(
        "completion/queue_s",
        "s",
        "Mean time that a request waits before its engine starts it.",
        "Near 0.",
        "Raise generation.max_running, add generators, or allow fewer rollouts in flight.",
    ),
    ENGINES.metric("completion/time_to_first_token_s", "s", "Mean time from a request to its first token."),
    ENGINES.metric("completion/inter_token_s", "s", "Mean time between two tokens of a completion."),
    ENGINES.metric(
        "completion/requests_in_flight",
        "requests",
        "Mean number of requests in flight at the engine when a request arrives.",
    ),
    ENGINES.metric(
        "completion/cached_prompt_tokens",
        "tokens",
        "Mean number of prompt tokens of a request that were found in the prefix cache.",
    ),
    ENGINES.metric(
        "completion/interrupted_s",
        "s",
        "Mean time that an interrupted request waited because of a pause, a suspension or a change of generator. "
        "Absent without interruptions.",
    ),
    ENGINES.metric(
        "completion/num_resumes",
        "resumes",
        "Mean number of times that an interrupted request was sent again with its tokens so far, over the requests to "
        "which this happened. Absent if there are none.",
    ),
    ENGINES.metric(
        "completion/completion_tokens",
        "tokens",
        "Mean number of tokens of a completion from an external chat API (titan-rl eval), as reported by that API.",
    ),
    ENGINES.metric("completion/<metric>", "", "Mean of a metric that your engine reports for its completions."),
    ENGINES.metric("engine/running_requests_mean", "requests", "Mean number of requests in the batch of one engine."),
    ENGINES.metric("engine/running_requests_max", "requests", "Largest number of requests in the batch of one engine."),
    ENGINES.metric(
        "engine/waiting_requests_mean",
        "requests",
        "Mean number of requests waiting to enter the batch of one engine.",
        "Near 0.",
        "Raise generation.max_running or generation.kv_cache_gib.",
    ),
    ENGINES.metric(
        "engine/waiting_requests_max",
        "requests",
        "Largest number of requests waiting to enter the batch of one engine.",
    ),
    ENGINES.metric(
        "engine/places_mean",
        "requests",
        "Mean number of places of one engine, where a place is room for one running request: generation.max_running, "
        "or "
        'the number chosen by "auto".',
        "Near engine/running_requests_mean, which means that the engine is full.",
        "If requests wait, raise generation.kv_cache_gib.",
    ),
    ENGINES.metric("engine/places_max", "requests", "Largest number of places of one engine; see engine/places_mean."),
    ENGINES.metric("engine/kv_cache_usage_mean", "share", "Mean share of the KV cache in use.", "Below 0.9."),
    ENGINES.metric("engine/kv_cache_usage_max", "share", "Largest share of the KV cache in use."),
    ENGINES.metric(
        "engine/preemptions",
        "requests",
        "Number of requests that were preempted: they lost their KV cache and are recomputed.",
        "0.",
        'Set generation.max_running = "auto", lower it, or raise generation.kv_cache_gib.',
    ),
    ENGINES.metric("engine/prefix_cache_queries", "tokens", "Number of prompt tokens looked up in the prefix cache."),
    ENGINES.metric(
        "engine/prefix_cache_hits",
        "tokens",
        "Number of prompt tokens found in the prefix cache.",
        "Most of engine/prefix_cache_queries, if rollouts have several turns or long prompts.",
        'Set routing.strategy = "group_affinity".',
    ),
    ENGINES.metric("engine/prefix_cache_hit_share", "share", "Share of prompt tokens found in the prefix cache."),
    ENGINES.metric("engine/drafts", "drafts", "Number of speculative drafts."),
    ENGINES.metric("engine/draft_tokens", "tokens", "Number of draft tokens, which the policy verifies."),
    ENGINES.metric("engine/accepted_tokens", "tokens", "Number of draft tokens that the policy accepted."),
    ENGINES.metric(
        "engine/accepted_share",
        "share",
        "Share of draft tokens that the policy accepted.",
        "Above 0.3.",
        "Lower generation.speculative.num_speculative_tokens, or use another method: rejected tokens are wasted "
        "computation.",
    ),
    ENGINES.metric(
        "engine/accepted_per_draft",
        "tokens",
        "Mean number of draft tokens accepted per draft. A forward pass yields these tokens and one more.",
        "Steady; above 0.5.",
        "If it falls in a run with a draft model, training is moving the policy away from the draft model.",
    ),
    ENGINES.metric("engine/busy_s", "s", "Total time that engines spent generating or pulling weights."),
    ENGINES.metric("engine/idle_s", "s", "Total time that engines spent paused or without requests."),
    ENGINES.metric(
        "engine/idle_share",
        "share",
        "Share of the engines' total time in which they were idle.",
        "Near 0 with scheduling.max_staleness of 1 or more.",
        "The engines wait for training, environments or rewards: see the timeline.",
    ),
    ENGINES.metric("engine/<gauge>_mean", "", "Mean of a gauge that your engine reports, over the engine's steps."),
    ENGINES.metric("engine/<gauge>_max", "", "Largest value of a gauge that your engine reports."),
    ENGINES.metric(
        "engine/<counter>",
        "",
        "Increase of a counter that your engine reports: a gauge named <counter>_total, which never falls.",
    ),
)
