"""Copies an example, to begin from: what `titan-rl init --example` makes."""

from __future__ import annotations

from pathlib import Path

from titan_rl.cli.starter.write import check_name, check_room, writing
from titan_rl.core.errors import ConfigError


def examples_folder() -> Path:
    """Where they are: in the installed package, or in the repository beside it."""
    shipped = Path(__file__).parent / "shipped_examples"
    return shipped if shipped.is_dir() else Path(__file__).parents[3] / "examples"


def example_names() -> list[str]:
    """Those that have a cpu.toml."""
    return sorted(settings.parent.name for settings in examples_folder().glob("*/cpu.toml"))


def copy_example(example: str, folder: Path) -> list[Path]:
    """Write the example as a package of another name.

    Args:
        folder: to make; the last part of it is the package's name, which takes the place of the example's in its files.

    Returns:
        what was written.

    Raises:
        ConfigError: there is no such example, the name cannot be one of a package, or the folder holds something.
    """
    names = example_names()
    if example not in names:
        raise ConfigError(f"--example {example}: there is no such example; there are {', '.join(names) or 'none here'}")
    check_name(folder.name)
    check_room(folder)
    source = examples_folder() / example
    files = [path for path in sorted(source.rglob("*")) if path.is_file() and _is_of_it(path, source)]
    written: list[Path] = []
    with writing():
        for path in files:
            copy = folder / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(_renamed(path, example, folder.name))
            written.append(copy)
    return written


def _is_of_it(path: Path, source: Path) -> bool:
    """Not what running it leaves: caches, and models that can be made again. Those with a README are part of it."""
    room = path.relative_to(source).parts[0]
    return "__pycache__" not in path.parts and (room != "base" or (source / room / "README.md").is_file())


def _renamed(path: Path, example: str, name: str) -> bytes:
    """The file, with the module and the folder that it names as they are called in the copy."""
    content = path.read_bytes()
    if path.suffix not in (".py", ".toml", ".md"):
        return content
    text = content.decode()
    return text.replace(f"examples.{example}", name).replace(f"examples/{example}", name).encode()
