"""Choices that the settings of training offer by name, such as `Attention`. The settings check them, and the parts of a
trainer act on them."""

from typing import Literal

DType = Literal["float32", "bfloat16"]
StateDType = Literal["float32", "bfloat16", "int8"]
Implementation = Literal["auto", "torchtitan", "transformers"]
Attention = Literal["auto", "document", "flex"]
ActivationCheckpointing = Literal["none", "selective", "full"]
LearningRateDecay = Literal["constant", "linear", "cosine"]
Average = Literal["token", "sequence", "constant"]
KLEstimate = Literal["k2", "k3"]
Proximal = Literal["behaviour", "recomputed", "interpolated"]
CorrectionWeight = Literal["none", "token", "sequence"]
Constrained = Literal["masked", "trained", "corrected", "corrected_by_token"]
DistillKind = Literal["sampled", "forward", "reverse"]
CriticKind = Literal["none", "head", "model"]
GAEOver = Literal["token", "turn"]
CorrectionMask = Literal["none", "token", "sequence", "geometric"]
Level = Literal["byte", "word"]
