"""Which names mean this machine alone.

A page of anywhere may bind its own name to 127.0.0.1 once it is loaded, and then asks a server of this machine as one
of its own. The name that it asks under gives it away.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def names_this_machine(host: str | None) -> bool:
    """Whether a host, without its port, is loopback and nothing else.

    >>> [names_this_machine(host) for host in ("localhost", "127.0.0.1", "::1", "example.com")]
    [True, True, True, False]
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def host_of(header: str) -> str | None:
    """Of the value of a request's host header, or of a URL; None where it has none.

    >>> host_of("[::1]:8000"), host_of("http://localhost:8000")
    ('::1', 'localhost')
    """
    try:
        return urlsplit(header if "//" in header else f"//{header}").hostname
    except ValueError:
        return None
