"""The models that can be trained, by the `model_type` of their config.json."""

from titan_rl.training.models.architecture import Architecture
from titan_rl.training.models.llama3 import LLAMA3
from titan_rl.training.models.qwen3 import QWEN3, QWEN3_MOE

ARCHITECTURES: dict[str, Architecture] = {"qwen3": QWEN3, "qwen3_moe": QWEN3_MOE, "llama": LLAMA3}

__all__ = ["ARCHITECTURES", "Architecture"]
