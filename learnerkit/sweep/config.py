"""The config of a search: a JSON file whose entries have the names of Comet's optimizer, Optuna's, or both.

A search is a file, rather than a function of a trial as in Optuna, so that any script can be searched, in any number of
processes and without a line of Optuna in it. What the entries say is Optuna's: its distributions, samplers and pruners
are made of them here, and judge them.
"""

import importlib.util
import inspect
import itertools
import json
import math
import re
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from learnerkit.text import did_you_mean, escaped, escaped_line, in_one_line, printable

GRID_LIMIT = 100_000  # more combinations than anybody waits for
NUMBER_LIMIT = 1e100  # the largest number in a config: sums and differences of such numbers are finite


def optuna() -> Any:
    """Import Optuna.

    Raises:
        ImportError: it is not installed.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # In a notebook Optuna's tqdm warns without ipywidgets.
            import optuna
            import optuna.study
    except ImportError as error:
        raise ImportError("a search needs Optuna: pip install 'learnerkit[sweep]'") from error
    return optuna


class ConfigError(ValueError):
    """The config cannot be used; the text names the entry, and what is allowed."""


class Section:
    """A JSON object whose entries are taken one by one; what is left at the end is an error.

    Args:
        entries: the object.
        where: its place in the file, for messages, such as 'parameters.lr: '.
    """

    def __init__(self, entries: Any, where: str = "") -> None:
        if not isinstance(entries, dict):
            raise ConfigError(f'{where}got {shown(entries)}; it is a JSON object, {{"name": value, ...}}')
        self.entries, self.where = dict(entries), where
        self.known: list[str] = []

    def take(self, *names: str, default: Any = None) -> Any:
        """Return the entry that has one of these names."""
        self.known += names
        given = [name for name in names if name in self.entries]
        if len(given) > 1:
            raise ConfigError(f"{self.where}got {' and '.join(given)}, which mean the same; leave one out")
        return self.entries.pop(given[0]) if given else default

    def one_of(self, allowed: list[str], *names: str) -> Any:
        """Return an entry that is one of some words; `None` without it."""
        value = self.take(*names)
        if value not in allowed and value is not None:
            self.refuse(names, value, "it is one of " + ", ".join(allowed) + did_you_mean(str(value), allowed))
        return value

    def number(self, *names: str, whole: bool = False, least: float | None = None, default: Any = None) -> Any:
        """Return an entry that is a number."""
        value = self.take(*names, default=default)
        if value is default:
            return value
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= NUMBER_LIMIT
        if not is_number or (whole and value % 1 != 0) or (least is not None and value < least):
            what = f"a {'whole ' if whole else ''}number of at most {NUMBER_LIMIT:g}"
            self.refuse(names, value, f"it is {what}" + (f", {least:g} or more" if least is not None else ""))
        return int(value) if whole else value

    def refuse(self, names: tuple[str, ...], value: Any, allowed: str) -> None:
        """Raise an error that names an entry."""
        raise ConfigError(f"{self.where}{'/'.join(names)}: got {shown(value)}; {allowed}")

    def end(self) -> None:
        """Refuse entries that were not taken."""
        for name in self.entries:
            raise ConfigError(
                f"{self.where}{name}: there is no such entry; allowed are {', '.join(self.known)}"
                + did_you_mean(name, self.known)
            )


def shown(value: Any) -> str:
    """Return a value of a config for a message."""
    return printable(json.dumps(value))


def read_json(path: Path) -> Any:
    """Read a file of JSON, which may have comments, as Comet's files have.

    Raises:
        ConfigError: it cannot be read, or has an entry of which no search can make use.
    """

    def checked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for name, value in pairs:
            if name in entries:
                raise ConfigError(f"{path}: {shown(name)} is given twice in one object; leave one out")
            if escaped_line(name) != name or not 0 < len(name) <= 200:
                raise ConfigError(
                    f"{path}: got the name {shown(name)}; a name has 1 to 200 characters, and no control characters"
                )
            entries[name] = value
        return entries

    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows marks the beginning of a file
        return json.loads(re.sub(r"(?m)^[^\S\n]*#.*", "", text), object_pairs_hook=checked)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except ConfigError:
        raise
    except ValueError as error:  # Python refuses to read thousands of digits as an integer.
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    except RecursionError:
        raise ConfigError(f"{path}: it is nested too deeply") from None


SCALES = ["linear", "uniform", "loguniform"]
TYPES = ["integer", "int", "float", "double", "discrete", "categorical"]


def distribution(entries: Any, where: str) -> Any:
    """Make Optuna's distribution of an entry of `parameters`."""
    section = Section(entries, where)
    kinds = optuna().distributions
    kind = section.one_of(TYPES, "type")
    if kind is None:
        raise ConfigError(f"{where}type is missing; it is one of {', '.join(TYPES)}")
    if kind in ("discrete", "categorical"):
        keys = ("values", "choices")
        choices = section.take(*keys)
        scalar = (bool, int, float, str, type(None)) if kind == "categorical" else (int, float)
        if not isinstance(choices, list) or not choices or not all(isinstance(c, scalar) for c in choices):
            what = "numbers" if kind == "discrete" else "strings, numbers, booleans or null"
            section.refuse(keys, choices, f"it is a list of {what}, at least one")
        for choice in choices:
            fits = escaped(choice) == choice if isinstance(choice, str) else abs(choice or 0) <= NUMBER_LIMIT
            if not fits:  # NaN neither
                section.refuse(keys, choice, "a text has no control characters, a number is at most 1e100")
        section.end()
        different = [*dict.fromkeys(choices)]
        if len(different) < len({*map(repr, choices)}):
            section.refuse(keys, choices, "some of them are equal, such as 0 and false, or 1 and 1.0")
        return kinds.CategoricalDistribution(different)
    whole = kind in ("integer", "int")
    log = section.take("log", default=False)
    if not isinstance(log, bool):
        section.refuse(("log",), log, "it is true or false")
    scale = section.one_of(SCALES, "scalingType", "scaling_type")
    if log and scale is not None:
        raise ConfigError(f"{where}got log and scalingType, which mean the same; leave one out")
    low, high = section.number("min", "low", whole=whole), section.number("max", "high", whole=whole)
    step = section.number("step", whole=whole, default=1 if whole else None)
    section.end()
    if low is None or high is None:
        raise ConfigError(f"{where}min/low and max/high are missing")
    make = kinds.IntDistribution if whole else kinds.FloatDistribution
    try:
        return make(low, high, log=log or scale == "loguniform", step=step)
    except (ValueError, ArithmeticError) as error:
        raise ConfigError(f"{where}Optuna refuses these numbers ({in_one_line(error)})") from error


def grid_values(of: Any, size: int, where: str) -> list[Any]:
    """Return values of a distribution from one end to the other: all that a list or a step gives, else `size`.

    Raises:
        ConfigError: there are too many.
    """
    import numpy as np  # It imports ctypes, which may open a file: by now the standard files are open.

    if choices := getattr(of, "choices", ()):
        return list(choices)
    low, high, step = of.low, of.high, of.step
    is_whole = isinstance(low, int)
    n = int((high - low) / step + 1e-9) + 1 if step else size
    if is_whole and step == 1 and n > size:  # it is Optuna's default
        n, step = size, None
    if n > GRID_LIMIT:
        raise ConfigError(
            f"{where}a grid has {n:,} values of it; at most {GRID_LIMIT:,} points are allowed: use random"
        )
    if step:
        return [min(low + i * step, high) for i in range(n)]  # rounding may take the last one above
    values = (np.geomspace if of.log else np.linspace)(float(low), float(high), n).tolist()
    return sorted({min(max(round(x) if is_whole else x, low), high) for x in values})


@dataclass(frozen=True)
class Config:
    """A search.

    Args:
        data: the file's entries, those of `spec` among the others.
        parameters: Optuna's distributions, by name.
        metric: what is optimized.
        maximize: whether more is better.
        n_sets: how many sets of values; 0: as many as there is time for, or a whole grid.
        repeats: how often each is run.
        retries: how often the values of a trial that was killed are run again.
        seed: of the samplers.
        grid: the values of each parameter, if all combinations are to be tried.
    """

    data: dict[str, Any]
    parameters: dict[str, Any]
    metric: str
    maximize: bool
    n_sets: int
    repeats: int
    retries: int
    seed: int | None
    grid: list[list[Any]] | None

    @property
    def total(self) -> int:
        """The number of trials to run; 0: no limit."""
        n = math.prod(map(len, self.grid)) if self.grid else self.n_sets
        return min(n, self.n_sets or n) * self.repeats

    def combinations(self) -> list[dict[str, Any]]:
        """Return the points of the grid."""
        if self.grid is None:
            return []
        return [dict(zip(self.parameters, each, strict=True)) for each in itertools.product(*self.grid)]

    def sampler(self, number: int) -> Any:
        """Make the sampler that draws a trial.

        Args:
            number: how many trials there were before. Each draws from another random stream, so that two machines with
                one seed do not draw the same values.
        """
        entry = self.data.get("sampler")
        if entry is None:
            entry = "random" if self.grid or self.data.get("algorithm") == "random" else "tpe"
        seed = self.seed
        if seed is not None and "qmc" not in str(entry).lower():  # QMC's sequence continues in the storage.
            seed = zlib.crc32(f"{seed} {number}".encode())
        defaults = {"seed": seed, "multivariate": True, "constant_liar": True}
        return made("sampler", optuna().samplers, entry, defaults)

    def pruner(self) -> Any:
        """Make the pruner."""
        entry = self.data.get("pruner", "median")
        return made("pruner", optuna().pruners, "nop" if entry is None else entry, {})


NEEDS = {"CmaEsSampler": "cmaes", "GPSampler": "scipy", "QMCSampler": "scipy", "WilcoxonPruner": "scipy"}
"""The packages that Optuna imports only once trials run."""


def made(what: str, module: ModuleType, entry: Any, defaults: dict[str, Any]) -> Any:
    """Make a sampler or a pruner of Optuna by its name.

    Args:
        what: 'sampler' or 'pruner'.
        module: where the classes are.
        entry: the name, with or without the suffix, or an object of "name" and options.
        defaults: values for options that the class has and the entry lacks.
    """
    suffix = what.capitalize()
    options = dict(entry) if isinstance(entry, dict) else {}
    name = entry if isinstance(entry, str) else options.pop("name", None)
    # The brute-force sampler ends a search from inside Optuna's own loop; "algorithm": "grid" tries all here.
    left_out = (
        "BaseSampler", "BaseGASampler", "BasePruner", "BruteForceSampler", "GridSampler", "PartialFixedSampler",
    )  # fmt: skip
    classes = {
        cls.removesuffix(suffix).lower(): getattr(module, cls)
        for cls in module.__all__
        if cls.endswith(suffix) and cls not in left_out
    }
    kind = classes.get(str(name).removesuffix(suffix).lower())
    if kind is None:
        names = sorted(cls.__name__ for cls in classes.values())
        raise ConfigError(
            f'{what}: got {shown(entry)}; it is a name or {{"name": ..., options}}, of {", ".join(names)}'
            + did_you_mean(str(name), names)
        )
    allowed = inspect.signature(kind).parameters
    for option in options:
        if option not in allowed:
            raise ConfigError(
                f"{what}.{option}: {kind.__name__} has no such option; it has {', '.join(allowed)}"
                + did_you_mean(option, allowed)
            )
    if "wrapped_pruner" in options:
        options["wrapped_pruner"] = made(what, module, options["wrapped_pruner"], {})
    needed = NEEDS.get(kind.__name__)
    if needed and importlib.util.find_spec(needed) is None:
        raise ConfigError(f"{what}: {kind.__name__} needs {needed}: pip install {needed}")
    options = {option: value for option, value in defaults.items() if option in allowed} | options
    try:
        with warnings.catch_warnings(action="ignore", category=optuna().exceptions.ExperimentalWarning):
            return kind(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what}: {kind.__name__} refuses these options: {error}") from error


def read_config(path: Path) -> Config:
    """Read a file.

    Raises:
        ConfigError: it cannot be used.
        ImportError: Optuna is not installed.
    """
    data = read_json(path)
    try:
        top = Section(data)
        spec = Section(top.entries.pop("spec", {}), "spec: ")
        if both := top.entries.keys() & spec.entries.keys():
            raise ConfigError(f"{min(both)} is given twice, in spec and beside it; leave one out")
        return make_config(top.entries | spec.entries)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: it is nested too deeply") from None


def make_config(data: dict[str, Any]) -> Config:
    """Check the entries of a config."""
    section = Section(data)
    entries = Section(section.take("parameters", default={}), "parameters: ").entries
    parameters = {name: distribution(each, f"parameters.{name}: ") for name, each in entries.items()}
    if not parameters:
        raise ConfigError('parameters: there are none; name at least one: {"lr": {"type": "float", ...}}')
    algorithm, sampler = section.one_of(["random", "grid", "bayes"], "algorithm"), section.take("sampler")
    if algorithm is not None and sampler is not None:
        raise ConfigError("got algorithm and sampler, which mean the same; leave one out")
    metric = section.take("metric", default="loss")
    if not isinstance(metric, str) or not metric or escaped_line(metric) != metric:
        section.refuse(("metric",), metric, "it is the name of what is optimized, such as 'valid_loss'")
    goal = section.one_of(["minimize", "maximize"], "objective", "direction")
    if goal is None and not any(word in metric for word in ("loss", "error")):
        raise ConfigError(f"objective/direction is missing; say whether to minimize or maximize {metric!r}")
    n_sets = section.number("maxCombo", "n_trials", whole=True, least=0, default=0)
    repeats = section.number("trials", whole=True, least=1, default=1)
    retries = section.number("retryLimit", whole=True, least=0, default=3)
    seed = section.number("seed", whole=True, least=0)
    size = section.number("gridSize", whole=True, least=1, default=10)
    for name in ("pruner", *IGNORED):
        section.take(name)
    section.end()
    grid: list[list] | None = None
    if algorithm == "grid":
        grid = [grid_values(each, size, f"parameters.{name}: ") for name, each in parameters.items()]
        if math.prod(map(len, grid)) > GRID_LIMIT:
            counts = " x ".join(str(len(values)) for values in grid)
            raise ConfigError(f"gridSize: the grid has {counts} points; at most {GRID_LIMIT:,} are allowed: use random")
    config = Config(data, parameters, metric, goal == "maximize", n_sets, repeats, retries, seed, grid)
    config.sampler(0)
    config.pruner()
    return config


IGNORED = ("name", "minSampleSize", "retryAssignLimit")
"""Entries of Comet's files on which nothing depends here."""

FREE = ("maxCombo", "n_trials", "retryLimit", *IGNORED)
"""Entries that may change while a search goes on."""


def changes(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Yield the entries that differ from those with which a search was begun, except those in `FREE`."""
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name) and name not in FREE:
            yield name
