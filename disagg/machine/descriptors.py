"""File descriptors that this process can still open."""

from __future__ import annotations

import errno
import os
import resource

NEEDED = 32
"""More than one connection of any engine takes."""
PER_RANK = 8
"""What a connected rank may take: 5 with `cma`, 8 with NIXL over TCP."""
FOR_SERVER = 256
"""Left to the model server."""


def soft_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def too_many_ranks(num_ranks: int) -> str:
    """Why this many ranks may need too many descriptors; empty if not."""
    limit, wanted = soft_limit(), num_ranks * PER_RANK + FOR_SERVER
    if limit in (resource.RLIM_INFINITY, -1) or wanted <= limit:
        return ""
    return (
        f"{num_ranks} ranks of peers may take {num_ranks * PER_RANK} descriptors, and this process may have {limit} in all: "
        f"raise the soft limit (ulimit -n {1 << (wanted - 1).bit_length()}; for a service: LimitNOFILE=)"
    )


def shortage(needed: int = NEEDED) -> str:
    """Why this process cannot open `needed` more descriptors now; empty if it can."""
    opened: list[int] = []
    try:
        while len(opened) < needed:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return f"only {len(opened)} of {needed} descriptors that connecting may take are free"
    finally:
        for each in opened:
            os.close(each)
    return ""
