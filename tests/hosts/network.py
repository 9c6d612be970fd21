"""Network of the virtual hosts: bridges, links and addresses of this machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

PREFIX = "trl"
"""Prefix of the names of all bridges and links."""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def hardware_address(address: str) -> str:
    return ":".join(["02", "00", *(f"{int(part):02x}" for part in address.split("."))])


def free_network() -> str:
    """First three numbers of a network that is unused on this machine."""
    taken = subprocess.run(["ip", "-o", "-4", "addr"], capture_output=True, text=True, check=True).stdout
    first = os.getpid() * 7
    for number in range(first, first + 25_600):
        network = f"10.{100 + number // 256 % 100}.{number % 256}"
        if f" {network}." not in taken:
            return network
    raise AssertionError("every network is taken")


def clean_up_after_the_dead() -> None:
    """Remove the bridges of killed test runs, whose hosts ended with them."""
    for line in subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout.splitlines():
        name = line.split(": ")[1].partition("@")[0]
        pid = "".join(c for c in name.removeprefix(PREFIX).partition("b")[0] if c.isdigit())
        if name.startswith(PREFIX) and pid and not Path(f"/proc/{pid}").exists():
            subprocess.run(["ip", "link", "del", name], capture_output=True)
