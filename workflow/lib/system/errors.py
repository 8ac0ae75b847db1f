"""Errors for a user: own mistakes, a requested stop, and another process's failure."""

import json

from workflow.lib.system.redaction import redacted


class UserError(ValueError):
    """A setting, file or machine that cannot work. The message has its name, its value, the bound,
    and what to change. Logins of URLs and tokens in it are masked."""

    def __init__(self, message: str) -> None:
        # half a character (a lone surrogate) in a name could be neither shown nor logged
        super().__init__(redacted(message).encode(errors="backslashreplace").decode())


class BatchMemoryError(UserError):
    """A batch of `size` sequences ran out of memory, in step: all must start again with less."""

    def __init__(self, size: int) -> None:
        super().__init__(str(size))
        self.size = size


class PeerLostError(RuntimeError):
    """Not a cause: this process only lost others, or waits for them."""

    MARK = "lost another process"  # prefix of its message

    def __init__(self, noticed: str) -> None:
        super().__init__(f"{self.MARK}: {noticed}")


class StoppedError(Exception):
    """Not a mistake: a signal asked the run to stop. The same command resumes it."""


def setting_error(setting: str, value: object, bound: str, change: str) -> UserError:
    """Build the message `<setting> = <value>: <bound>. <change>.`: the key in `config.yaml` or an
    option, the value, the broken bound, and the remedy."""
    return UserError(f"{setting} = {as_yaml(value)}: {bound.rstrip('.')}. {change.rstrip('.')}.")


def as_yaml(value: object) -> str:
    """Spell a value as `config.yaml` has it: `true`, `null`; texts and others as Python does."""
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
