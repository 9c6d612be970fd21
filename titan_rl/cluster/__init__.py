"""The Monarch layer. Each method of an actor has a few lines and delegates to plain classes."""

import os

# Monarch reads these variables when it is first imported.
if hasattr(os, "pidfd_open"):
    # The kernel reports the deaths of processes long before Monarch's polls do, and each poll leaves some KB in memory.
    # A poll also keeps an actor from being stopped as an orphan, and a starved controller may miss many polls.
    os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "30s")
    os.environ.setdefault("HYPERACTOR_MESH_ORPHAN_TIMEOUT", "1h")
else:
    os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "1s")
