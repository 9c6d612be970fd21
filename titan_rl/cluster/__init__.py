"""The Monarch layer. An actor holds a few lines a method and delegates to plain classes."""

import os

# Monarch reads these when it is first imported.
if hasattr(os, "pidfd_open"):
    # The kernel tells of processes that have died long before Monarch's polls, each of which leaves some KB in memory.
    # A poll is also what keeps an actor from being stopped as an orphan: a starved controller may miss many of them.
    os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "30s")
    os.environ.setdefault("HYPERACTOR_MESH_ORPHAN_TIMEOUT", "1h")
else:
    os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "1s")
