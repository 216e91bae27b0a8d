"""The display of samples: images as a matplotlib figure; text, and rows of a table, as a table."""

import html
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from learnerkit.data.batches import Rows, likely_sizes, rows_of, with_rows
from learnerkit.data.cuts import rows_first
from learnerkit.text import columns, escaped_line
from learnerkit.utils import front_end
from learnerkit.values import describe, entries

if TYPE_CHECKING:
    from learnerkit.data.loaders import DataLoaders

WIDTH = 100  # the terminal columns that a table may take
_LEAST = 8  # the least width to which a column is narrowed
_COLUMNS = 12  # a vector with more numbers is shown in one cell
_NUMBER = re.compile(r"[-+]?[\d,]*+\.?\d*+(e[-+]\d+|%)?|nan|-?inf")  # it also matches an empty text
WRONG = "wrong: "
"""The mark before a prediction that is not the target."""


def pyplot(who: str) -> Any:
    """Import matplotlib's `pyplot` for the function of the name `who`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as e:
        raise ImportError(f"{who} needs matplotlib: pip install matplotlib") from e
    return plt


def panels(who: str, n: int, height: float) -> Any:
    """Return the axes of `n` panels of a figure, three in a row, for the function of the name `who`.

    Args:
        who: as in `pyplot`.
        n: how many.
        height: the height of a panel, in inches.
    """
    down, across = math.ceil(n / 3), min(3, n)
    size = 4 * across, height * down
    _, axes = pyplot(who).subplots(down, across, figsize=size, squeeze=False, layout="constrained")
    for ax in axes.flat[n:]:
        ax.set_visible(False)
    return axes.flat[:n]


def label_steps(ax: Any, **labels: str) -> None:
    """Label the axes of a plot over steps, which are whole numbers."""
    from matplotlib.ticker import MaxNLocator

    ax.set(xlabel="step", **labels)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


class Table:
    """A table of rows under column names: aligned text where it is printed, and HTML in a notebook.

    Args:
        names: the names of the columns.
        rows: a list of cells for each row; floats are shown with four digits, or as whole numbers.
    """

    def __init__(self, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        self.names, self.rows = list(names), [list(row) for row in rows]

    def __repr__(self) -> str:
        lines = [self.names, *([cell(x) for x in row] for row in self.rows)]
        right = [all(_NUMBER.fullmatch(line[i]) for line in lines[1:]) for i in range(len(self.names))]
        needed = [max((columns(line[i]) for line in lines[1:]), default=0) for i in range(len(self.names))]
        widths = _narrowed(list(map(max, needed, map(columns, self.names))), needed)
        return "\n".join("  ".join(map(_padded, line, widths, right)).rstrip() for line in lines)

    def _repr_html_(self) -> str:
        def line(tag: str, cells: list[str], color: str = "") -> str:
            style = "text-align: left; max-width: 50em; white-space: normal" + color
            return "<tr>" + "".join(f'<{tag} style="{style}">{html.escape(x)}</{tag}>' for x in cells) + "</tr>"

        rows = [[cell(x) for x in row] for row in self.rows]
        red = ["; color: #d62728" if any(x.startswith(WRONG) for x in row) else "" for row in rows]
        body = "".join(line("td", *each) for each in zip(rows, red, strict=True))
        # Notebooks style tables of this class as pandas' tables.
        return f'<table class="dataframe"><thead>{line("th", self.names)}</thead><tbody>{body}</tbody></table>'


def _narrowed(widths: list[int], needed: list[int]) -> list[int]:
    """Narrow the widest columns until a table fits into a terminal, first those that only their name makes wide.

    Args:
        widths: the widths of the columns with their names.
        needed: the widths of their cells alone.
    """
    widths = list(widths)
    while sum(widths) + 2 * (len(widths) - 1) > WIDTH and max(widths) > _LEAST:
        long_names = [width if width > max(cells, _LEAST) else 0 for width, cells in zip(widths, needed, strict=True)]
        among = long_names if any(long_names) else widths
        widths[among.index(max(among))] -= 1
    return widths


def _padded(text: str, width: int, right: bool) -> str:
    if columns(text) > width:
        # A document has more letters than can be taken off one by one.
        text = text[: bisect_right(range(len(text)), width - 3, key=lambda end: columns(text[: end + 1]))] + "..."
    space = " " * (width - columns(text))
    return space + text if right else text + space


def cell(x: Any) -> str:
    """Return the text of a value, in one line."""
    x = _as_tensor(x)
    if isinstance(x, Tensor) and x.numel() == 1:
        x = x.item()
    if isinstance(x, float):
        return f"{x:.0f}" if 1e4 <= abs(x) < 1e9 else f"{x:.4g}"
    if isinstance(x, Tensor) and x.ndim == 1:
        x = x.tolist()
    if isinstance(x, list | tuple) and not any(isinstance(each, Tensor | list | tuple | Mapping) for each in x):
        more = f" ... ({len(x)} values)" if len(x) > _COLUMNS else ""
        return " ".join(map(cell, x[:_COLUMNS])) + more
    return escaped_line(str(x) if isinstance(x, str | int | None) else describe(x))


def _as_tensor(x: Any) -> Any:
    """Return numbers of numpy as a tensor, and anything else as it is."""
    is_numbers = isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "biuf" and x.dtype.itemsize <= 8
    return torch.from_numpy(np.array(x)) if is_numbers else x


def label(y: Any, classes: Sequence[str] | Callable[[Tensor], str] | None) -> str:
    """Return the text of a target or of a decoded prediction: the name of a class, of several, or a number.

    Args:
        y: the target or prediction of one sample.
        classes: the names of the classes, if they are known, or a function that returns the text of a target.
    """
    if isinstance(y, tuple):
        return ", ".join(label(each, classes) for each in y)
    y = _as_tensor(y)
    if callable(classes):
        return classes(y)
    if isinstance(y, Tensor) and y.numel() == 1:
        y = y.item()
    if isinstance(y, bool | int | float) and y == int(y if math.isfinite(y) else 0):
        return str(classes[int(y)]) if classes and 0 <= y < len(classes) else str(int(y))
    # Integers as many as there are classes may be classes of tokens.
    is_mask = isinstance(y, Tensor) and y.ndim == 1 and (y.dtype == torch.bool or y.is_floating_point())
    if is_mask and classes and len(y) == len(classes):
        return ", ".join(str(name) for name, there in zip(classes, (y > 0.5).tolist(), strict=True) if there) or "none"
    return cell(y.int() if isinstance(y, Tensor) and y.dtype == torch.bool else y)  # targets may be 0.0 and 1.0


DRAWN = ("points", "boxes", "masks")
"""The kinds of targets that are drawn over pictures."""


def note(y: Any, dls: "DataLoaders") -> Any:
    """Return the text of one sample's target or decoded prediction, or the target itself if it is drawn."""
    if dls.targets in DRAWN:
        return y[0] if isinstance(y, tuple) else y
    return label(y, dls.target_names)


# Samples


def samples_of(dls: "DataLoaders", batch: Any, n: int) -> list[tuple[tuple, tuple]]:
    """Return the (inputs, targets) of the first `n` samples of a batch."""
    xb, yb = dls.split(batch)
    inputs, targets, _ = dls.dims_of(xb, yb)
    parts = *rows_first(xb, inputs), *rows_first(yb, targets)
    size = dls.batch_size(batch) if dls.batch_size else max(likely_sizes(parts), default=rows_of(parts))
    rows = tuple(with_rows(part, size) for part in parts)
    samples = (nth(rows, i, size) for i in range(min(n, size)))
    return [(sample[: len(xb)], sample[len(xb) :]) for sample in samples]


def nth(part: Any, i: int, size: int) -> Any:
    """Return the part of a batch of `size` samples, with `Rows`, that belongs to its `i`-th sample."""
    if isinstance(part, Rows) or (isinstance(part, Tensor | np.ndarray) and part.ndim and len(part) == size):
        return part[i]
    if isinstance(part, Mapping):
        return {key: nth(value, i, size) for key, value in part.items()}
    return tuple(nth(x, i, size) for x in part) if isinstance(part, tuple | list) else part


def show(dls: "DataLoaders", inputs: list[tuple], notes: dict[str, list[Any]], title: str = "") -> Any:
    """Show samples on rank 0.

    Args:
        dls: the loaders; their `decode` converts an input to its shown form.
        inputs: the inputs of each sample.
        notes: the texts for each sample, by their kind, such as 'target'; `WRONG` marks a wrong prediction. Values
            other than texts are drawn, targets in green, and predictions in red; of masks, the prediction in colours,
            and the outlines of the target if there are both.
        title: the title of the figure.

    Returns:
        A matplotlib figure of images, or a `Table` of anything else; `None` on other ranks. A notebook displays it if
        it is the value of a cell.

    Raises:
        ValueError: there are no samples.
    """
    if not inputs:
        raise ValueError("there are no samples to show; n is 1 or more, and the loader has to have a batch")
    shown: list = [x[0] if len(x) == 1 else x for x in inputs]
    if dls.decode:
        shown = [dls.decode(*x) for x in inputs]
    pictures = [picture for x in shown if (picture := _picture(x)) is not None]
    if len(pictures) == len(shown):
        return _figure(
            pictures, [dict(zip(notes, each, strict=True)) for each in zip(*notes.values(), strict=True)], title
        )
    rows = [_row(x) for x in shown]
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[row.get(name, "") for name in names] for row in rows]
    return Table([*names, *notes], [[*row, *(note[i] for note in notes.values())] for i, row in enumerate(cells)])


def _row(x: Any) -> dict[str, Any]:
    """Return the cells of an input by column."""
    x = _as_tensor(x)
    if isinstance(x, str):
        return {"text": x}
    if isinstance(x, Mapping):
        return {str(key): cell(value) for key, value in x.items()}
    if isinstance(x, tuple):
        return {f"input {i}": cell(part) for i, part in enumerate(x)}
    if isinstance(x, Tensor) and x.ndim == 1 and len(x) <= _COLUMNS:
        return {str(i): value for i, value in enumerate(x.tolist())}
    return {"input": cell(x)}


# Images


def _picture(x: Any) -> Tensor | None:
    """Return an image as a tensor of shape (H, W) or (H, W, 3 or 4), or `None` for anything else.

    A tensor or array has the shape (C, H, W), (H, W, C) or (H, W); of 2 or more than 4 channels, the first is shown.
    """
    if isinstance(x, Mapping):
        return next((found for _, part in entries(x) if (found := _picture(part)) is not None), None)
    if hasattr(x, "convert") and hasattr(x, "mode"):  # PIL
        x = np.array(x if x.mode in ("L", "RGB", "RGBA") else x.convert("RGB"))
    if not isinstance(x, Tensor | np.ndarray) or x.ndim not in (2, 3):
        return None
    x = x.detach().cpu() if isinstance(x, Tensor) else torch.from_numpy(np.array(x))  # the array may be read-only
    if x.ndim == 3:
        if x.shape[0] in (3, 4):
            x = x.movedim(0, -1)
        elif x.shape[-1] == 1:
            x = x[..., 0]
        elif x.shape[-1] not in (3, 4) or x.shape[0] == 1:
            x = x[0]
    return x.float() / 255 if x.dtype == torch.uint8 else x.float().nan_to_num(0.0, 0.0, 0.0)


def _figure(pictures: list[Tensor], notes: list[dict[str, Any]], title: str) -> Any:
    low, high = min(float(p.min()) for p in pictures), max(float(p.max()) for p in pictures)
    if low < 0 or high > 1:  # normalised images are rescaled by one range, so that they can be compared
        pictures = [(p - low) / max(high - low, 1e-12) for p in pictures]
    plt = pyplot("show")
    across = math.ceil(math.sqrt(len(pictures)))
    down = math.ceil(len(pictures) / across)
    notes = notes or [{}] * len(pictures)
    texts = [[text for text in each.values() if isinstance(text, str)] for each in notes]
    lines = max(map(len, texts))
    size = 2 * across, (1.9 + 0.2 * lines) * down + 0.3 * bool(title)
    figure, axes = plt.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
    for ax in axes.flat:
        ax.axis("off")
    for ax, picture, each, written in zip(axes.flat, pictures, notes, texts, strict=False):
        ax.imshow(picture.numpy(), cmap="gray", vmin=0, vmax=1)
        wrong = {"color": "tab:red"} if any(line.startswith(WRONG) for line in written) else {}
        ax.set_title("\n".join(written), fontsize=9, **wrong)
        drawn = {name: y for name, y in each.items() if not isinstance(y, str)}
        for name, y in drawn.items():
            _draw(ax, y, "tab:green" if name == "target" else "tab:red", outlines=len(drawn) > 1 and name == "target")
    if title:
        figure.suptitle(title, fontsize=10)
    if front_end() == "notebook":
        plt.close(figure)  # otherwise the notebook shows it twice, as a figure and as the value of the cell
    return figure


def _draw(ax: Any, y: Any, color: str, outlines: bool) -> None:
    "Draw a dict of boxes, points (k, 2) or a mask (H, W) over a picture."
    from matplotlib.patches import Rectangle

    if isinstance(y, Mapping):
        for x0, y0, x1, y1 in y["boxes"].tolist():
            ax.add_patch(Rectangle((x0 - 0.5, y0 - 0.5), x1 - x0, y1 - y0, fill=False, edgecolor=color, linewidth=2))
    elif y.is_floating_point():
        ax.scatter(
            *(y.reshape(-1, 2).T - 0.5).tolist(), color=color, s=20
        )  # matplotlib's 0 is in the middle of the first pixel
    elif outlines:
        for number in y.unique().tolist():
            ax.contour((y == number).numpy(), [0.5], colors="white", linewidths=1)
    else:
        ax.imshow(np.ma.masked_less(y.numpy(), 0), cmap="tab20", vmin=0, vmax=19, alpha=0.5, interpolation="nearest")
