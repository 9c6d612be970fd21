"""ssh provider with a fake ssh that runs remote commands locally."""

import os
import re
import socket
from pathlib import Path

import pytest
from providers.fakes import Commands, worker_command

from titan_rl.cluster.providers.registry import find_provider
from titan_rl.cluster.providers.spec import ProviderSpec, Submission
from titan_rl.config.hosts import ProviderSettings
from titan_rl.core.errors import ProviderError

SSH = """
if "-G" in argv:
    print(f"user somebody\\nhostname {dict(alias='127.0.0.1').get(argv[-1], argv[-1])}\\nport 22")
elif "refusing" in argv:
    sys.exit("Permission denied (publickey).")
else:
    os.execvp("sh", ["sh", "-c", argv[-1]])
"""


def settings(tmp_path: Path, *hosts: str) -> ProviderSettings:
    command = worker_command(tmp_path)
    return ProviderSettings(provider="ssh", names=hosts, options=("-p", "2222"), port=700, command=command)


async def test_each_host_gets_a_worker_at_its_address(tmp_path: Path, commands: Commands):
    commands.make("ssh", SSH)
    given = settings(tmp_path, "alias", "me@far=127.0.0.2")
    async with find_provider("ssh").workers(ProviderSpec(given, tmp_path)) as addresses:
        assert list(addresses) == ["127.0.0.1:700", "127.0.0.2:700"]
    assert "got SIGTERM" in (tmp_path / "worker-me@far.log").read_text()
    for arguments, _ in commands.calls("ssh"):
        assert arguments[:2] == ["-p", "2222"]
        assert "-G" in arguments or "BatchMode=yes" in arguments


async def test_ssh_refusal_is_reported(tmp_path: Path, commands: Commands):
    commands.make("ssh", SSH)
    given = settings(tmp_path, "refusing=127.0.0.1")
    with pytest.raises(ProviderError, match=r"refusing has ended with code 1: Permission denied \(publickey\)"):
        async with find_provider("ssh").workers(ProviderSpec(given, tmp_path)):
            pytest.fail("it began")


def test_dry_run_prints_valid_shell_commands(tmp_path: Path, commands: Commands):
    commands.make("ssh", "print(argv[-2], argv[-1])")
    given = settings(tmp_path, "me@far=10.0.0.2")
    render = find_provider("ssh").render
    assert render is not None
    text = render(Submission(given, "run", "", {}))
    with os.popen(text) as shell:
        output = shell.read()
    assert output.startswith("me@far sh -c ")
    assert output.endswith(f"{given.command} worker --listen 10.0.0.2:700\n")


def test_dry_run_resolves_known_hosts_and_marks_others(tmp_path: Path, commands: Commands):
    commands.make("ssh", SSH)
    render = find_provider("ssh").render
    assert render is not None
    text = render(Submission(settings(tmp_path, "alias", "far.invalid"), "run", "", {}))
    assert re.findall(r"--listen (\S+:700)", text) == ["127.0.0.1:700", "ADDRESS_OF_far.invalid:700"]


@pytest.mark.parametrize(
    ("ssh_output", "message"),
    [
        ("user somebody", "ssh -G far prints no hostname; .*~/.ssh/config"),
        ("hostname far.invalid", r"far\.invalid has no address here: .*hosts\.names = "),
    ],
)
async def test_unresolved_host_error_gives_the_fix(
    ssh_output: str, message: str, tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
):
    def nothing(*_: object, **__: object):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nothing)
    commands.make("ssh", f"print({ssh_output!r})")
    with pytest.raises(ProviderError, match=message):
        async with find_provider("ssh").workers(ProviderSpec(settings(tmp_path, "far"), tmp_path)):
            pytest.fail("it began")
