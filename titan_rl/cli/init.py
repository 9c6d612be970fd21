"""`titan-rl init NAME`: write a package with a task of your own, or copy an example."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import keyword
import shlex
import sys
import unicodedata
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import jinja2

from titan_rl.cli.options import Parser
from titan_rl.core.errors import ConfigError
from titan_rl.run.terminal.standard_streams import print_result, print_stderr
from titan_rl.training.choices import Level

Template = Literal["single", "multi-turn", "tools"]
TEMPLATES: tuple[Template, ...] = get_args(Template)

TEMPLATE_FOLDER = Path(__file__).parent / "templates"
TAKEN = frozenset({"tests", "base", "runs"})
"""Names of folders next to the package."""

LENGTHS: dict[Template, dict[str, int]] = {
    "single": {"max_context": 64, "max_tokens": 16},
    "multi-turn": {"max_context": 128, "max_tokens": 16},
    "tools": {"max_context": 384, "max_tokens": 48},
}
"""Lengths in tokens of the tiny model, by template."""
OF_TEMPLATES: Mapping[str, Any] = {"template": "single", "model": None, "level": "word", "size": 250_000}
"""Defaults of the options that have no effect on the copy of an example."""


def set_up(parser: Parser) -> None:
    parser.add_argument(
        "--template",
        choices=TEMPLATES,
        default=OF_TEMPLATES["template"],
        help="one prompt and one answer, a conversation of several turns, or tools that the policy calls "
        "(default: single)",
    )
    parser.add_argument(
        "--example",
        metavar="EXAMPLE",
        help=f"copy an example instead, under the name NAME: {', '.join(example_names())}",
    )
    parser.add_argument(
        "--level",
        choices=get_args(Level),
        default=OF_TEMPLATES["level"],
        help="what a token of the tiny model is: a byte, or also a word of the task (default: word)",
    )
    parser.add_argument(
        "--size",
        type=int,
        default=OF_TEMPLATES["size"],
        metavar="PARAMETERS",
        help="size of the tiny model (default: %(default)s)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.name)
    if arguments.example is not None:
        for name, default in OF_TEMPLATES.items():
            if getattr(arguments, name) != default:
                raise ConfigError(
                    f"--{name} has no effect with --example {arguments.example}; leave it out, and change the settings "
                    "of the copy instead"
                )
        return _copy(arguments.example, folder)
    model = None if arguments.model is None else Path(arguments.model)
    for path in write_starter(folder, arguments.template, model, level=arguments.level, size=arguments.size):
        print_result(f"{path}\n")
    first = "sft config.toml" if model is None else "train config.toml --dry-run"
    print_stderr(f"titan-rl: next:  cd {shlex.quote(str(folder))} && titan-rl {first}")
    return 0


def _copy(example: str, folder: Path) -> int:
    for path in copy_example(example, folder):
        print_result(f"{path}\n")
    settings = shlex.quote(str(folder / "cpu.toml"))
    if (folder / "base").is_dir():
        first = f"titan-rl train {settings}"
    elif (folder / "base_model.py").is_file():
        first = f"python -m {folder.name}.base_model --out {shlex.quote(str(folder / 'base'))}"
    else:
        first = f"titan-rl sft {settings}"
    print_stderr(f"titan-rl: next:  {first}")
    return 0


def write_starter(folder: Path, template: Template, model: Path | None, *, level: str, size: int) -> list[Path]:
    """Write the files of a package into a new or empty folder.

    Args:
        folder: Folder to make. Its last part is the name of the package.
        model: Hugging Face folder to train; None for a tiny model.
        level: Kind of the tiny model's tokens.
        size: Approximate number of the tiny model's parameters.

    Returns:
        Paths of the files.

    Raises:
        ConfigError: The name cannot be that of a package, the folder is not empty, there is no such model, or the
            folder cannot be written. The message says what would work.
    """
    if size < 1:
        raise ConfigError(f"--size {size} must be a number of parameters, such as 250000")
    check_name(folder.name)
    check_room(folder)
    if model is not None and not (model / "config.json").is_file():
        raise ConfigError(
            f"--model {model}: there is no model: it has no config.json; from the Hugging Face hub: "
            f"hf download ORGANIZATION/NAME --local-dir {model}"
        )
    values = {
        "name": folder.name,
        "class_name": "".join(part[0].upper() + part[1:] for part in folder.name.split("_") if part),
        "template": template,
        "level": level,
        "size": size,
        "model": None if model is None else model.resolve().as_posix(),
        **LENGTHS[template],
    }
    files = dict(_rendered(folder, template, values))
    with writing():
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return list(files)


@contextlib.contextmanager
def writing() -> Generator[None]:
    """Context manager that turns an `OSError` while writing to the user's folder into a `ConfigError`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}; name a folder that you can create") from None


def check_name(name: str) -> None:
    """Check the name of a new package.

    Raises:
        ConfigError: A new package cannot have this name. The message suggests another.
    """
    if not (name.isidentifier() and name.isascii()) or keyword.iskeyword(name) or not name.strip("_"):
        letters = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()  # "cafe" of "café"
        plain = "".join(letter if letter.isalnum() else "_" for letter in letters).strip("_")
        fix = plain if plain.isidentifier() and not keyword.iskeyword(plain) else "my_task"
        raise ConfigError(f"{name!r} is not a valid name of a Python package; use {fix}, for example")
    if name in TAKEN or name in sys.stdlib_module_names or _is_installed(name):
        raise ConfigError(
            f"{name!r} is an existing module, which would be imported instead; use my_{name}, for example"
        )


def _is_installed(name: str) -> bool:
    """Return whether a module of this name would hide the package or be hidden by it. A plain folder would not."""
    found = importlib.util.find_spec(name)
    return found is not None and found.origin is not None


def check_room(folder: Path) -> None:
    """Check that a folder is new or empty.

    Raises:
        ConfigError: The folder is not empty, or is a file.
    """
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty, and nothing is overwritten; name a new folder")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; name a new folder")


def _rendered(folder: Path, template: Template, values: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    """Yield the path and the text of each file of a new package."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATE_FOLDER),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    outside_package = {
        "README.md": folder / "README.md",
        "config.toml": folder / "config.toml",
        "pyproject.toml": folder / "pyproject.toml",
        "gitignore": folder / ".gitignore",
        "test.py": folder / "tests" / f"test_{folder.name}.py",
    }
    for source in sorted(path for part in ("common", template) for path in (TEMPLATE_FOLDER / part).iterdir()):
        file = source.name.removesuffix(".jinja")
        text = environment.get_template(source.relative_to(TEMPLATE_FOLDER).as_posix()).render(values)
        yield outside_package.get(file, folder / folder.name / file), text


def examples_folder() -> Path:
    """Folder of the examples: in the installed package, or in the repository."""
    shipped = Path(__file__).parent / "shipped_examples"
    return shipped if shipped.is_dir() else Path(__file__).parents[2] / "examples"


def example_names() -> list[str]:
    """Names of the examples that have a cpu.toml."""
    return sorted(settings.parent.name for settings in examples_folder().glob("*/cpu.toml"))


def copy_example(example: str, folder: Path) -> list[Path]:
    """Copy an example as a package with another name.

    Args:
        folder: Folder to make. Its last part is the name of the package, which replaces the example's name in the
            files.

    Returns:
        Paths of the files.

    Raises:
        ConfigError: There is no such example, the name cannot be that of a package, or the folder is not empty.
    """
    names = example_names()
    if example not in names:
        raise ConfigError(
            f"--example {example}: there is no such example; the examples are {', '.join(names) or 'not installed'}"
        )
    check_name(folder.name)
    check_room(folder)
    source = examples_folder() / example
    files = [path for path in sorted(source.rglob("*")) if path.is_file() and _is_shipped(path, source)]
    written: list[Path] = []
    with writing():
        for path in files:
            copy = folder / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(_renamed(path, example, folder.name))
            written.append(copy)
    return written


def _is_shipped(path: Path, source: Path) -> bool:
    """Return whether a file belongs to the example. Caches do not, nor do models without a README, which can be created
    again."""
    top = path.relative_to(source).parts[0]
    return "__pycache__" not in path.parts and (top != "base" or (source / top / "README.md").is_file())


def _renamed(path: Path, example: str, name: str) -> bytes:
    """Return the content of a file, with the example's module and folder renamed."""
    content = path.read_bytes()
    if path.suffix not in (".py", ".toml", ".md"):
        return content
    text = content.decode()
    return text.replace(f"examples.{example}", name).replace(f"examples/{example}", name).encode()
