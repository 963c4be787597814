"""The one exception for mistakes a user can mend."""


class UserError(Exception):
    """One line that says what was expected, what was got and what to do; the CLI exits with 2."""
