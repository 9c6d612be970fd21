"""The tokenizer of a model's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.errors import MissingExtraError, ModelError

_TOO_LONG = "sequence-length-is-longer-than-the-specified-maximum"
"""What transformers warns of once, on standard error; here model.max_context is the limit."""

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
        loader: Any = transformers.TokenizersBackend if _is_plain(folder) else transformers.AutoTokenizer
        tokenizer = loader.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises many types here
        raise ModelError(f"the tokenizer in model folder {str(path)!r} cannot be loaded: {error}") from error
    tokenizer.deprecation_warnings[_TOO_LONG] = True
    return tokenizer


def _is_plain(folder: Path) -> bool:
    """Whether the tokenizer says that it is of no class of its own. To look for one, transformers imports torch:
    seconds in every process that renders."""
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return False
    settings = parse_json(config.read_text())
    return settings.get("tokenizer_class") == "TokenizersBackend" and "auto_map" not in settings
