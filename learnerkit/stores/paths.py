"""A place in an object store, with the methods of `pathlib.Path` that this library uses.

A store keeps objects under keys. An object appears whole at the end of its upload, and nothing is renamed; what is
called a folder is the common beginning of keys. fsspec knows the stores; it finds credentials and addresses in the
environment, as each store's own tools do.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from learnerkit.text import in_one_line, printable

_SCHEME = "[A-Za-z][A-Za-z0-9+.-]+"  # of two letters at least, as 'C:' is a drive


class StoreError(OSError):
    """An error of a store that cannot be reached, or refuses; the text names the URL."""


@dataclass(frozen=True)
class StorePath:
    """A place in an object store.

    Args:
        url: the URL without a slash at its end, such as 's3://bucket/run'.
    """

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "StorePath":
        return StorePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """The part of the URL after its last slash."""
        return self.url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The end of the name from its last dot on."""
        return PurePosixPath(self.name).suffix

    @property
    def stem(self) -> str:
        """The name without its suffix."""
        return PurePosixPath(self.name).stem

    @property
    def parent(self) -> "StorePath":
        """The place above."""
        return StorePath(self.url.rpartition("/")[0])

    def with_name(self, name: str) -> "StorePath":
        """Return the place beside this one with another name."""
        return self.parent / name

    def with_stem(self, stem: str) -> "StorePath":
        """Return the place beside this one with another name and the same suffix."""
        return self.with_name(stem + self.suffix)

    def resolve(self) -> "StorePath":
        """Return this place, as a store has no links."""
        return self

    def is_symlink(self) -> bool:
        """Return False."""
        return False

    @contextmanager
    def _opened(self) -> Iterator[tuple[Any, str]]:
        """Yield the file system of fsspec, and the path in it.

        Raises:
            FileNotFoundError: there is no such object, or no such bucket.
            StoreError: any other error of the store.
        """
        from fsspec.core import url_to_fs

        try:
            yield url_to_fs(self.url, use_listings_cache=False)
        except FileNotFoundError as e:
            raise FileNotFoundError(f"{printable(self.url, 1000)}: there is no such object or bucket ({e})") from e
        except Exception as e:  # each store has errors of its own
            raise StoreError(f"{printable(self.url, 1000)}: {in_one_line(e)}") from e

    def _kind(self) -> str:
        # `isfile` of fsspec answers False where a store cannot be reached.
        try:
            with self._opened() as (system, path):
                return system.info(path)["type"]
        except FileNotFoundError:
            return ""

    def is_file(self) -> bool:
        """Tell whether this is an object."""
        return self._kind() == "file"

    def is_dir(self) -> bool:
        """Tell whether there are objects below this place."""
        return self._kind() == "directory"

    def _entries(self) -> dict[str, dict[str, Any]]:
        try:
            with self._opened() as (system, path):
                entries = system.ls(path, detail=True)
        except FileNotFoundError:
            return {}
        # The console of S3 makes an empty object for a folder, whose key is that of the folder with a slash.
        named = [(entry["name"].rstrip("/"), entry) for entry in entries]
        return {name.rpartition("/")[2]: entry for name, entry in named if name != path}

    def iterdir(self) -> Iterator["StorePath"]:
        """Yield the objects and folders in this folder; none if there is no such folder."""
        return (self / name for name in self._entries())

    def sizes(self) -> dict[str, int]:
        """Return the sizes in bytes of the objects in this folder, by name."""
        return {name: entry["size"] for name, entry in self._entries().items() if entry["type"] == "file"}

    def rglob(self, name: str) -> list["StorePath"]:
        """Return the objects of this name in the folder and below."""
        try:
            with self._opened() as (system, path):
                found = [each.removeprefix(path) for each in system.find(path)]
        except FileNotFoundError:
            return []
        return [StorePath(self.url + each) for each in found if each.endswith(f"/{name}")]

    def read_bytes(self) -> bytes:
        """Return the content of the object."""
        with self._opened() as (system, path):
            return system.cat_file(path)

    def write_bytes(self, content: bytes) -> None:
        """Write the object, or replace it."""
        with self._opened() as (system, path):
            system.pipe_file(path, content)

    def download(self, file: Path) -> None:
        """Copy the object into a file."""
        with self._opened() as (system, path):
            system.get_file(path, str(file))

    def upload(self, file: Path) -> None:
        """Copy a file into the object."""
        with self._opened() as (system, path):
            system.put_file(str(file), path)

    @contextmanager
    def copied(self) -> Iterator[Path]:
        """Yield a copy of the object in a temporary directory, under the same name."""
        with TemporaryDirectory() as folder:
            self.download(Path(folder, self.name))
            yield Path(folder, self.name)

    def remove(self, first: str) -> None:
        """Remove the object, or all objects below this place: those with the name `first` before the others."""
        with self._opened() as (system, path):
            for each in sorted(system.find(path), key=lambda each: not each.endswith(f"/{first}")):
                system.rm_file(each)


AnyPath = Path | StorePath


def of_home(path: Path) -> Path:
    """Return a path with the home directory in place of `~` or `~user`.

    Raises:
        ValueError: there is no such user, or the user has no home directory.
    """
    try:
        return path.expanduser()
    except RuntimeError as e:
        raise ValueError(
            f"got the path {str(path)!r}: {path.parts[0]!r} is no home directory of this machine; give the whole path, "
            f"or {str(path.absolute())!r} if a folder has this name"
        ) from e


def any_path(path: str | Path) -> AnyPath:
    """Return the place that a path or a URL names; 'file:///folder' is a path, and a str may begin with `~`.

    Raises:
        ImportError: the package of fsspec for this kind of store is missing.
        TypeError: neither a str nor a path.
        ValueError: the URL has a password or `..` in it, is of an unknown kind, or has become a `pathlib.Path`; or
            `~` is nobody's.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"got the path {path!r}; it is a str or a pathlib.Path")
    first, _, rest = str(path).partition("/")
    if not re.fullmatch(f"({_SCHEME}::?)+", first):
        return Path(path) if isinstance(path, Path) else of_home(Path(path))
    url = f"{first}//{rest.strip('/')}"
    if isinstance(path, Path):
        raise ValueError(f"got {path!r}, in which pathlib has made one slash of two: give a URL as a str, {url!r}")
    if "::" in first or not rest.startswith("//" if first == "file:" else "/"):
        raise ValueError(
            f"got {path!r}: a URL has two slashes, as s3://bucket/run, or three, as file:///folder, and names no other "
            "URL in it; a folder of this name is './...'"
        )
    if first == "file:":
        return Path(f"/{rest.strip('/')}")
    if ".." in rest.split("/") or not url.isprintable() or re.match(r"[^/@]*:[^/@]*@", rest.lstrip("/")):
        raise ValueError(
            f"got the URL {first}//...; it has no '..', no control characters and no password, which messages would "
            "show: a store finds its credentials in the environment"
        )
    from fsspec import get_filesystem_class

    try:
        get_filesystem_class(first[:-1])
    except ImportError as e:
        extra = "'learnerkit[s3]'" if first in ("s3:", "s3a:") else f"the package that it names ({e})"
        raise ImportError(f"{url} needs a package that fsspec does not have: pip install {extra}") from e
    except ValueError as e:
        raise ValueError(f"got {url!r}: {e}; fsspec.available_protocols() lists those that it knows") from e
    return StorePath(url)


def is_hidden(path: str | Path, folder: Path) -> bool:
    """Tell whether a file in a folder is hidden, or in a hidden folder within it: its name begins with a dot."""
    inside = str(path).removeprefix(f"{folder}{os.sep}")  # pathlib leaves out the folder '.'
    return f"{os.sep}." in f"{os.sep}{inside}"


def files_within(folder: Path, suffixes: str | tuple[str, ...]) -> list[str]:
    """Return the sorted paths of the files in a folder and those within it whose names end so, in any case of letters.

    Hidden ones are left out, and links to folders are followed. Paths are texts, as there may be millions.
    """
    paths = list[str]()
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not _leads_back(Path(place, name))]
        inside = (os.path.join(place, name) for name in names)
        paths += (path for path in inside if path.lower().endswith(suffixes) and not is_hidden(path, folder))
    return sorted(paths)


def _leads_back(folder: Path) -> bool:
    """Tell whether a folder is a link to one through which the way to it has come, so that the way would not end."""
    if not folder.is_symlink():
        return False
    target = folder.resolve()
    return any(each.resolve().is_relative_to(target) for each in folder.parents)


def local_folder(path: str | Path) -> Path:
    """Return the folder of a path; of a URL a copy of its objects, which the first process of a machine makes.

    Copies are kept in `~/.cache/learnerkit`, or in `$XDG_CACHE_HOME`. Objects that have changed, by name, size, ETag or
    time, make another copy.

    Raises:
        FileNotFoundError: there are no objects below the URL.
        StoreError: the store cannot be read, or a name leads out of the folder.
    """
    there = any_path(path)
    if isinstance(there, Path):
        return there
    import fcntl

    with there._opened() as (system, root):
        found = {each.removeprefix(f"{root}/"): about for each, about in system.find(root, detail=True).items()}
        if not found:
            raise FileNotFoundError("it has no objects")
        if root in found:
            raise ValueError("it is an object, and no folder")
        if any(name.startswith("/") or ".." in name.split("/") for name in found):
            raise ValueError("the name of an object leads out of the folder")
        signs = ("size", "ETag", "etag", "LastModified", "mtime", "created")  # `etag` is that of Azure
        said = [there.url, sorted((name, *(str(about.get(sign)) for sign in signs)) for name, about in found.items())]
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "learnerkit")
        folder = cache / hashlib.sha256(repr(said).encode()).hexdigest()[:16] / there.name
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.parent / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # other processes wait for the first
            if folder.is_dir():
                return folder
            with TemporaryDirectory(dir=folder.parent) as made, ThreadPoolExecutor(16) as threads:
                copy = Path(made, there.name)
                for name in found:
                    (copy / name).parent.mkdir(parents=True, exist_ok=True)
                list(threads.map(lambda name: system.get_file(f"{root}/{name}", str(copy / name)), found))
                copy.rename(folder)
    return folder
