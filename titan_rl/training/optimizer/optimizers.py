"""The library's optimizers, and `Optimizers`, which steps all optimizers of one model.

A function builds an optimizer from the named parameters of the model and an `OptimizerSpec`. With several ranks the
parameters are DTensors, and torch's optimizers update each rank's part.

`CompactAdam` is Adam with moments that take few bytes or are in the host's memory. It can also train bfloat16 weights.
Numbers are stored in few bits with stochastic rounding: up or down with probabilities that make the mean exact. With
rounding to nearest, an average that moves by less than half a unit in each step would never change, nor would a
bfloat16 weight at a small learning rate. The random bits are determined by the step and the position of the numbers, so
a run that is resumed on the same number of ranks gets the same bits.

8-bit moments are logarithms, in steps of an eighth of a factor of two, relative to the largest of their row. The first
moment has a sign and spans a factor of 2^15.75. The second, whose root is a divisor, spans 2^31.75 and is never rounded
down to 0.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim import Optimizer

from titan_rl.core.errors import ConfigError
from titan_rl.training.choices import StateDType
from titan_rl.training.device import local_device  # before torchtitan
from titan_rl.training.optimizer.registry import NamedParameters, OptimizerSpec, find_optimizer
from titan_rl.training.parallel import by_mesh, local, local_slice

# isort: split
from torchtitan.components.checkpointer.utils import canonical_fqn

PER_OCTAVE = 8
"""Number of 8-bit codes for a factor of two."""
LAST_SIGNED, LAST_SQUARE = 126, 254
"""Last codes of signed and of squared numbers: their smallest magnitude is 2^(-last / PER_OCTAVE) of the row's
largest."""
ZERO_SQUARE = 255
SMALLEST = 1e-38


class CompactAdam(Optimizer):
    """Adam, or with `decoupled` AdamW. It updates one parameter at a time, so that only one is in float32.

    Args:
        state_dtype: Dtype of the moments. With "int8", the moments of vectors, such as the weights of norms, are
            float32.
        offload: Whether to keep the moments in the host's memory.
        device: Device of the computation. Parameters on another device are moved there and back, one at a time. By
            default, the device of each parameter.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        decoupled: bool,
        state_dtype: StateDType = "float32",
        offload: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._decoupled = decoupled
        self._state_dtype: StateDType = state_dtype
        self._offload = offload
        self._device = device

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        index = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, index)
                index += 1

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load groups and moments unchanged. torch's own method would convert the moments to the parameters' dtype."""
        super().load_state_dict({**state_dict, "state": {}})
        ids = [each for group in state_dict["param_groups"] for each in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for each, parameter in zip(ids, parameters, strict=True):
            if (state := state_dict["state"].get(each)) is not None:
                self.state[parameter] = dict(state)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any], index: int) -> None:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            state.update(self._fresh(parameter))
        state["step"] += 1
        step, (beta1, beta2), lr = int(state["step"]), group["betas"], float(group["lr"])
        assert parameter.grad is not None, "only parameters with a gradient are updated"
        stored = local(parameter)
        device = self._device or stored.device
        gradient = local(parameter.grad).to(device, non_blocking=True).float()
        value = stored.to(device, non_blocking=True).float()  # float32 weights on the device are not copied
        if self._decoupled:
            value.mul_(1 - lr * group["weight_decay"])
        elif group["weight_decay"]:
            gradient = gradient.add(value, alpha=group["weight_decay"])
        mean = self._read(state, "exp_avg", value.device).lerp_(gradient, 1 - beta1)
        square = self._read(state, "exp_avg_sq", value.device).mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        value.addcdiv_(mean, root, value=-lr / (1 - beta1**step))
        start = local_slice(parameter).position.start
        generator = torch.Generator(value.device).manual_seed(zlib.crc32(repr((step, index, start)).encode()))
        self._write(state, "exp_avg", mean, generator)
        self._write(state, "exp_avg_sq", square, generator)
        if value.data_ptr() != stored.data_ptr():
            stored.copy_(rounded(value, generator) if stored.dtype is torch.bfloat16 else value)

    def _fresh(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        own = local(parameter)
        device = torch.device("cpu") if self._offload else own.device
        pin = self._offload and (self._device or own.device).type == "cuda"
        state = {"step": torch.zeros(())}
        for name in ("exp_avg", "exp_avg_sq"):
            dtype = getattr(torch, self._state_dtype)
            if self._state_dtype == "int8":
                dtype = torch.float32 if parameter.ndim < 2 else torch.int8 if name == "exp_avg" else torch.uint8
            zeros = torch.zeros(own.shape, dtype=dtype, device=device, pin_memory=pin)
            if dtype is torch.uint8:
                zeros.fill_(ZERO_SQUARE)
            state[name] = _like(parameter, zeros)
            if not dtype.is_floating_point:
                scale = torch.zeros((*own.shape[:-1], 1), device=device, pin_memory=pin)
                state[f"{name}_scale"] = _like(parameter, scale, is_scale=True)
        return state

    def _read(self, state: dict[str, torch.Tensor], name: str, device: torch.device) -> torch.Tensor:
        """Read a moment as float32 on a device, without a copy if it is stored that way."""
        kept = local(state[name]).to(device, non_blocking=True)
        if kept.dtype.is_floating_point:
            return kept.float()
        scale = local(state[f"{name}_scale"]).to(device, non_blocking=True)
        return decode_signed(kept, scale) if kept.dtype is torch.int8 else decode_square(kept, scale)

    def _write(
        self, state: dict[str, torch.Tensor], name: str, moment: torch.Tensor, generator: torch.Generator
    ) -> None:
        kept = local(state[name])
        if kept.dtype.is_floating_point:
            if kept.data_ptr() != moment.data_ptr() or kept.dtype != moment.dtype:
                kept.copy_(rounded(moment, generator) if kept.dtype is torch.bfloat16 else moment)
            return
        scale = _row_max(state[name], moment)
        local(state[f"{name}_scale"]).copy_(scale)
        encode = encode_signed if kept.dtype is torch.int8 else encode_square
        kept.copy_(encode(moment, scale, generator))


def rounded(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Round float32 numbers stochastically to bfloat16. Numbers that bfloat16 represents exactly do not change."""
    noise = torch.randint(0, 1 << 16, value.shape, dtype=torch.int32, device=value.device, generator=generator)
    return (value.contiguous().view(torch.int32) + noise).bitwise_and_(-(1 << 16)).view(torch.float32).bfloat16()


def encode_square(value: torch.Tensor, scale: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Encode numbers in [0, scale], rounded stochastically.  # uint8"""
    ratio = (value / scale.clamp_min(SMALLEST)).clamp_(min=2 ** (-LAST_SQUARE / PER_OCTAVE), max=1.0)
    code = _code(ratio, LAST_SQUARE, generator)
    return code.where(value > 0, ZERO_SQUARE).to(torch.uint8)


def decode_square(code: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.where(code == ZERO_SQUARE, 0.0, scale * torch.exp2(code.float() / -PER_OCTAVE))


def encode_signed(value: torch.Tensor, scale: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Encode numbers in [-scale, scale], rounded stochastically; the code of 0 is 0.  # int8"""
    ratio = (value.abs() / scale.clamp_min(SMALLEST)).clamp_(max=1.0)
    return ((LAST_SIGNED + 1 - _code(ratio, LAST_SIGNED, generator)) * value.sign()).to(torch.int8)


def decode_signed(code: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    magnitude = code.float().abs()
    return torch.exp2((magnitude - LAST_SIGNED - 1) / PER_OCTAVE).where(code != 0, 0.0) * scale * code.sign()


def _code(ratio: torch.Tensor, last: int, generator: torch.Generator) -> torch.Tensor:
    """Number of factors 2^(-1 / PER_OCTAVE) from 1 down to a ratio, rounded stochastically; `last + 1` stands for 0."""
    code = (ratio.log2() * -PER_OCTAVE).floor_().clamp_(min=0, max=last)
    above = torch.exp2(code / -PER_OCTAVE)
    below = torch.exp2((code + 1) / -PER_OCTAVE).where(code < last, 0.0)
    share = (ratio - below) / (above - below)
    uniform = torch.rand(ratio.shape, device=ratio.device, generator=generator)
    return code + (uniform >= share)


def _row_max(kept: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each row, including the parts of rows on other ranks."""
    found = moment.abs().amax(-1, keepdim=True) if moment.shape[-1] else moment.new_zeros((*moment.shape[:-1], 1))
    if isinstance(kept, DTensor):
        for mesh_dim, placement in enumerate(kept.placements):
            if placement.is_shard(kept.ndim - 1):
                dist.all_reduce(found, dist.ReduceOp.MAX, group=kept.device_mesh.get_group(mesh_dim))
    return found


def _like(parameter: torch.Tensor, own: torch.Tensor, *, is_scale: bool = False) -> torch.Tensor:
    """Wrap this rank's part, on any device, as a DTensor that is sharded like the parameter."""
    if not isinstance(parameter, DTensor):
        return own
    shape, placements = parameter.shape, parameter.placements
    if is_scale:
        shape = torch.Size((*shape[:-1], 1))
        placements = tuple(Replicate() if each.is_shard(parameter.ndim - 1) else each for each in placements)
    stride = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(parameter.device_mesh, placements, TensorMeta(shape, stride, own.dtype))
    return DTensor(own, spec, requires_grad=False)  # pyright: ignore[reportCallIssue]


def adamw(parameters: NamedParameters, spec: OptimizerSpec) -> Optimizer:
    """Adam with decoupled weight decay (arXiv:1711.05101)."""
    return _adam(torch.optim.AdamW, parameters, spec)


def adam(parameters: NamedParameters, spec: OptimizerSpec) -> Optimizer:
    """Adam (arXiv:1412.6980). Weight decay is added to the gradient."""
    return _adam(torch.optim.Adam, parameters, spec)


def sgd(parameters: NamedParameters, spec: OptimizerSpec) -> Optimizer:
    """Gradient descent with the momentum `betas[0]`. Weight decay is added to the gradient."""
    return torch.optim.SGD(
        _tensors(parameters),
        lr=spec.lr,
        momentum=spec.betas[0],
        weight_decay=spec.weight_decay,
        foreach=True,  # fused, it does not take DTensors
    )


def muon(parameters: NamedParameters, spec: OptimizerSpec) -> list[Optimizer]:
    """Muon with the momentum `betas[0]` for the matrices of the layers, and AdamW for the rest: embeddings, the head,
    norms, experts (which are stacks of matrices), and the decays of Mamba's states.

    Updates of a matrix are about as large as with AdamW at the same learning rate (arXiv:2502.16982, eq. 4).
    """
    matrices = [
        (name, p)
        for name, p in parameters
        if _is_of_a_layer(name) and p.ndim == 2 and not name.endswith(".A_log")  # A_log multiplies no vector
    ]
    names = {name for name, _ in matrices}
    return [
        torch.optim.Muon(
            _tensors(matrices),
            lr=spec.lr,
            momentum=spec.betas[0],
            weight_decay=spec.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        adamw([(name, p) for name, p in parameters if name not in names], spec),
    ]


def _is_of_a_layer(name: str) -> bool:
    """Whether a parameter belongs to a numbered layer: `layers.3.attention.wq.weight` in torchtitan's models, and
    `causal.model.layers.3.self_attn.q_proj.weight` or `causal.transformer.h.3...` in those of transformers."""
    return any(part.isdecimal() for part in name.split("."))


class Optimizers:
    """The optimizers of one model, stepped together.

    Args:
        name: Name of the optimizer: the value of `training.optimizer`.

    Raises:
        ConfigError: No optimizer has this name, its function does not return optimizers, or a parameter does not belong
            to exactly one of them.
    """

    def __init__(self, model: nn.Module, name: str, spec: OptimizerSpec) -> None:
        named = ((canonical_fqn(fqn), parameter) for fqn, parameter in model.named_parameters())
        parameters = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self.parts = _checked(name, find_optimizer(name)(parameters, spec), parameters)
        for part in self.parts:
            if len(by_mesh(_parameters(part))) > 1:
                cast(Any, part).step = partial(_step_by_mesh, part, part.step)
        self._proportions = [float(group["lr"]) / spec.lr for group in self._groups()]

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()

    def step(self, lr: float) -> None:
        """Update the parameters at the learning rate `lr`, which replaces the spec's."""
        for group, proportion in zip(self._groups(), self._proportions, strict=True):
            group["lr"] = lr * proportion
        for part in self.parts:
            part.step()

    def _groups(self) -> list[dict[str, Any]]:
        """Parameter groups, read each time because loading a checkpoint replaces them."""
        return [group for part in self.parts for group in part.param_groups]


def _adam(
    optimizer: type[torch.optim.Adam | torch.optim.AdamW], parameters: NamedParameters, spec: OptimizerSpec
) -> Optimizer:
    """Build torch's fused optimizer for float32 weights and moments on the device, otherwise `CompactAdam`."""
    tensors = _tensors(parameters)
    options = {name: getattr(spec, name) for name in ("lr", "betas", "eps", "weight_decay")}
    is_plain = spec.state_dtype == "float32" and not spec.offload
    if is_plain and all(each.dtype is torch.float32 for each in tensors):
        return optimizer(tensors, **options, fused=True)
    return CompactAdam(
        tensors,
        **options,
        decoupled=optimizer is torch.optim.AdamW,
        state_dtype=spec.state_dtype,
        offload=spec.offload,
        device=local_device(),
    )


def _step_by_mesh(optimizer: Optimizer, step: Callable[[], Any], closure: None = None) -> None:
    """Step an optimizer whose parameters are on several meshes of ranks, one mesh at a time, because torch's fused
    updates require DTensors of one mesh. Meanwhile, parameters on other meshes have no gradient, so they do not
    change."""
    gradients = {parameter: parameter.grad for parameter in _parameters(optimizer)}
    try:
        for group in by_mesh(gradients):
            for parameter in gradients:
                parameter.grad = None
            for parameter in group:
                parameter.grad = gradients[parameter]
            step()
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _tensors(parameters: NamedParameters) -> list[nn.Parameter]:
    return [parameter for _, parameter in parameters]


def _checked(name: str, made: Any, parameters: NamedParameters) -> list[Optimizer]:
    """Return the optimizers that a function has made, after checking that each parameter belongs to one of them."""
    parts = made if isinstance(made, list | tuple) else [made]
    if (other := next((part for part in parts if not isinstance(part, Optimizer)), None)) is not None:
        raise ConfigError(f"training.optimizer = {name!r} returns {other!r}; it must return torch.optim.Optimizer")
    counts = Counter(id(each) for part in parts for each in _parameters(part))
    for parameter_name, parameter in parameters:
        if (count := counts[id(parameter)]) != 1:
            raise ConfigError(
                f"training.optimizer = {name!r} has {parameter_name} {count} times; it must give every parameter to "
                "one optimizer. To freeze a parameter, put it in a group with lr = 0"
            )
    return list(parts)
