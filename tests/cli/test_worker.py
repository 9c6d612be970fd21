"""`titan-rl worker`: its listen address, its drain time and its exit code."""

from __future__ import annotations

import socket

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

from titan_rl.cli.main import main


def test_ctrl_c_stops_a_worker_at_once_and_suggests_sigterm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("titan_rl.run.host_worker.run_worker", interrupted)
    assert main(["worker", "--listen", "127.0.0.1:0"]) == 130
    err = capsys.readouterr().err
    assert "titan-rl: stopped at once, with the work of runs on this host; SIGTERM lets them move it first" in err
    assert "before a run began" not in err


@pytest.mark.parametrize(
    ("listen", "message"),
    [
        ("0.0.0.0:0", "'0.0.0.0:0' stands for all interfaces; name one address"),
        ("[::]:0", "'[::]:0' stands for all interfaces"),
        ("*:0", "'*:0' stands for all interfaces"),
        ("0:0", "'0:0' stands for all interfaces"),
        ("[]:0", "'[]:0' must be HOST or HOST:PORT"),
        ("fd00::2", "--listen 'fd00::2' needs brackets around the IPv6 address, as in [fd00::2]:22222"),
        ("224.0.0.1:0", "'224.0.0.1:0' stands for several machines; name one address"),
        ("255.255.255.255:0", "'255.255.255.255:0' stands for several machines"),
        ("127.255.255.255:0", "127.255.255.255:0 stands for several machines"),
        ("203.0.113.9:0", "203.0.113.9:0: Cannot assign requested address; name a free port of an address of this"),
    ],
)
def test_listen_must_be_one_address_of_this_machine(listen: str, message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["worker", "--listen", listen]) == 2
    assert message in capsys.readouterr().err


def test_unresolvable_listen_name_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def create_server(address: tuple[str, int], **_: object):
        raise OSError(-2, f"Name or service not known (while attempting to bind on address {address!r})")

    monkeypatch.setattr(socket, "create_server", create_server)
    assert main(["worker", "--listen", "far:0"]) == 2
    assert "--listen far:0: Name or service not known; name a free port of an address" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        ("-1", "--drain-s: -1 must be a number of seconds, 0 or more"),
        ("nan", "--drain-s: nan must be a number of seconds"),
        ("inf", "--drain-s: inf must be a number of seconds"),
        ("soon", "--drain-s: invalid number of seconds value: 'soon'"),
    ],
)
def test_invalid_drain_seconds_are_rejected(seconds: str, message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["worker", f"--drain-s={seconds}"])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
