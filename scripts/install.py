"""Create `.venv` with the packages that titan_rl and its tests need.

    python3.11 scripts/install.py [cpu|gpu] [FOLDER]      # default: cpu .venv

With `cpu`, pip installs torch's CPU build, `torch==X+cpu`, from the configured package sources and, if necessary,
additionally from PyTorch's index of CPU wheels. Thus pip never downloads a CUDA build of several GB.
"""

import contextlib
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036, this script reports it
    sys.exit(f"titan_rl needs Python 3.11 or newer; {sys.executable} is {platform.python_version()}")

import tomllib

ROOT = Path(__file__).resolve().parent.parent
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# vLLM requires these packages, but text models do not need them. Their CUDA builds fail to load with a CPU build of
# torch, and then packages that import them, such as transformers, fail, too.
UNNEEDED = ("torchvision", "torchaudio", "torchcodec")
SHOWN_AFTER_S, SHOWN_EVERY_S = 2.0, 20.0


def main(extra: str = "cpu", folder: str = ".venv") -> None:
    if extra not in ("cpu", "gpu"):
        sys.exit(f"the first argument is {extra!r}; it must be cpu or gpu")
    started = time.monotonic()
    venv = ROOT / folder
    python = venv / "bin" / "python"
    other = "gpu" if extra == "cpu" else "cpu"
    if stamp(venv, other).exists():
        sys.exit(f"{folder} holds titan_rl[{other}], which does not mix with {extra}; remove it first: make distclean")
    if not runs(python, "import pip"):
        say(f"making {folder} with Python {platform.python_version()}")
        if subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)]).returncode:
            sys.exit("making the virtual environment failed; on Debian and Ubuntu: apt install python3-venv")

    index = install_cpu_torch(python) if extra == "cpu" else []
    say(f"installing titan_rl[{extra},dev]: some minutes, 4 GB on disk")
    with progress(f"installing titan_rl[{extra},dev]"):
        failed = pip_install(python, "--editable", f"{ROOT}[{extra},dev]", *index)
    if failed:
        sys.exit(f"{failed}\npip failed, see above; the requested versions are in pyproject.toml")
    compile_packages(venv)
    if extra == "cpu":
        remove_broken(python)
    with progress("importing what was installed"):
        works = runs(python, "import vllm, monarch.actor, torchtitan; from transformers import Qwen3ForCausalLM")
    if not works:
        sys.exit("the installed packages do not import together; remove .venv and try again")
    stamp(venv, extra).touch()
    say(f"done in {time.monotonic() - started:.0f} s")


def stamp(venv: Path, extra: str) -> Path:
    """Path of the file whose existence shows that the installation was completed, and whose time shows when."""
    return venv / f"installed-{extra}"


def install_cpu_torch(python: Path) -> list[str]:
    """Install torch's CPU build, and return the pip options for the index that was needed."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    requirement = next(line for line in extras["cpu"] if line.startswith("torch=="))
    if platform.system() == "Linux":  # other systems have only one build, without this suffix
        requirement += "+cpu"
    failed = ""
    for index in ([], ["--extra-index-url", TORCH_CPU_INDEX]):
        say(f"installing {requirement} from {index[-1] if index else 'the configured package sources'}")
        with progress(f"installing {requirement}"):
            failed = pip_install(python, requirement, *index)
        if not failed:
            return index
    sys.exit(f"{failed}\nno CPU build of torch could be installed, see above; is there a network?")


def remove_broken(python: Path) -> None:
    broken = [name for name in UNNEEDED if not runs(python, f"import {name}")]
    if broken:
        say(f"removing {', '.join(broken)}: not built for this torch, and not needed")
        subprocess.run([python, "-m", "pip", "uninstall", "-qq", "-y", *broken], check=True)


def compile_packages(venv: Path) -> None:
    """Compile the installed modules on all cores, because pip would use one. Templates, which are not Python, are
    skipped."""
    (packages,) = venv.glob("lib/python*/site-packages")
    say("compiling what was installed")
    command = [venv / "bin" / "python", "-m", "compileall", "-qq", "--workers", "0", "-x", "/tests/", packages]
    with progress("compiling"):
        subprocess.run(command)


def pip_install(python: Path, *arguments: str) -> str:
    """Run `pip install`, and return its error message, which is empty on success."""
    command = [str(python), "-m", "pip", "install", "-qq", "--no-compile", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    return (done.stderr or f"{' '.join(command)} failed") if done.returncode else ""


def runs(python: Path, statement: str) -> bool:
    """Return whether `statement` runs without an error. It does not if it imports a missing package."""
    return python.exists() and not subprocess.run([python, "-c", statement], capture_output=True).returncode


@contextlib.contextmanager
def progress(what: str) -> Generator[None]:
    """Context manager that shows progress: a line that counts seconds on a terminal, an occasional line elsewhere."""
    over, began, on_terminal = threading.Event(), time.monotonic(), sys.stdout.isatty()

    def show() -> None:
        last_shown = 0.0
        while not over.wait(0.2):
            seconds = time.monotonic() - began
            if on_terminal and seconds >= SHOWN_AFTER_S:
                print(f"\r\x1b[Kinstall: {what}, {seconds:.0f} s", end="", flush=True)
            elif not on_terminal and seconds - last_shown >= SHOWN_EVERY_S:
                last_shown = seconds
                say(f"still {what}, {seconds:.0f} s")
        if on_terminal:
            print("\r\x1b[K", end="", flush=True)

    shown = threading.Thread(target=show)
    shown.start()
    try:
        yield
    finally:
        over.set()
        shown.join()


def say(what: str) -> None:
    print(f"install: {what}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
