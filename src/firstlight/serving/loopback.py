"""Which addresses are this machine's own."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether a name or address (IPv6 without brackets) is this machine's own, seen by nobody
    else."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
