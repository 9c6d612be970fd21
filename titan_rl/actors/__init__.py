"""The Monarch layer. An actor holds a few lines a method and delegates to plain classes."""

import os

# Monarch reads this when it is first imported. Each of its polls leaves some KB in the process that polls; where the
# kernel tells of processes that have died, nobody waits for it. Elsewhere its default would notice after nine seconds.
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "60s" if hasattr(os, "pidfd_open") else "1s")
