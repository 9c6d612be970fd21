"""Metrics of speed, scheduling, weight sync, engines, hosts and the server."""

from __future__ import annotations

from titan_rl.metrics.metric import Metric, MetricGroup

SPEED, SCHEDULING, SYNC = MetricGroup.SPEED, MetricGroup.SCHEDULING, MetricGroup.SYNC
ENGINES, HOSTS, SERVER = MetricGroup.ENGINES, MetricGroup.HOSTS, MetricGroup.SERVER

SPEED_METRICS = (
    Metric(
        "throughput/tokens_per_s",
        "tokens/s",
        "Tokens trained per second: of completions, or in titan-rl sft of whole conversations.",
        SPEED,
        "Steady.",
        "Falling: compare the growth of time/wait_for_rollouts_s and of the rest of time/step_s.",
    ),
    Metric(
        "time/step_s",
        "s",
        "Time from one step to the next, without validations and checkpoints between them.",
        SPEED,
        "Steady.",
    ),
    Metric(
        "time/wait_for_rollouts_s",
        "s",
        "Part of time/step_s spent waiting for a batch of groups to finish.",
        SPEED,
        "Near 0 if training takes longer than generation; otherwise the rest of a step's time.",
        "Most of the step: generation or environments are the bottleneck. A larger scheduling.max_staleness, "
        "more generators, or a faster environment (rollout/metrics/own_seconds).",
    ),
    Metric(
        "time/samples_s", "s", "Part of time/step_s spent building training samples from the batch.", SPEED, "Near 0."
    ),
    Metric(
        "time/train_s",
        "s",
        "Part of time/step_s from handing the samples to the trainer until it has the next version.",
        SPEED,
        "Most of the step, if only training limits the run.",
    ),
    Metric("time/validation_s", "s", "Time of validations since the step before.", SPEED),
    Metric(
        "time/checkpoint_s",
        "s",
        "Time since the step before for copying a checkpoint, and for waiting until the previous one is written.",
        SPEED,
        "0 for most steps.",
        "The disk is slow: a larger checkpoint.interval.",
    ),
    Metric(
        "time/wait_for_tokens_s",
        "s",
        "In titan-rl sft: time in which a step waited for its demonstrations to be tokenized.",
        SPEED,
        "Near 0.",
        "The renderer is slower than the trainer.",
    ),
)

SCHEDULING_METRICS = (
    Metric(
        "scheduling/slot_s/pending",
        "s",
        "Time of all slots spent waiting for a free place among the rollouts in flight.",
        SCHEDULING,
    ),
    Metric(
        "scheduling/slot_s/running",
        "s",
        "Time of all slots spent generating, playing and scoring their groups.",
        SCHEDULING,
        "Most of all slots' time.",
    ),
    Metric(
        "scheduling/slot_s/suspended",
        "s",
        "Time of all slots spent suspended, with the tokens so far, until a later batch.",
        SCHEDULING,
    ),
    Metric(
        "scheduling/slot_s/done",
        "s",
        "Time of all slots spent finished, waiting for their batch.",
        SCHEDULING,
        "Small.",
        "Most of it: training is the bottleneck, or one slow group delays a batch (scheduling.window, "
        "scheduling.oversample).",
    ),
    Metric(
        "scheduling/slot_s/training",
        "s",
        "Time of all slots spent in a batch, until its version is pulled.",
        SCHEDULING,
    ),
    Metric("scheduling/age/<age>", "groups", "Groups whose oldest token has this age in versions.", SCHEDULING),
    Metric("scheduling/age_mean", "steps", "Mean age of a group's oldest token, in versions.", SCHEDULING),
    Metric(
        "scheduling/dropped/<reason>",
        "groups",
        "Groups that were not trained on, by reason: failed, reward_failed, aborted, too_few_siblings, "
        "too_old, too_stale, too_long, or the reason that a filter gives.",
        SCHEDULING,
        "None, except for filters.",
        "failed, reward_failed: your code raises exceptions, see the messages. too_old, too_stale: generation is "
        "slower than training.",
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
        "Mean completion tokens of the rollouts trained on, over the run.",
        SCHEDULING,
        "Equal to scheduling/generated_tokens_mean.",
        "Less than that: the schedule prefers short answers; scheduling.window = 1 trains in data order.",
    ),
    Metric(
        "scheduling/generated_tokens_mean",
        "tokens",
        "Mean completion tokens of all finished rollouts, over the run.",
        SCHEDULING,
    ),
)

SYNC_METRICS = (
    Metric("sync/publish_s", "s", "Time from the copy of the weights until the whole version can be read.", SYNC),
    Metric("sync/pull_s", "s", "Time until every generator has loaded and verified a version.", SYNC),
    Metric("sync/load_s", "s", "Time to load a version, of the slowest generator.", SYNC),
    Metric(
        "sync/readback_s",
        "s",
        "Time to read the weights back and to compare their checksums with the trainer's, of the slowest generator.",
        SYNC,
        "At most a quarter of sync/load_s.",
    ),
    Metric(
        "sync/verify_s", "s", "Time to verify a version, by reading back and by probes, of the slowest generator.", SYNC
    ),
    Metric(
        "sync/unverified_share",
        "share",
        "Share of the weights that a generator may not have loaded: they were not read back from its engine, "
        "and the probes cannot tell this version from the one before. The maximum over all generators.",
        SYNC,
        "0 from the first version on, with the engines of the library.",
        "An engine without held_weights(), a layer that cannot be read back (the generator's log names it), or a "
        "transport whose manifests list no tensors: add what is missing, or more statedict.num_probes.",
    ),
    Metric(
        "sync/stall_s",
        "s",
        "Time in which an engine was stopped for a pull, of the slowest generator.",
        SYNC,
        "A small part of time/step_s.",
        'Fewer statedict.num_probes; statedict.transport = "cuda_ipc" on GPUs of one host.',
    ),
    Metric(
        "sync/received_bytes",
        "bytes",
        'Bytes of a version that a host received, maximum over the hosts, with statedict.transport = "tcp" on '
        "several hosts.",
        SYNC,
    ),
    Metric(
        "sync/received_share",
        "share",
        "sync/received_bytes as a share of the whole version: 1 if it was sent whole.",
        SYNC,
        "Far below 1 in bfloat16, except for every statedict.anchor_interval-th version.",
        "In float32 nearly every number changes. In bfloat16: a large learning rate, or a host that has just joined.",
    ),
    Metric("sync/begin_publish_s", "s", "Time that the trainer took to fix a version for publishing.", SYNC, "Near 0."),
    Metric(
        "sync/wait_for_pull_s",
        "s",
        "Time that a step waited for the slowest pull of the version before.",
        SYNC,
        "Near 0.",
        "The step is shorter than a pull: see sync/pull_s.",
    ),
    Metric(
        "sync/probe_diff",
        "nats",
        "Mean difference between trainer and generator in a probe's logprobs, of the worst probe.",
        SYNC,
        "Below statedict.tolerance; a pull above it fails.",
        "The engine computes with other weights than it received.",
    ),
    Metric(
        "sync/probe_margin",
        "",
        "Share of a step's change in the probes' logprobs that rounding can hide, of the worst generator.",
        SYNC,
        "Below 0.5; only then does a pull that loads nothing fail.",
        "A step changes little compared with rounding: more statedict.num_probes; above 0.5 a swap is compared "
        "only with earlier versions.",
    ),
    Metric(
        "sync/probe_missed",
        "",
        "Share of a step's change in the probes' logprobs that a generator does not show, or shows in excess.",
        SYNC,
        "Below sync/probe_margin; a pull above it fails if that is below 0.5.",
        "The engine did not load all the weights that it received.",
    ),
)

HOST_METRICS = (
    Metric("hosts/present", "hosts", "Hosts of the run, if it has or had several.", HOSTS, "Steady."),
    Metric(
        "hosts/draining",
        "hosts",
        "Hosts of the run that are draining: they leave once their requests have ended or moved.",
        HOSTS,
    ),
    Metric("hosts/joined", "hosts", "Hosts that joined since the step before.", HOSTS),
    Metric("hosts/left", "hosts", "Hosts that were drained and left since the step before.", HOSTS),
    Metric(
        "hosts/lost",
        "hosts",
        "Hosts that stopped responding since the step before.",
        HOSTS,
        "0.",
        "`titan-rl hosts RUN list` has the reason of each, logs/controller.log the time.",
    ),
    Metric("hosts/<host>/generators", "generators", "Generators on a host.", HOSTS),
    Metric(
        "hosts/<host>/silence_s",
        "s",
        "Longest time without a heartbeat of a host since the step before.",
        HOSTS,
        "Below 1: there are four heartbeats per second.",
        "Near hosts.silence_s: the network is slow, or the machine has no free core. A larger hosts.silence_s.",
    ),
)

SERVER_METRICS = (
    Metric("titan_rl_responses", "responses", "Responses of a server, by path and status.", SERVER),
    Metric("titan_rl_completions_running", "completions", "Completions in progress.", SERVER),
    Metric("titan_rl_prompt_tokens", "tokens", "Prompt tokens.", SERVER),
    Metric("titan_rl_completion_tokens", "tokens", "Sampled tokens.", SERVER),
    Metric(
        "titan_rl_clients_gone", "requests", "Requests whose client disconnected before the answer.", SERVER, "Few."
    ),
    Metric(
        "titan_rl_time_to_first_token_seconds", "s", "Time from a request to the first token of a completion.", SERVER
    ),
    Metric("titan_rl_completion_seconds", "s", "Time from a request to the last token of a completion.", SERVER),
)

ENGINE_METRICS = (
    Metric("generation/requests_in_flight_max", "requests", "High-water mark of the requests in flight.", ENGINES),
    Metric(
        "generation/moved_requests",
        "requests",
        "Requests that moved to a less loaded generator since the step before, with routing.move_below.",
        ENGINES,
        "Few.",
        "Each is recomputed on the other generator: a smaller routing.move_below.",
    ),
    Metric(
        "completion/queue_s",
        "s",
        "Time from a request until its engine starts it.",
        ENGINES,
        "Near 0.",
        "A larger generation.max_running, more generators, or fewer rollouts in flight.",
    ),
    Metric("completion/time_to_first_token_s", "s", "Time from a request to its first token.", ENGINES),
    Metric("completion/inter_token_s", "s", "Time between two tokens of a completion.", ENGINES),
    Metric(
        "completion/requests_in_flight", "requests", "Requests in flight at the engine when a request arrived.", ENGINES
    ),
    Metric("completion/cached_prompt_tokens", "tokens", "Prompt tokens found in the prefix cache.", ENGINES),
    Metric(
        "completion/interrupted_s",
        "s",
        "Time in which a request waited because of a pause, a suspension or a change of generator, if any.",
        ENGINES,
    ),
    Metric(
        "completion/num_resumes",
        "resumes",
        "Number of times that a request was resent with its tokens so far, if any.",
        ENGINES,
    ),
    Metric("completion/completion_tokens", "tokens", "Tokens that an endpoint reports for its completions.", ENGINES),
    Metric("completion/<metric>", "", "Mean of a metric that your engine reports for its completions.", ENGINES),
    Metric("engine/running_requests_mean", "requests", "Mean number of requests in the batch of one engine.", ENGINES),
    Metric(
        "engine/running_requests_max",
        "requests",
        "High-water mark of the requests in the batch of one engine.",
        ENGINES,
    ),
    Metric(
        "engine/waiting_requests_mean",
        "requests",
        "Mean number of requests that wait to enter the batch of one engine.",
        ENGINES,
        "Near 0.",
        "A larger generation.max_running or generation.kv_cache_gib.",
    ),
    Metric(
        "engine/waiting_requests_max", "requests", "High-water mark of the waiting requests of one engine.", ENGINES
    ),
    Metric(
        "engine/places_mean",
        "requests",
        "Mean number of requests that one engine may run at a time: generation.max_running, or the value that "
        '"auto" chooses.',
        ENGINES,
        "As many as engine/running_requests_mean.",
        "If requests wait: a larger generation.kv_cache_gib.",
    ),
    Metric(
        "engine/places_max",
        "requests",
        "Largest number of requests that one engine was allowed to run at a time.",
        ENGINES,
    ),
    Metric("engine/kv_cache_usage_mean", "share", "Mean share of the KV cache in use.", ENGINES, "Below 0.9."),
    Metric("engine/kv_cache_usage_max", "share", "High-water mark of the share of the KV cache in use.", ENGINES),
    Metric(
        "engine/preemptions",
        "requests",
        "Requests that were preempted: they lost their part of the KV cache, and are recomputed.",
        ENGINES,
        "0.",
        'generation.max_running = "auto", a smaller one, or a larger generation.kv_cache_gib.',
    ),
    Metric("engine/prefix_cache_queries", "tokens", "Prompt tokens that were looked up in the prefix cache.", ENGINES),
    Metric(
        "engine/prefix_cache_hits",
        "tokens",
        "Prompt tokens found in the prefix cache.",
        ENGINES,
        "Most, if rollouts have several turns or long prompts.",
        'routing.strategy = "group_affinity".',
    ),
    Metric(
        "engine/prefix_cache_hit_share",
        "share",
        "Share of the prompt tokens that was found in the prefix cache.",
        ENGINES,
    ),
    Metric("engine/drafts", "drafts", "Number of speculative drafts.", ENGINES),
    Metric("engine/draft_tokens", "tokens", "Draft tokens, which the policy checks.", ENGINES),
    Metric("engine/accepted_tokens", "tokens", "Draft tokens that the policy accepted.", ENGINES),
    Metric(
        "engine/accepted_share",
        "share",
        "Share of the draft tokens that the policy accepted.",
        ENGINES,
        "Above 0.3.",
        "A smaller generation.speculative.num_speculative_tokens, or another method: rejected tokens are "
        "wasted computation.",
    ),
    Metric(
        "engine/accepted_per_draft",
        "tokens",
        "Tokens that a forward pass with a draft yields for a request, in addition to the one that every pass yields.",
        ENGINES,
        "Steady; above 0.5.",
        "Falling in a run with a draft model: training moves the policy away from it.",
    ),
    Metric("engine/busy_s", "s", "Time of all engines spent generating or pulling weights.", ENGINES),
    Metric("engine/idle_s", "s", "Time of all engines spent without a request, or paused.", ENGINES),
    Metric(
        "engine/idle_share",
        "",
        "Share of the time of all engines in which they were idle.",
        ENGINES,
        "Near 0 with scheduling.max_staleness of 1 or more.",
        "The engines wait for training, environments or rewards: see the timeline.",
    ),
    Metric("engine/<gauge>_mean", "", "Mean of a gauge of your engine, over its steps.", ENGINES),
    Metric("engine/<gauge>_max", "", "High-water mark of a gauge of your engine.", ENGINES),
    Metric("engine/<gauge>", "", "Increase of a counter of your engine.", ENGINES),
)
