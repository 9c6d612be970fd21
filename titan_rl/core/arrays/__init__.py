"""What there is of each token, packed: lists of it take five times as much memory, and longer for everything.

NumPy is imported by what needs it, when it is called.
"""

from titan_rl.core.arrays.expert_rows import FREE_ROW, ExpertRows, expert_rows, free_rows, joined_rows
from titan_rl.core.arrays.mask_array import MaskArray
from titan_rl.core.arrays.number_array import (
    LARGEST_TOKEN_ID,
    LOGPROBS,
    TOKENS,
    VERSIONS,
    NumberArray,
    array_from_bytes,
    common_length,
    logprob_array,
    token_array,
    version_array,
)

__all__ = [
    "FREE_ROW",
    "LARGEST_TOKEN_ID",
    "LOGPROBS",
    "TOKENS",
    "VERSIONS",
    "ExpertRows",
    "MaskArray",
    "NumberArray",
    "array_from_bytes",
    "common_length",
    "expert_rows",
    "free_rows",
    "joined_rows",
    "logprob_array",
    "token_array",
    "version_array",
]
