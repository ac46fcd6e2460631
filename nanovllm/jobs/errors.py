"""What can go wrong with a job, and with a row of it."""

import re


class JobError(Exception):
    """Ends the job. The message is one line, for the user."""


class RowError(Exception):
    """One row can't be completed.

    Attributes:
        field: where in the row it is, as in `messages[1].role`; None if the row can't be read at all.
        reason: what is wrong there.
    """

    def __init__(self, field: str | None, reason: str) -> None:
        super().__init__(reason if field is None else f"{field}: {reason}")
        self.field, self.reason = field, reason


def one_line(message: str) -> str:
    """The message without line breaks, which those of other libraries may have, and without the stack of a traceback,
    which those of other processes have."""
    message = re.sub(r"Traceback \(most recent call last\):\n(?: .*\n)*", "", message)
    return " ".join(line.strip() for line in message.splitlines() if line.strip())
