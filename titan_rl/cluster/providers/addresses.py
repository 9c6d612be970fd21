"""Addresses at which hosts reach each other."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from titan_rl.core.calls.parsing import names_this_machine
from titan_rl.core.errors import ProviderError


def addresses_of(
    names: Sequence[str], known: Mapping[str, str] | None = None, *, fix: str = "fix DNS or /etc/hosts"
) -> dict[str, str]:
    """Find an IP address for each host by its name.

    This host's own name often resolves to a loopback address, which no other host can reach. It is replaced by the
    address from which this host reaches the first of the others.

    Args:
        known: Addresses that are known already, by name.
        fix: Remedy for a name that cannot be resolved, for the error message.

    Raises:
        ProviderError: A name cannot be resolved here.
    """
    found = {name: (known or {}).get(name) or _resolved(name, fix) for name in names}
    remote = next((address for address in found.values() if not names_this_machine(address)), None)
    if remote is not None:
        own = source_towards(remote)
        found = {name: own if names_this_machine(address) else address for name, address in found.items()}
    return found


def source_towards(address: str) -> str:
    """Return the address of this host's interface through which it reaches another address. Nothing is sent.

    Raises:
        ProviderError: There is no route to the address.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError as error:
            raise ProviderError(f"{address} cannot be reached from this host: {error.strerror}") from None
        return probe.getsockname()[0]


def _resolved(name: str, fix: str) -> str:
    """Resolve a name, to IPv4 rather than IPv6, because most private networks use it."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:  # ValueError for text that cannot be a name
        why = error.strerror if isinstance(error, OSError) else error
        raise ProviderError(f"{name} has no address here: {why}; {fix}") from None
    addresses = [str(entry[4][0]) for entry in sorted(found, key=lambda entry: entry[0] != socket.AF_INET)]
    return addresses[0]
