"""The tokenizer of a model's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from titan_rl.errors import MissingExtraError, ModelError

_FILES = ("tokenizer.json", "tokenizer.model", "*.tiktoken", "vocab.*", "spiece.model")


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a Hugging Face folder.

    Raises:
        ModelError: the folder is not there, or has no tokenizer that can be loaded.
        MissingExtraError: transformers is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError("transformers", "cpu") from error
    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(f"model folder {str(path)!r} does not exist")
    if not any(path for pattern in _FILES for path in folder.glob(pattern)):
        raise ModelError(f"model folder {str(path)!r} has no tokenizer (such as tokenizer.json)")
    try:
        auto_tokenizer: Any = transformers.AutoTokenizer
        return auto_tokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises many types here
        raise ModelError(f"the tokenizer in model folder {str(path)!r} cannot be loaded: {error}") from error
