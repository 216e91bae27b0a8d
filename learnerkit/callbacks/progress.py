"""Progress: a table and a live bar in a terminal, an HTML table and bar in a notebook, plain lines elsewhere."""

import html
import io
import sys
import time
from typing import Any

from tqdm import tqdm

from learnerkit.callback import Callback
from learnerkit.callbacks.recorder import TableLogger, format_row, format_value
from learnerkit.data.batches import loader_len
from learnerkit.data.show import pyplot
from learnerkit.state import Learner
from learnerkit.utils import front_end

_REFRESH = 0.1  # seconds; the bar is redrawn at most this often
_BAR = "{desc} {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
_TEXT = "{desc} {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
_NO_TOTAL = "{desc} {n_fmt} [{elapsed}, {rate_fmt}{postfix}]"  # for a loader without length


class ProgressCallback(Callback):
    """Shows the progress of training: smoothed loss, remaining time, and the table of finished epochs.

    The table goes to standard output and the terminal's bar to standard error, so a redirected output has only whole
    lines. The bar is redrawn at most ten times a second, with the newest loss on the host; it never waits for the
    device.
    """

    order = 60
    rank0_only = True

    _bar: tqdm | None = None
    _page: "NotebookPage | None" = None
    _logger: Any = None
    _task: str | None = None
    _next = 0.0
    _skipped = 0

    def before_fit(self) -> None:
        learn = self.learn
        self._task, self._skipped = learn.task, 0
        if front_end() == "notebook":
            self._page = NotebookPage(learn)
        if learn.task == "fit" and isinstance(learn.logger, TableLogger) and hasattr(learn, "recorder"):
            self._logger = learn.logger
            learn.logger = self._page or TableLogger(learn, print_above)
            if self._is_live():
                # Otherwise the header is printed with the first row, when the columns of logged metrics are known too.
                learn.logger.header()

    def _is_live(self) -> bool:
        return self._page is not None or (sys.stderr is not None and sys.stderr.isatty())

    def before_train(self) -> None:
        learn = self.learn
        steps = loader_len(learn.dl)
        # Batches that this fit has not read: those before `start_epoch`, or of epochs that were cancelled.
        self._skipped = steps * learn.epoch + learn.first_iter - learn.train_iter if steps else 0
        self._show_bar(self._where(), learn.n_steps or (steps or 0) * (learn.n_epoch or 0) or None)

    def before_validate(self) -> None:
        what = "predicting" if self.learn.task == "predict" else "validating"
        self._show_bar(f"{self._where()} {what}".lstrip(), loader_len(self.learn.dl))

    def after_batch(self) -> None:
        if self._bar is not None:
            now = time.perf_counter()
            if now >= self._next:
                self._next = now + _REFRESH
                self._draw(self._bar)

    def cleanup_validate(self) -> None:
        if self._bar is not None:  # a callback may have validated during training
            self._bar.set_description_str(self._where(), refresh=False)

    def cleanup_fit(self) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._page is not None:
            self._page.close()
        if self._logger is not None:
            self.learn.logger = self._logger
        self._bar = self._page = self._logger = None

    def _where(self) -> str:
        # The bar counts epochs from 1; the table counts from 0, as callbacks do.
        learn = self.learn
        if self._task != "fit":
            return "finding the rate" if self._task == "lr_find" else ""
        return f"epoch {learn.epoch + 1}" + (f"/{learn.n_epoch}" if learn.n_epoch else "")

    def _show_bar(self, text: str, total: int | None) -> None:
        if self._bar is None and self._is_live():
            self._next = time.perf_counter() + _REFRESH
            # In a notebook tqdm only measures time and formats the text; NotebookPage displays it.
            output = {"file": io.StringIO()} if self._page else {"dynamic_ncols": True}
            form = _BAR if total else _NO_TOTAL
            done = self._skipped + (self.learn.train_iter if self._task == "fit" else 0)
            self._bar = tqdm(total=total, initial=done, leave=False, bar_format=form, **output)
        if self._bar is not None:
            self._bar.set_description_str(text, refresh=self._page is None)

    def _draw(self, bar: tqdm) -> None:
        learn = self.learn
        if self._task in ("validate", "predict"):
            bar.n = learn.iter + 1
        else:
            bar.n = round(learn.pct_train * learn.n_steps) if learn.n_steps else self._skipped + learn.train_iter
        if self._task == "fit":
            losses = learn.recorder.recent_losses() if hasattr(learn, "recorder") else ()
            if losses:
                bar.set_postfix_str(f"loss {losses[-1]:.4f}", refresh=False)
        bar.refresh()
        if self._page is not None:
            self._page.bar = bar
            self._page.show()


def print_above(line: str) -> None:
    """Print a line above the bar, if there is one; letters that the output does not have are escaped."""
    if sys.stdout is None:  # The caller has closed it, as a shell does by `>&-`; `print` drops the line then, too.
        return
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    line = line.encode(encoding, "backslashreplace").decode(encoding)
    tqdm.write(line, file=sys.stdout)  # This clears the bars, writes the line and draws them again.
    sys.stdout.flush()  # A log file can then be followed.


class NotebookPage:
    """The output of a notebook cell: the table and, below it, a bar that is removed at the end.

    It is the learner's logger during a fit.
    """

    def __init__(self, learn: "Learner") -> None:
        self.learn = learn
        self.names: list[str] = []
        self.rows: list[dict[str, Any] | str] = []  # a str is a line printed by `say`
        self.bar: tqdm | None = None
        self._handle: Any = None
        self._next = 0.0  # the time from which a row is shown at once
        self._lines: tuple[list[str], list[str], list[str]] = [], [], []  # columns, and the rows so far with these

    def __call__(self, row: list) -> None:
        """Add a row."""
        names = self.learn.recorder.metric_names
        self.rows.append(dict(zip(names, row, strict=True)))
        # Logged metrics may differ from row to row; those of earlier rows keep their columns, before the time.
        end = len(names) - (names[-1] == "time")
        self.names = [*names[:end], *(name for name in self.names if name not in names), *names[end:]]
        if time.perf_counter() >= self._next:  # otherwise the bar or a later row shows it
            self.show()
            self._next = time.perf_counter() + _REFRESH

    def header(self) -> None:
        """Show the columns before there is a row."""
        self.names = list(self.learn.recorder.metric_names)
        self.show()

    def say(self, line: str) -> None:
        """Show a line between the rows so far and those to come."""
        self.rows.append(line)
        self.show()

    def close(self) -> None:
        """Remove the bar, and without a table the whole output."""
        self.bar = None
        if self.names:
            self.show()
        elif self._handle is not None:
            self._handle.update({}, raw=True)

    def show(self) -> None:
        """Display the table and the bar, in place of what was displayed before."""
        from IPython.display import display

        head = [format_row(self.names, self.names)] if self.names else []
        made, plain = self._made()
        content = {"text/html": self._html(made), "text/plain": "\n".join([*head, *plain])}
        if self._handle is None:
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)

    def _made(self) -> tuple[list[str], list[str]]:
        """Return the lines of all rows, in HTML and as text, of which only new ones are made."""
        if self._lines[0] != self.names:
            self._lines = list(self.names), [], []
        _, made, plain = self._lines
        for row in self.rows[len(made) :]:
            if isinstance(row, str):
                columns = len(self.names)
                made.append(f'<tr><td colspan="{columns}" style="text-align: left">{html.escape(row)}</td></tr>')
                plain.append(row)
            else:
                cells = [row.get(name, "") for name in self.names]
                made.append(_html_row(cells, "td"))
                plain.append(format_row(self.names, cells))
        return made, plain

    def _html(self, rows: list[str]) -> str:
        lines, bar = [], self.bar
        if self.names:
            lines.append("<table><thead>" + _html_row(self.names, "th") + "</thead><tbody>")
            lines += rows
            lines.append("</tbody></table>")
        if bar is not None:
            form = _TEXT if bar.total else _NO_TOTAL
            text = html.escape(bar.format_meter(**{**bar.format_dict, "bar_format": form}))
            done = f'value="{bar.n}" max="{bar.total}" ' if bar.total else ""
            lines.append(
                f'<div><progress {done}style="width: 20em"></progress> '
                f'<span style="font-family: monospace">{text}</span></div>'
            )
        return "\n".join(lines)


class ShowGraphCallback(Callback):
    """Shows a plot of the losses in a notebook, and updates it after each epoch. In a script it does nothing.

    Raises:
        ImportError: matplotlib is not installed, in a notebook.
    """

    order = 65
    rank0_only = True
    only_fit = True

    def before_fit(self) -> None:
        self._handle: Any = None

    def after_epoch(self) -> None:
        if front_end() != "notebook":
            return
        from IPython.display import display

        plt = pyplot("ShowGraphCallback")
        figure, ax = plt.subplots()
        self.learn.recorder.plot_loss(ax=ax)
        plt.close(figure)  # Otherwise it would be shown again at the end of the cell.
        if self._handle is None:
            self._handle = display(figure, display_id=True)
        else:
            self._handle.update(figure)


def _html_row(cells: list, tag: str) -> str:
    values = (html.escape(format_value(cell)) for cell in cells)
    return "<tr>" + "".join(f'<{tag} style="text-align: right">{value}</{tag}>' for value in values) + "</tr>"
