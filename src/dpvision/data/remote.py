"""Tar and parquet files of a source that fsspec opens: ``s3://``, ``gs://``, ``https://``,
``hf://``, ``file://``, ``memory://`` and whatever else has a package for it.

Credentials are those that the package finds by itself. Each file is copied into the folder of the
import, read there and removed, so an import needs the space of one file for each process, and
images are copied to the store.
"""

import contextlib
import errno
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from dpvision.data.beside import check_packed, is_hidden
from dpvision.data.folders import is_image
from dpvision.data.img2dataset import rows_only, stats_of
from dpvision.data.parquet_files import Layout, parquet_layout
from dpvision.data.sample import Sample, SourcePart
from dpvision.errors import DataError

_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):/")
"""Also of a path, in which two slashes become one."""
_OF_A_VERSION = frozenset(
    (
        *("size", "etag", "mtime", "created", "modified", "lastmodified", "updated", "ino"),
        *("generation", "md5hash", "contentmd5", "digest", "versionid", "checksum", "blobid"),
    )
)
"""Names of entries that another version of a file changes, in lower case, letters and digits only.
Others change by themselves: signed addresses, times of access.
"""
_VERSIONS = ("ETag", "Content-MD5", "Digest", "Last-Modified")
"""Headers of a version, the strictest first."""
_SILENCE_S = 60.0
"""A server that sends nothing for so long has failed."""
_HTTP = ("http://", "https://")
_MOST_NAME_BYTES = 255
"""Of a file on a disk."""
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_KINDS = (".tar", ".parquet")


def is_url(source: str | Path) -> bool:
    """Return whether a source is opened by fsspec."""
    return isinstance(source, str) and "://" in source


def check_local(store_dir: str | Path, where: str) -> None:
    """Raise DataError for a store that would not be on a disk of this machine, or among ledgers."""
    if _URL.match(str(store_dir)):
        raise DataError(
            f"{where}: store={store_dir}; expected a folder of a mounted disk, because runs read "
            "records one by one and lock the ledgers beside the store. Choose one; sources may be "
            "remote."
        )
    if "LEDGERS" in Path(store_dir).resolve().parts:
        raise DataError(
            f"{where}: store={store_dir}; expected it outside of LEDGERS, whose files are "
            "ledgers of other stores. Choose another folder."
        )


@dataclass(frozen=True)
class RemoteFile:
    """A file, and its version when it was listed."""

    url: str
    stamp: list[Any]

    @classmethod
    def of(cls, url: str) -> "RemoteFile":
        """Look a file up. Raises as ``opening``."""
        return cls(url, _stamp(url))

    @property
    def base(self) -> str:
        """str: the last part of its name."""
        return _path(self.url).name

    @contextlib.contextmanager
    def fetched(self, folder: Path) -> Iterator[Path]:
        """Yield a copy in ``folder``, under the file's own name, which is removed afterwards.

        Raises:
            DataError: as ``opening``; the file ends early, or is damaged, as the block found.
        """
        path = folder / self.base
        if (size := len(os.fsencode(self.base))) > _MOST_NAME_BYTES:
            raise DataError(
                f"source: {self.url}: a name of {size} bytes; expected at most {_MOST_NAME_BYTES}. "
                "Rename the file."
            )
        try:
            with opening(self.url) as (system, inside):
                system.get_file(inside, str(path), **self._checked(system))
            found, wanted = path.stat().st_size, self.stamp[0]
            if wanted and found != wanted:
                raise DataError(
                    f"source: {self.url}: {found:,} bytes came; expected {wanted:,}. Run the same "
                    "command again."
                )
            yield path
        except DataError as error:
            raise DataError(str(error).replace(str(path), self.url)) from error
        finally:
            path.unlink(missing_ok=True)

    def _checked(self, system: Any) -> dict[str, Any]:
        """Options of ``get_file`` that compare the version of an answer with ``stamp``.

        Only of HTTP, where replicas can differ; stores of objects answer all alike.
        """
        if not self.url.startswith(_HTTP):
            return {}

        async def check(response: Any) -> None:
            told, headers = self.stamp[1], response.headers
            name = next((name for name in _VERSIONS if name in told and name in headers), None)
            if response.status != 200 or name is None:
                return
            got, wanted = (text.removeprefix("W/") for text in (headers[name], told[name]))
            if got != wanted:
                raise DataError(
                    f"source: {self.url}: {name} {got} came; expected {wanted}, as its server "
                    "stated before. Run the same command again, once the file is at rest on all "
                    "servers of that address."
                )

        # Uncompressed, as fsspec asks for the version: compressed files have another ETag.
        headers = {**system.kwargs.get("headers", {}), "Accept-Encoding": "identity"}
        return {"headers": headers, "raise_for_status": check}


@dataclass(frozen=True)
class RemotePart:
    """One file of a source, read from a copy of its own."""

    file: RemoteFile
    part: Any
    """A TarPart or ParquetPart, whose path is set when the file is here."""

    @property
    def name(self) -> str:
        """The URL."""
        return self.file.url

    @property
    def stamp(self) -> list[Any]:
        """As ``RemoteFile``."""
        return self.file.stamp

    def now(self) -> list[Any]:
        """The version of the file now."""
        return _stamp(self.file.url)

    @property
    def settings(self) -> list[Any]:
        """Of the part, without its place."""
        return self.part.settings[1:]

    @property
    def shared(self) -> bool:
        """bool: whether another process finds the file."""
        return not self.file.url.startswith("memory:")

    def samples(self, noted: dict[str, Any], scratch: Path) -> Iterator[Sample]:
        """Yield the samples of the file."""
        with self.file.fetched(scratch) as path:
            yield from replace(self.part, path=path).samples(noted, scratch)

    def check(self, noted: dict[str, Any], seen: set[str]) -> None:
        """As the part."""
        self.part.check(noted, seen)


@contextlib.contextmanager
def opening(url: str) -> Iterator[tuple[Any, str]]:
    """Yield the file system of a URL and the path in it.

    Raises:
        DataError: its package is not installed, credentials are missing or refused, there is no
            such file, or the connection broke.
        OSError: this machine's disk is full.
    """
    import fsspec

    protocol = url.partition(":")[0]
    try:
        system, inside = fsspec.core.url_to_fs(url)
        if url.startswith(_HTTP):
            _wait_for_answers(system)
        yield system, inside
    except DataError:
        raise
    except ImportError as error:
        raise DataError(
            f"source: {url}: {error}; expected the package that opens {protocol}://. Install it "
            "with pip, or copy the files to a disk."
        ) from None
    except FileNotFoundError:
        raise DataError(
            f"source: {url}: no such file, or no answer; expected a .tar or .parquet file, a "
            "folder of them, or a pattern. Check the address, and whether you may read it."
        ) from None
    except PermissionError as error:
        raise DataError(
            f"source: {url}: {_words(error)}; expected to be allowed to read it. Check the "
            f"credentials that {protocol}:// finds on this machine, then run the same command."
        ) from None
    except Exception as error:  # packages have errors of their own
        if isinstance(error, OSError) and error.errno in _DISK:
            raise
        known = "Protocol not known" not in str(error)
        raise DataError(
            f"source: {url}: {_words(error)}; expected to read it. "
            + (
                "Check the network and the credentials, then run the same command again."
                if known
                else "Give a folder or file of a disk, or a URL that fsspec opens."
            )
        ) from None


def _wait_for_answers(system: Any) -> None:
    """Limit the silence of a server, not the time of a transfer: 300 s by default, in which a large
    file never comes.
    """
    from aiohttp import ClientTimeout

    limit = ClientTimeout(total=None, sock_connect=_SILENCE_S, sock_read=_SILENCE_S)
    system.client_kwargs = {"timeout": limit, **system.client_kwargs}


def _words(error: Exception) -> str:
    """Return an error's name and its first line, in which paths have no query."""
    lines = re.sub(r"\?\S*", "", str(error)).strip().splitlines()
    return f"{type(error).__name__}{': ' + lines[0] if lines else ''}"


def _stamp(url: str) -> list[Any]:
    """Return the size of a file, 0 if it is not stated, and what another version would change."""
    with opening(url) as (system, inside):
        system.invalidate_cache(inside)
        info = system.info(inside)
        if info.get("type") == "directory":
            raise DataError(
                f"source: {url}: a folder; expected a file. Give the folder by itself, or name "
                f"its files by a pattern in quotes: '{url.rstrip('/')}/*'."
            )
    told = {
        name: str(value)
        for name, value in sorted(info.items())
        if value is not None and re.sub("[^a-z0-9]", "", name.lower()) in _OF_A_VERSION
    }
    return [int(info.get("size") or 0), told]


def list_files(url: str) -> tuple[str, list[RemoteFile]]:
    """Return the kind of the files of a URL, "tar" or "parquet", and the files in order.

    Raises:
        DataError: as ``opening``; there are none, or files of several kinds or splits.
    """
    if url.startswith(_HTTP):
        url = re.sub(r"\s", "%20", url)  # as it is sent, and one word in messages
    with opening(url) as (system, inside):
        pattern = "*" in inside
        if pattern:
            paths = system.glob(inside)
        elif _path(inside).suffix not in _KINDS and system.isdir(inside):
            paths = system.find(inside)
        else:
            kind = system.info(inside).get("type")  # FileNotFoundError
            paths = system.find(inside) if kind == "directory" else [inside]
        pairs = sorted({(_path(path), system.unstrip_protocol(path)) for path in paths})
    top = _path(inside.partition("*")[0].rpartition("/")[0] if pattern else inside)
    _check_listing(url, top, pairs)
    urls = dict(pairs)
    seen = [
        path
        for path in urls
        if path.is_relative_to(top) and not any(map(is_hidden, path.relative_to(top).parts))
    ]
    packed = [path for path in seen if path.suffix in _KINDS]
    counted = set(map(stats_of, packed)) & set(seen)
    if len({path.suffix for path in packed}) == 2 and rows_only(url, packed, counted):
        packed = [path for path in packed if path.suffix == ".tar"]
    kinds = {path.suffix for path in packed}
    others = [path for path in seen if is_image(path.name)]
    if len(kinds) != 1 or others or (pattern and len(packed) < len(seen)):
        got = [*sorted(kinds), *(["image files"] if others else [])]
        raise DataError(
            f"source: {url}: {' and '.join(got) or 'no such files'}; expected .tar files, or "
            ".parquet files, and no others. Name them by a pattern in quotes, or copy image files "
            "to a disk."
        )
    try:
        check_packed(Path(top), [Path(path) for path in packed])
    except DataError:
        raise DataError(
            f"source: {url}: files of several splits; expected one. Import each by itself, by a "
            f"pattern in quotes: '{url.rstrip('/').partition('*')[0]}*train*{packed[0].suffix}'."
        ) from None
    return packed[0].suffix[1:], [RemoteFile.of(urls[path]) for path in packed]


def _check_listing(
    url: str, top: PurePosixPath, pairs: Sequence[tuple[PurePosixPath, str]]
) -> None:
    """Refuse a listing, e.g. a page by a server, that names a tar or parquet file outside of the
    folder asked for, or two of one path, of which one would be lost.
    """
    files = [pair for pair in pairs if pair[0].suffix in _KINDS]
    folder = url.partition("*")[0].rstrip("/")
    for path, _ in files:
        if not path.is_relative_to(top) or ".." in unquote(str(path)).split("/"):
            raise DataError(
                f"source: {url}: its list has {path}, outside of the folder; expected files in it. "
                f"Name them by a pattern in quotes: '{folder}/*{path.suffix}'."
            )
    for (path, one), (again, other) in pairwise(files):
        if path == again and one.partition("#")[0] != other.partition("#")[0]:
            raise DataError(
                f"source: {url}: its list has two addresses of {path}; expected one for each "
                "file. Import each address by itself, then join the stores with dpvision data "
                "merge."
            )


def _path(url: str) -> PurePosixPath:
    """Return a URL or a path in a file system without what a server is asked, e.g. a signature."""
    return PurePosixPath(re.split("[?#]", url)[0] if url.startswith("http") else url)


def layout_of(file: RemoteFile, label: str, wanted: list[str]) -> tuple[Layout, int]:
    """As ``parquet_layout``, of the first file of a source."""
    with opening(file.url) as (system, inside), system.open(inside, "rb") as opened:
        return parquet_layout(Path(file.base), label, wanted, opened)


def local_folder(url: str) -> Path | None:
    """Return the folder of a ``file://`` URL, else None."""
    if not url.startswith(("file:", "local:")):
        return None
    with opening(url) as (_, inside):
        folder, _, name = inside.rpartition("/")
        below = "*" in folder or "**" in name  # else a pattern of files in one folder, as of a path
        return Path(os.path.realpath(inside.partition("*")[0] if below else inside))


def remote_parts(files: Sequence[RemoteFile], part: Any) -> tuple[SourcePart, ...]:
    """Return the parts of a source.

    Args:
        part: a part without a file.
    """
    return tuple(RemotePart(file, replace(part, path=Path(file.base))) for file in files)
