"""The Monarch layer. An actor holds a few lines a method and delegates to plain classes."""

import os

# Monarch reads this when it is first imported. By default a dead process is noticed after about nine seconds.
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "1s")
