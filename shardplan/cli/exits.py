"""Exit codes."""

CLEAN = 0
FINDINGS = 1  # also for a plan or a model that cannot be read or built
USAGE = 2
BUG = 3
INTERRUPTED = 130  # as in shells: 128 + SIGINT
BROKEN_PIPE = 141  # 128 + SIGPIPE


class UsageError(Exception):
    """The command line asks for something that cannot be done; exit code 2."""
