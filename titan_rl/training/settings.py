"""Settings of the tables [model], [training] and [correction]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from titan_rl.core.errors import ConfigError
from titan_rl.core.settings import FunctionName, PathText, Section, TakesEffect
from titan_rl.rollout.renderer.registry import BY_NAME as RENDERERS
from titan_rl.rollout.rewards.advantages import BY_NAME as ADVANTAGES
from titan_rl.training.algorithms import BY_NAME as ALGORITHMS
from titan_rl.training.algorithms import Algorithm, find_algorithm
from titan_rl.training.choices import (
    ActivationCheckpointing,
    Attention,
    Average,
    Constrained,
    CorrectionMask,
    CorrectionWeight,
    CriticKind,
    DistillKind,
    DType,
    GAEOver,
    Implementation,
    KLEstimate,
    LearningRateDecay,
    Proximal,
    StateDType,
)
from titan_rl.training.losses import BY_NAME as LOSSES
from titan_rl.training.optimizer.registry import BY_NAME as OPTIMIZERS

MADE_BY_SFT = "sft.json"
"""File that `titan-rl sft` writes to each of its model folders. It replaces only folders with this file."""

Offloaded = Literal["optimizer", "parameters", "activations", "reference"]

Beta = Annotated[float, Field(ge=0, lt=1)]


Share = Annotated[float, Field(ge=0, le=1)]

_OF_CRITIC = TakesEffect("training.critic", one_of=("head", "model"))

_CLIPS = TakesEffect("training.loss", none_of=("reinforce", "nll"), fix='set that to "grpo", "gspo" or "cispo"')


class ModelConfig(Section):
    """The policy."""

    path: PathText
    """Hugging Face folder: config.json, safetensors, tokenizer and chat template."""
    dtype: DType = "float32"
    """Dtype of the weights, in the trainer and in the engines."""
    max_context: PositiveInt = 512
    """Maximum number of tokens of prompt and completion together."""
    implementation: Implementation = "auto"
    """Modeling code of the trained policy. auto uses torchtitan's if it supports the family, and otherwise
    transformers'; --dry-run shows which, and why."""
    renderer: Annotated[str, FunctionName(tuple(RENDERERS), ("tokenizer",))] = "auto"
    """Converts messages to tokens and back. auto uses a renderer of the `renderers` package, which parses tool calls,
    if one renders like the model's chat template, and otherwise chat_template, which parses tool calls of known
    formats. A custom renderer, such as `renderers:Qwen3Renderer`, is called with the tokenizer. Earlier reasoning stays
    in the prompt, even if the model's chat template drops it at the next user message; exported folders then have a
    template that keeps it, if possible."""


HEAD_LR = 1e-2
"""Default learning rate of a critic that is a linear function of the policy's hidden states."""

LR = 3e-4
"""Default learning rate if all weights are trained."""

ADAPTER_LR_FACTOR = 10
"""Ratio of the best learning rate of LoRA to that of training all weights. It depends on neither rank nor model
(Schulman et al., "LoRA Without Regret")."""

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers that an adapter may change, by the last part of their Hugging Face names."""

UNSUPPORTED_TARGETS = {
    "lm_head": "vLLM leaves it out of the logprobs of prompts, by which every version is verified",
    "embed_tokens": "an engine reads single rows of an embedding, and vLLM's in-memory adapters have no place for them",
    "experts": "an adapter changes linear layers, and experts are stacks of matrices",
    "gate": "the router of a mixture of experts is not adapted, so that its experts stay those of the base",
}
"""Layers that cannot be adapted, with the reason."""


class AdapterConfig(Section):
    """LoRA: training of a low-rank change of the model's linear layers, with the model itself frozen."""

    rank: NonNegativeInt = 0
    """Rank of the change of each layer; 0 trains all weights instead. Rank 1 is enough for most reinforcement
    learning."""
    alpha: Annotated[PositiveFloat, TakesEffect("training.adapter.rank", none_of=(0,))] = 32.0
    """The change is scaled by alpha / rank. If that is a power of two, generators can be read back exactly."""
    targets: Annotated[tuple[str, ...], TakesEffect("training.adapter.rank", none_of=(0,))] = Field(
        default=(), strict=False
    )
    """Layers to change, by the last part of their Hugging Face names: ["q_proj", "v_proj"]. By default all linear
    layers of attention and MLP."""
    start: Annotated[PathText | None, TakesEffect("training.adapter.rank", none_of=(0,))] = None
    """Folder of an adapter in PEFT's format to start from, with the same rank, alpha and targets. By default a new
    adapter, which does not change the model yet."""

    @property
    def is_on(self) -> bool:
        """Whether an adapter is trained."""
        return self.rank > 0

    @property
    def scale(self) -> float:
        """Factor of the change: alpha / rank."""
        return self.alpha / self.rank

    @model_validator(mode="after")
    def _check_targets(self) -> Self:
        for target in self.targets:
            if (reason := UNSUPPORTED_TARGETS.get(target)) is not None:
                raise ValueError(f"targets has {target!r}, which is not supported: {reason}; leave it out")
            if target not in TARGETS:
                raise ValueError(f"targets has {target!r}; it must name layers among {', '.join(TARGETS)}")
            if self.targets.count(target) > 1:
                raise ValueError(f"targets has {target!r} twice; leave one out")
        return self


_VALIDATED = TakesEffect(
    "validation.is_repeated_in_full",
    one_of=(True,),
    without="without validations of all suites between steps",
    fix="set validation.interval above 0",
)


class StopAtConfig(Section):
    """Early stopping: the end of a run before its last step. Validations of all suites together count, without those
    before training for `reward`. The last checkpoint is saved, and its policy exported, as at the last step."""

    reward: Annotated[float | None, _VALIDATED] = None
    """Held-out reward at which the run ends."""
    patience: Annotated[PositiveInt | None, _VALIDATED] = None
    """Number of validations in a row without a new highest held-out reward after which the run ends."""


class TrainingConfig(Section):
    """The optimizer and the loss."""

    algorithm: Annotated[str, FunctionName(tuple(ALGORITHMS), kind=Algorithm)] = "grpo"
    """Preset of loss, average, clip, advantage and the KL term, each of which can still be set. `titan-rl algorithms`
    prints each with its formula, terms and source; a custom one is "module:value"."""
    steps: PositiveInt = 100
    """Optimizer steps of the run."""
    adapter: AdapterConfig = AdapterConfig()
    lr: PositiveFloat | None = None
    """Peak learning rate. By default 3e-4, and 3e-3 with training.adapter, whose best rate is ten times as large."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly to `lr`."""
    min_lr_ratio: Annotated[float, TakesEffect("training.lr_decay", none_of=("constant",))] = Field(
        default=0.1, ge=0, le=1
    )
    """Learning rate at the last step relative to `lr`; the decay from one to the other is `lr_decay`."""
    lr_decay: LearningRateDecay = "constant"
    """Shape of the learning rate after the warm-up."""
    decay_steps: Annotated[PositiveInt | None, TakesEffect("training.lr_decay", none_of=("constant",))] = None
    """Step at which the learning rate has decayed; later steps keep that rate. By default the last step."""
    optimizer: Annotated[str, FunctionName(tuple(OPTIMIZERS), ("named_parameters", "spec"))] = "adamw"
    """Optimizer of the parameters; muon uses adamw for all parameters that are not matrices."""
    optimizer_dtype: StateDType = "float32"
    """Dtype of the moments of adamw and adam. A parameter takes 8 bytes for them in float32, 4 in bfloat16,
    and 2 in int8."""
    master_dtype: DType = "float32"
    """Dtype of the weights that the optimizer updates, and of their gradients. With bfloat16, which also requires
    model.dtype = "bfloat16", updates are rounded stochastically; a parameter takes 4 bytes for both instead of 8."""
    offload: tuple[Offloaded, ...] = Field(default=(), strict=False)
    """State that is kept in the host's memory. optimizer: the moments of adamw and adam, except those of the parameter
    being updated. parameters: weights, gradients and moments, which are on the GPU one layer at a time in a pass and
    one parameter at a time in the update; for adamw and adam, on several trainer processes. activations: the tensors
    kept for the backward pass; only with activation_checkpointing = "full", which leaves few of them. reference: the
    weights of the reference model of kl_coef, between its passes."""
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), strict=False)  # TOML has lists, no tuples
    """Decay rates of the first and second moment; for sgd and muon the first is the momentum."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay, decoupled in adamw and muon, and added to the gradient in adam and sgd."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients with a larger norm are scaled down to it."""
    minibatches: PositiveInt = 1
    """Optimizer steps that one batch is split into, siblings together."""
    loss: Annotated[str, FunctionName(tuple(LOSSES), ("tokens", "clip"), may_be_class=False)] = "grpo"
    """Loss of the policy."""
    average: Average = "token"
    """Mean of the loss over the tokens of the batch, or over its sequences, or with each sequence's sum divided by
    model.max_context."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL divergence to the reference model, which is then also kept in memory; 0 turns both off. With
    training.adapter it is the policy with its initial adapter, which takes hardly any memory."""
    kl: Annotated[KLEstimate, TakesEffect("training.kl_coef", none_of=(0.0,))] = "k3"
    """Estimate of that KL divergence."""
    reference_interval: Annotated[NonNegativeInt, TakesEffect("training.kl_coef", none_of=(0.0,))] = 0
    """Interval in steps at which the reference model is set to the current policy; 0 keeps the initial model."""
    teacher: Annotated[str, TakesEffect("training.distill_coef", none_of=(0.0,))] = ""
    """Teacher of distillation: a folder of a model, a run or a checkpoint, which is served alongside the run; the URL
    of a server that returns logprobs of prompts, such as titan-rl serve or vLLM; or "self", the policy with the task's
    `teacher_messages` as prompt. Its tokens must be the policy's."""
    distill_coef: NonNegativeFloat = 0.0
    """Weight of distillation from the teacher, in addition to the rewards; 0 turns it off."""
    distill: Annotated[DistillKind, TakesEffect("training.distill_coef", none_of=(0.0,))] = "sampled"
    """Divergence from the teacher: the reverse KL on the sampled token, as an advantage of that token, or the forward
    or reverse KL over the teacher's top tokens, as a term of the loss."""
    distill_top_k: Annotated[
        int, Field(ge=1, le=20), TakesEffect("training.distill", one_of=("forward", "reverse"))
    ] = 8
    """Number of top tokens of the teacher in the divergence. All other tokens count as one."""
    critic: CriticKind = "none"
    """Critic, which gives each token its own advantage: a linear value of the policy's last hidden states (head), from
    which the policy does not learn, or a second model with such a value, which begins as a copy of the policy and is
    trained with it (model)."""
    critic_lr: Annotated[PositiveFloat | None, _OF_CRITIC] = None
    """Peak learning rate of the critic, with the shape of that of the policy. By default 1e-2 for a head, and the
    policy's for a model."""
    critic_epochs: Annotated[PositiveInt, _OF_CRITIC] = 1
    """Optimizer steps of the critic for each minibatch."""
    gae: Annotated[tuple[Share, Share], _OF_CRITIC] = Field(default=(1.0, 0.95), strict=False)
    """[gamma, lambda] of the advantage estimation: discount of an action, and weight of later errors of the values."""
    gae_over: Annotated[GAEOver, _OF_CRITIC] = "token"
    """Actions of the advantage estimation: tokens, or whole turns, whose tokens then have the same advantage."""
    clip: Annotated[tuple[Annotated[float, Field(gt=0, le=1)], PositiveFloat], _CLIPS] = Field(
        default=(0.2, 0.28), strict=False
    )
    """[low, high]: the policy ratio is clipped below 1 - low and above 1 + high."""
    advantage: Annotated[str, FunctionName(tuple(ADVANTAGES), ("rewards",), may_be_class=False)] = "standardized"
    """Function from the rewards of a group to their advantages."""
    share_prompts: bool = True
    """Pass the common prompt of a group's siblings through the model once, instead of once for each."""
    data_parallel: PositiveInt = 1
    """Trainer processes, or groups of them, with their own rows; they share parameters and optimizer (FSDP)."""
    context_parallel: PositiveInt = 1
    """Trainer processes that share the tokens of each row, for rows that are too long for one process; they also share
    parameters and optimizer (FSDP)."""
    tensor_parallel: PositiveInt = 1
    """Trainer processes that compute each token together, each with a part of every matrix."""
    expert_parallel: PositiveInt = 1
    """Trainer processes, of those of data_parallel and context_parallel, that divide the experts of each layer of a
    mixture: tokens are sent to the process of their expert, instead of gathering its weights."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """Activations that are recomputed in the backward pass instead of kept."""
    attention: Attention = "auto"
    """document batches documents of similar length; flex is one kernel over all rows, for GPUs. auto uses flex on CUDA
    if the kernel supports the model's heads, and otherwise document."""
    compile: bool = False
    """Compile transformer blocks with torch, which takes a while in the first steps, and on CPUs needs a C++
    compiler."""
    row_tokens: PositiveInt = 1024
    """Tokens in one packed row; at least `model.max_context`, so that every sample fits."""
    rows_per_micro_batch: PositiveInt = 8
    """Packed rows in one forward and backward pass."""
    stop_at: StopAtConfig = StopAtConfig()
    max_skipped_steps: NonNegativeInt = 3
    """Steps that may be skipped before the run ends, because their loss or gradient is not finite or they have no token
    to train on; counted since the run was started or resumed."""

    @model_validator(mode="wrap")
    @classmethod
    def _with_preset(cls, data: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        """Fill in the settings of the algorithm. `model_fields_set` has only the given ones."""
        if not isinstance(data, Mapping):
            return check(data)
        given = dict(cast("Mapping[str, Any]", data))
        preset = _preset(given)
        made = check({**preset, **given})
        made.__pydantic_fields_set__.difference_update(preset.keys() - given.keys())
        non_default = [name for name, value in preset.items() if value != cls.model_fields[name].default]
        if non_default and all(getattr(made, name) != preset[name] for name in non_default):
            others = " and ".join(f"{name} = {_as_toml(getattr(made, name))}" for name in non_default)
            raise ValueError(
                f'algorithm = "{made.algorithm}" has no effect where {others}; leave algorithm out, or the others'
            )
        return made

    def own_settings(self) -> dict[str, Any]:
        """Return the settings that have neither their defaults nor the values that the algorithm sets. With these
        settings, an equal config can be built, even with another algorithm."""
        usual = {name: field.get_default(call_default_factory=True) for name, field in type(self).model_fields.items()}
        usual |= _preset({"algorithm": self.algorithm}) | {"algorithm": "grpo"}
        dumped = self.model_dump(exclude_defaults=False)
        own = {name: dumped[name] for name in usual if getattr(self, name) != usual[name]}
        return own | ({"adapter": self.adapter.model_dump(exclude_defaults=True)} if "adapter" in own else {})

    def describe_algorithm(self) -> str | None:
        """Describe the settings that the algorithm sets and those that were given; None for the default algorithm.

        Example: `training.algorithm = "gspo" sets loss = "gspo" and average = "sequence"; given: clip = (0.1, 0.1)`
        """
        if self.algorithm == "grpo":
            return None
        preset = _preset({"algorithm": self.algorithm, **{name: getattr(self, name) for name in self.model_fields_set}})
        shown = {name: f"{name} = {_as_toml(getattr(self, name))}" for name in preset}
        sets = [shown[name] for name in shown if name not in self.model_fields_set]
        given = [shown[name] for name in shown if name in self.model_fields_set]
        text = f'training.algorithm = "{self.algorithm}" sets {" and ".join(sets) or "nothing that is not given"}'
        return f"{text}; given: {', '.join(given)}" if given else text

    @property
    def peak_lr(self) -> float:
        """Highest learning rate: `lr`, or its default."""
        return self.lr or self.default_lr

    @property
    def default_lr(self) -> float:
        """Learning rate if none is given."""
        return LR * (ADAPTER_LR_FACTOR if self.adapter.is_on else 1)

    @property
    def critic_peak_lr(self) -> float:
        """Highest learning rate of the critic."""
        return self.critic_lr or (HEAD_LR if self.critic == "head" else self.peak_lr)

    @property
    def offloads_moments(self) -> bool:
        """Whether the moments of the optimizer are kept in the host's memory."""
        return "optimizer" in self.offload or "parameters" in self.offload

    @property
    def prevents_threads(self) -> str:
        """Name of the setting with which a trainer process computes one micro-batch at a time; empty if there is none.
        Such a setting keeps state for one micro-batch, or switches weights or an adapter for it."""
        settings = {
            "training.compile": self.compile,
            "training.activation_checkpointing": self.activation_checkpointing != "none",  # and offloaded activations
            "training.offload": "reference" in self.offload,
            "training.kl_coef with an adapter": self.adapter.is_on and self.kl_coef,
        }
        return next((name for name, is_set in settings.items() if is_set), "")

    @property
    def ranks_a_row(self) -> int:
        """Number of trainer processes with the same rows."""
        return self.context_parallel * self.tensor_parallel

    @property
    def num_ranks(self) -> int:
        """Number of trainer processes."""
        return self.data_parallel * self.ranks_a_row

    @model_validator(mode="after")
    def _check_offload(self) -> Self:
        if twice := {part for part in self.offload if self.offload.count(part) > 1}:
            raise ValueError(f"offload has {', '.join(sorted(twice))} more than once")
        if "activations" in self.offload and self.activation_checkpointing != "full":
            raise ValueError(
                f'offload = ["activations"] with activation_checkpointing = "{self.activation_checkpointing}": moving '
                'all activations takes longer than computing them again; set activation_checkpointing = "full"'
            )
        if "reference" in self.offload and not self.kl_coef:
            raise ValueError(
                'offload = ["reference"] with kl_coef = 0: there is no reference model then; set kl_coef, or leave '
                '"reference" out'
            )
        if "reference" in self.offload and self.adapter.is_on:
            raise ValueError(
                'offload = ["reference"] with training.adapter: the reference model is the policy with its initial '
                'adapter, and has no weights of its own; leave "reference" out'
            )
        if self.reference_interval and self.adapter.is_on:
            raise ValueError(
                f"reference_interval = {self.reference_interval} with training.adapter: the reference model is the "
                "policy with its initial adapter, which does not change; leave reference_interval out"
            )
        if self.reference_interval and "reference" in self.offload:
            raise ValueError(
                f'reference_interval = {self.reference_interval} with offload = ["reference"]: weights kept on the '
                "host do not change; leave one of them out"
            )
        if {"optimizer", "parameters"} <= {*self.offload}:
            raise ValueError(
                'offload = ["optimizer", "parameters"]: moments move with the parameters; leave "optimizer" out'
            )
        return self

    @model_validator(mode="after")
    def _check_moments(self) -> Self:
        if self.optimizer in ("adamw", "adam"):
            return self
        defaults = {"optimizer_dtype": "float32", "master_dtype": "float32"}
        given = [f"{name} = {getattr(self, name)!r}" for name in defaults if getattr(self, name) != defaults[name]]
        given += [f'offload = ["{part}"]' for part in self.offload if part in ("optimizer", "parameters")]
        if given:
            raise ValueError(
                f"{given[0]} with optimizer = {self.optimizer!r}: only adamw and adam support it; set "
                "optimizer to one of them, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_parallelism(self) -> Self:
        if self.tensor_parallel > 1 and (self.context_parallel > 1 or "activations" in self.offload):
            name, fix = 'offload = ["activations"]', 'leave "activations" out'
            if self.context_parallel > 1:
                name, fix = "context_parallel", "set context_parallel = 1"
            raise ValueError(
                f"{name} with tensor_parallel = {self.tensor_parallel}: tokens that ranks compute together are neither "
                f"shared out nor moved to the host; {fix}, or set tensor_parallel = 1 and use data_parallel"
            )
        ranks = self.data_parallel * self.context_parallel
        if self.expert_parallel > 1 and self.tensor_parallel > 1:
            raise ValueError(
                f"expert_parallel = {self.expert_parallel} with tensor_parallel = {self.tensor_parallel}: ranks that "
                "compute each token together have no tokens of their own to send; set tensor_parallel = 1 and use "
                "data_parallel, or set expert_parallel = 1"
            )
        if ranks % self.expert_parallel:
            raise ValueError(
                f"expert_parallel = {self.expert_parallel} does not divide the {ranks} processes of data_parallel = "
                f"{self.data_parallel} x context_parallel = {self.context_parallel}, which share the experts; choose "
                "one that does"
            )
        if self.compile and self.tensor_parallel > 1:
            raise ValueError(
                f"compile = true with tensor_parallel = {self.tensor_parallel}: torch cannot compile a block whose "
                "matrices are split; set compile = false, or use data_parallel"
            )
        return self


def _preset(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the algorithm of a table sets. Its clip is left out if the table gives another loss, and
    its `kl` or `distill` if the table turns that term off.

    Raises:
        ValueError: The algorithm or one of its functions cannot be imported.
    """
    name = given.get("algorithm", "grpo")
    if not isinstance(name, str) or not (name in ALGORITHMS or all(name.partition(":"))):
        return {}  # the field itself is refused
    try:
        preset = find_algorithm(name).settings()
    except ConfigError as error:
        raise ValueError(str(error).removeprefix("training.")) from error
    if given.get("loss", preset["loss"]) != preset["loss"]:
        preset.pop("clip", None)
    if given.get("kl_coef", 1.0) == 0:
        preset.pop("kl", None)
    if given.get("distill_coef", 1.0) == 0:
        preset.pop("distill", None)
    return preset


def _as_toml(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, cast('tuple[object, ...]', value)))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


class CorrectionConfig(Section):
    """Off-policy correction of tokens that older weights, or another engine, sampled. By default only the clip."""

    proximal: Proximal = "behaviour"
    """Policy against which ratios are clipped: the generator's (behaviour), the trainer's at the start of the step
    (recomputed), or an interpolation between the two."""
    weight: CorrectionWeight = "none"
    """Weight of the losses: the proximal divided by the behaviour probability, of each token or of the whole
    sequence."""
    cap: Annotated[PositiveFloat | None, TakesEffect("correction.weight", one_of=("token", "sequence"))] = None
    """Upper limit of the weights. By default no limit."""
    mask: CorrectionMask = "none"
    """Mask tokens or sequences whose ratio of proximal to behaviour probability is outside `bounds`; geometric uses the
    geometric mean over the sequence."""
    bounds: Annotated[tuple[PositiveFloat, PositiveFloat], TakesEffect("correction.mask", none_of=("none",))] = Field(
        default=(0.5, 5.0), strict=False
    )
    """Lowest and highest ratio that `mask` keeps."""
    veto: PositiveFloat | None = None
    """Mask sequences in which the ratio of any token is below this. By default none."""
    constrained: Constrained = "masked"
    """Treatment of tokens sampled under a constraint (forced tool, JSON schema). masked: they are not trained on.
    trained: as if the policy had chosen them freely. corrected, corrected_by_token: weighted by the ratio of
    unconstrained to constrained probability, of the whole rollout or of each token."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.bounds[0] > self.bounds[1]:
            raise ValueError(f"bounds = {list(self.bounds)}: the lowest ratio comes first")
        return self


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Settings by which a trainer trains one policy."""

    training: TrainingConfig
    correction: CorrectionConfig
