"""The units of a model: the parts that are sharded, or whose activations are computed again, each as a whole."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.utils import parametrize

from learnerkit.text import did_you_mean, first_few, in_units
from learnerkit.utils import listify

# Shares of the model's parameters.
_LARGE = 1 / 4  # lists that count; an element that is divided if it consists of lists
_COMPARABLE = 1 / 10  # the size of further lists that count, as a share of the largest one
_DIVISIBLE = 4 / 5  # the share of an element that is in lists, if it consists of lists
_SIZABLE = 1 / 16  # a child, where nothing is repeated


def units(
    model: nn.Module, chosen: bool | Iterable[str | type[nn.Module]] = True, argument: str = "shard"
) -> dict[str, nn.Module]:
    """Return the units of a model by their names in it, in the model's order; the model itself is none.

    Those of `chosen=True` are found by structure, and none is inside another. They are the modules of the class of
    which the largest list of equal modules consists, such as the blocks of a transformer, and of the classes of
    comparable lists. Modules of a list have one class and one parent, at any depth; lists of layers without parts count
    where there are no others. Large elements that themselves consist of such lists, such as the stages of a ResNet, are
    divided. In a model in which nothing is repeated units are the sizable parts.

    No unit is a module that is not called, as it has no `forward` (`nn.ModuleList`), nor one that shares a parameter
    with a module outside itself: all owners of a tied weight stay with the model. A module at two places is one unit.

    Args:
        model: any module; also one on the meta device.
        chosen: True, or names of modules, patterns of names (`"layers.*"`) and classes. Of the matches of one pattern
            or class the outermost count. False: none.
        argument: what the caller calls `chosen`, for the messages.

    Raises:
        TypeError: an entry of `chosen` that is neither a str nor a class.
        ValueError: a name or a class that no module has, or one that cannot be a unit; or no rule fits the model.
    """
    parts = _Parts(model)
    if chosen is True:
        modules = parts.repeated() or parts.sizable(model)
        if not modules or (len(modules) == 1 and parts.size(*modules) == parts.size(model)):
            raise ValueError(
                f"{type(model).__name__} has no list of equal modules and no sizable parts that could be its units; "
                f"say by {argument}=[...] which modules they are, by names or classes. The largest are\n"
                f"{parts.table()}\n (errors.html#units)"
            )
    else:
        modules = [m for entry in listify(chosen or None) for m in parts.chosen(entry, argument)]
    wanted = set(modules)
    return {name: m for name, m in model.named_modules() if m in wanted}


class _Parts:
    """The parts of a model: how large they are, which are equal, and which can be units."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.named = list(model.named_modules(remove_duplicate=False))
        self.places = Counter(m for _, m in self.named)  # the number of places of each module
        self.parameter_places = _places(model)

    def size(self, *modules: nn.Module) -> int:
        """Count the elements of the parameters of these modules."""
        return sum(p.numel() for p in _held(modules))

    def can_be(self, m: nn.Module) -> bool:
        """Tell whether a module can be a unit: it is called, and its parameters have no place outside it."""
        is_called = type(m).forward is not nn.Module.forward
        shared = (n * self.places[m] != self.parameter_places[p] for p, n in _places(m).items())
        return m is not self.model and is_called and not any(shared)

    def lists(self, m: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
        """Yield the lists in a module: the parent of each, and its elements that can be units."""
        for parent in dict.fromkeys(_descendants(m)):
            kinds = _by_kind(filter(self.can_be, _within(parent)))
            # A list of one block is a list, too: a model may be a small one of its kind.
            for elements in kinds.values():
                if len(elements) > 1 or isinstance(parent, nn.ModuleList):
                    yield parent, elements

    def is_divided(self, parent: nn.Module, elements: list[nn.Module]) -> bool:
        """Tell whether the elements of a list consist of lists themselves, so that they are no units."""
        sizes = [self.size(element) for element in elements]
        # Blocks with experts consist of lists, too, but experts are no units: not all of them run on each batch.
        are_blocks = isinstance(parent, nn.ModuleList | nn.Sequential) and max(sizes) <= 2 * min(sizes)
        if are_blocks or max(sizes) < _LARGE * self.size(self.model):
            return False
        inner = [m for e in elements for _, blocks in self.lists(e) for m in blocks if _within(m)]
        return self.size(*inner) >= _DIVISIBLE * self.size(*elements)

    def repeated(self) -> list[nn.Module]:
        """Return the modules of the classes of the largest lists; none if these lists are small."""
        lists = [elements for parent, elements in self.lists(self.model) if not self.is_divided(parent, elements)]
        for have_parts in (True, False):
            kinds = _by_kind(m for elements in lists for m in elements if bool(_within(m)) is have_parts)
            sizes = {kind: self.size(*modules) for kind, modules in kinds.items()}
            largest = max(sizes.values(), default=0)
            taken = [kind for kind, size in sizes.items() if size >= _COMPARABLE * largest]
            modules = [m for m in _descendants(self.model) if _kind(m) in taken and self.can_be(m)]
            # They are counted, too: the blocks of a small model with a large vocabulary have few of its elements.
            are_most = have_parts and 2 * len(_held(modules)) >= len(_held([self.model]))
            if modules and (are_most or self.size(*modules) >= _LARGE * self.size(self.model)):
                return outermost(modules)
        return []

    def sizable(self, m: nn.Module) -> list[nn.Module]:
        """Return the parts of a module that hold much of the model; if one holds more than half, its own parts."""
        parts, whole = list[nn.Module](), self.size(self.model)
        for child in _within(m):
            size = self.size(child)
            if size >= _SIZABLE * whole:
                inner = self.sizable(child) if size > whole / 2 or not self.can_be(child) else []
                parts += inner or [child] * self.can_be(child)
        return parts

    def chosen(self, entry: str | type[nn.Module], argument: str) -> list[nn.Module]:
        """Return the modules that an entry of `chosen` names."""
        modules = {name: m for name, m in self.named if name}
        if isinstance(entry, str):
            given, known = entry, list(modules)
            matches = [m for name, m in modules.items() if name == entry or fnmatchcase(name, entry)]
        elif isinstance(entry, type):
            given, known = entry.__name__, list(dict.fromkeys(type(m).__name__ for m in modules.values()))
            matches = [m for m in modules.values() if isinstance(m, entry)]
        else:
            raise TypeError(f"got {entry!r} in {argument}=; it takes names of modules, patterns of names, and classes")
        able = [m for m in matches if self.can_be(m)]
        if not matches:
            raise ValueError(
                f"{type(self.model).__name__} has no module {given!r}, which {argument}= names"
                f"{did_you_mean(given, known)}; there are {first_few(known, n=10)} (errors.html#units)"
            )
        if not able:
            raise ValueError(
                f"{argument}= names {given!r}, which is no unit: a unit is a module that has a forward (name the "
                "elements of a ModuleList: 'layers.*') and shares no parameter with modules outside itself"
                " (errors.html#units)"
            )
        return outermost(able)

    def table(self) -> str:
        """Format the largest modules, with the bytes of their parameters."""
        rows = [(sum(p.nbytes for p in m.parameters()), name, type(m).__name__) for name, m in self.named]
        largest = sorted(rows, key=lambda row: -row[0])[:12]
        return "\n".join(f"  {name or '(the model)'}  {kind}  {in_units(size)}" for size, name, kind in largest)


def _held(modules: Iterable[nn.Module]) -> set[Tensor]:
    return {p for m in modules for p in m.parameters()}


def _places(m: nn.Module) -> Counter[Tensor]:
    """Count the places of each parameter in a module."""
    return Counter(p for _, p in m.named_parameters(remove_duplicate=False))


def _within(m: nn.Module) -> list[nn.Module]:
    """Return the children that have parameters; none for a module that reads these itself."""
    # These two read the parameters of their children themselves.
    is_whole = isinstance(m, nn.MultiheadAttention) or parametrize.is_parametrized(m)
    return [] if is_whole else [child for child in m.children() if _held([child])]


def _descendants(m: nn.Module) -> Iterator[nn.Module]:
    yield m
    for child in _within(m):
        yield from _descendants(child)


def _kind(m: nn.Module) -> object:
    """Return a key that equal modules share: the class, and for an `nn.Sequential` the classes in it."""
    kind = parametrize.type_before_parametrizations(m)  # Each parametrized module has another class.
    return (kind, frozenset(map(type, m.children()))) if kind is nn.Sequential else kind


def _by_kind(modules: Iterable[nn.Module]) -> dict[object, list[nn.Module]]:
    kinds: dict[object, list[nn.Module]] = defaultdict(list)
    for m in modules:
        kinds[_kind(m)].append(m)
    return kinds


def outermost(modules: list[nn.Module]) -> list[nn.Module]:
    """Return the modules that are inside none of the others."""
    inside = {part for m in modules for part in m.modules() if part is not m}
    return [m for m in modules if m not in inside]
