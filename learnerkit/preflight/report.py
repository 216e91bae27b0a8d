"""The marks of what a check has found, alike in `learn.check()` and in the preflight check."""

OK = "ok"
HINT = "??"
"""It may be meant so."""
WRONG = "!!"
"""A problem."""
NOTHING = "--"
"""Not looked at."""


def verdict(problems: int) -> str:
    """The last line."""
    return f"{problems} problem{'s' if problems > 1 else ''}" if problems else "all is well"
