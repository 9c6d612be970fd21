"""Exit codes of commands."""

from __future__ import annotations

import signal

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM
EXIT_UNREAD = 128 + signal.SIGPIPE
