"""Text for messages: short lists, near matches, names of signals, and text that is safe to print."""

import difflib
import re
import signal
from collections.abc import Iterable
from typing import Any
from unicodedata import combining, east_asian_width


def escaped(text: str) -> str:
    """Return `text` with escaped control characters, which could change the terminal; tabs and new lines stay."""
    controls = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
    return re.sub(controls, lambda match: match[0].encode("unicode_escape").decode(), text)


def signal_name(signum: int) -> str:
    """Return the name of a signal, such as SIGTERM for 15; real-time signals have none."""
    return signal.Signals(signum).name if signum in list(signal.Signals) else "real-time signal"


def killed_by(signum: int) -> str:
    """Describe in a few words which signal killed a process."""
    if signum == signal.SIGKILL:
        return "was killed by signal 9 (SIGKILL), as the kernel does when memory runs out (see dmesg),"
    return f"was killed by signal {signum} ({signal_name(signum)})"


def escaped_line(text: str) -> str:
    """Return `text` for one line of a log: new lines and tabs are escaped, too."""
    return escaped(text).replace("\n", "\\n").replace("\t", "\\t")


_SYNONYMS = (  # each row has words with one meaning, from this library and others
    ("n_epoch", "epochs", "epoch", "n_epochs", "num_epochs", "nb_epoch", "max_epochs", "num_train_epochs"),
    ("n", "max_n", "nrows"),
    ("n_steps", "steps", "max_steps", "total_steps"),
    ("lr_max", "lr", "learning_rate", "max_lr", "base_lr"),
    ("wd", "weight_decay"),
    ("cbs", "cb", "callback", "callbacks"),
    ("metrics", "metric", "compute_metrics"),
    ("opt_func", "optimizer", "optimizers", "optim", "opt"),
    ("loss_func", "loss", "loss_fn", "criterion"),
    ("dls", "data", "dataloaders", "datamodule", "loaders"),
    ("train_ds", "train_dataset", "train_data"),
    ("valid_ds", "val_ds", "val_dataset", "valid_dataset", "eval_dataset", "validation_data"),
    ("bs", "tokens", "batch_size", "train_batch_size"),
    ("valid_bs", "val_bs", "val_batch_size", "eval_batch_size"),
    ("accuracy", "acc", "val_acc", "valid_acc", "eval_acc"),
    ("f1", "f1_score", "f1_macro", "macro_f1"),
    ("comp", "mode"),
    ("min_delta", "delta"),
    ("fname", "filename"),
    ("n_batches", "accumulation_steps", "gradient_accumulation_steps", "accumulate_grad_batches"),
    ("num_workers", "workers", "n_workers", "nb_workers", "dataloader_num_workers"),
)


def printable(text: str, limit: int = 200) -> str:
    """Return `text` for a message: in one line, with escaped control characters; of a long text only the two ends."""
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]} ... ({len(text)} characters) ... {text[-half:]}"
    return escaped_line(text)


def did_you_mean(name: Any, allowed: Iterable[str], cutoff: float = 0.6) -> str:
    """Return `; did you mean 'x'?` for the allowed name of the same meaning, or the nearest; or an empty string."""
    name, names = str(name), list(map(str, allowed))
    same = [word for words in _SYNONYMS if name in words for word in words if word in names]
    near = same or difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


def first_few(names: Iterable[Any], joint: str = ", ", n: int = 5) -> str:
    """Join the first `n` names, safe to print, and say how many more there are."""
    names = list(names)
    return joint.join(printable(str(x), 1000) for x in names[:n]) + (
        f" and {len(names) - n} more" if len(names) > n else ""
    )


def counted(n: float, noun: str) -> str:
    """Return a number and a noun, such as `1 sample` or `2 samples`."""
    n = round(n, 2)
    return f"{n:.12g} {noun}{'' if n == 1 else 's'}"


def format_time(seconds: float) -> str:
    """Return seconds as `mm:ss`; below a minute with tenths, `00:ss.t`; from one hour on `h:mm:ss`."""
    tenths = round(seconds * 10)
    if tenths < 600:
        return f"00:{tenths // 10:02d}.{tenths % 10}"
    hours, rest = divmod(tenths // 10, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60:02d}:{rest % 60:02d}"


def in_units(n_bytes: float) -> str:
    """Return a number of bytes in a readable unit, such as 64 MB."""
    # A unit is used from 0.976 of it on: three digits would show 1,000 and more of the smaller unit with an exponent.
    power = next((power for power in (4, 3, 2, 1) if n_bytes >= 999.5 * 1024 ** (power - 1)), 0)
    return f"{n_bytes / 1024**power:.3g} {('bytes', 'KB', 'MB', 'GB', 'TB')[power]}"


def columns(text: str) -> int:
    """Return the width of a text in terminal columns: two for a wide character (Chinese, Japanese, Korean)."""
    return sum(2 if east_asian_width(c) in "WF" else 1 for c in text if not combining(c))


def in_one_line(error: BaseException) -> str:
    """Return the class of an error and the line of its text that describes it, safe to print."""
    text = str(error).strip()
    if "Original Traceback" in text:  # the error is from a loader's worker: the last line has the class and the text
        line = text.rpartition("\n")[2]
    else:
        line = f"{type(error).__name__}: {text}".partition("\n")[0].removesuffix(": ")
    return escaped(line if len(line) <= 400 else f"{line[:400]} ...")
