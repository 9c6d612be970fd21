"""The command line, and the exit codes of its commands."""

import signal

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM
EXIT_UNREAD = 128 + signal.SIGPIPE
