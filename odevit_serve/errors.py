"""The two kinds of failure a user can cause, each told in one sentence."""


class UserError(Exception):
    """Work that cannot be done with what was given; the command ends with exit code 1."""

    exit_code = 1


class UsageError(UserError):
    """A call that cannot be right (a setting, a name, a number); exit code 2."""

    exit_code = 2


class MissingExtra(UserError):
    """A command whose optional packages are not installed."""

    def __init__(self, extra: str):
        super().__init__(f"pip install 'odevit-serve[{extra}]'")
        self.extra = extra
