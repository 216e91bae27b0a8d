"""The functions for a trial's script: its values, and its place in the search. They need no more than Python itself."""

import json
import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from learnerkit.text import did_you_mean

PARAMS, TRIAL = "LEARNERKIT_PARAMS", "LEARNERKIT_TRIAL"
"""The variables with the values, and with the place of the trial."""
READ = "params.read"
"""The file in the search's folder that says that a script has asked for its values."""


def params(**defaults: Any) -> SimpleNamespace:
    """Return the values of this trial, or the defaults where the script runs by itself.

    Args:
        defaults: every parameter that the search may vary, with its value outside of a search. With `--as-arguments`
            some or all may be missing here: the script gets them as its arguments.

    Returns:
        An object with an attribute for each: `p.lr`. A name with hyphens has underscores here.

    Raises:
        ValueError: the search varies a parameter that is not among them; or the variable is no JSON object.
    """
    given = os.environ.get(PARAMS) or "{}"
    try:
        values = {name.replace("-", "_"): value for name, value in json.loads(given).items()}
    except (ValueError, AttributeError) as error:
        raise ValueError(f"got {PARAMS}={given}; it is a JSON object, such as {PARAMS}='{{\"lr\": 0.1}}'") from error
    trial = place()
    if trial and trial.get("as_arguments"):
        values = {name: value for name, value in values.items() if name in defaults}
    for name in values:
        if name not in defaults:
            raise ValueError(
                f"the search varies {name!r}, and params has {', '.join(defaults) or 'nothing'}: both need the same "
                f"names, or --as-arguments gives the values as arguments{did_you_mean(name, defaults)}"
            )
    if trial:
        with suppress(OSError):  # another machine may have the folder elsewhere
            Path(trial["folder"], READ).touch()
    return SimpleNamespace(**{**defaults, **values})


def place() -> dict[str, Any] | None:
    """Return the place of the trial that this process runs; `None`: it runs none."""
    value: dict[str, Any] | None = json.loads(os.environ.get(TRIAL, "null"))
    return value
