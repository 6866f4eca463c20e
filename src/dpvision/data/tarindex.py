"""Index the members of a tar file from its headers alone: no data is read, nothing is unpacked.

The format is POSIX ustar with the two usual ways to write long names (GNU 'L' members, pax 'x'
members). Python's tarfile builds an object for every member; this reads one 512-byte header per
member with ``os.pread`` and keeps name, offset and size.
"""

import os
import posixpath
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from dpvision.errors import DataError

BLOCK = 512
_END = bytes(BLOCK)
_REGULAR = (b"0", b"\0", b"7")
_HARD, _SYMBOLIC, _SPARSE = b"1", b"2", b"S"
_MAX_LINKS = 40
_MAX_HEADER_DATA_BYTES = 1 << 20
_MAX_TAIL_BYTES = 1 << 20
"""Zeros at a tar's end: 10 KiB by default, more with `tar --blocking-factor`."""


class Member(NamedTuple):
    """A file inside a tar, or a link to one: its bytes are [offset, offset + size) of the tar."""

    name: str
    offset: int
    size: int
    problem: str = ""
    """Why it has no bytes, or "": a link without its file, or a sparse file."""


def scan(path: Path) -> list[Member]:
    """List the files of a tar in order, and links to them.

    Links have the bytes of their files; folders and devices are skipped.

    Raises:
        DataError: the file cannot be read, is not an uncompressed tar, ends before its end mark, or
            goes on after it.
    """
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            return _with_links(list(_members(fd, os.fstat(fd).st_size, path)))
        finally:
            os.close(fd)
    except OSError as error:
        raise DataError(
            f"tar: {path}: {error.strerror}; expected a readable tar file. Check the path and "
            "its permissions."
        ) from None


class _Link(NamedTuple):
    name: str
    target: str
    """A member's name, normalised."""


def _with_links(found: list[Member | _Link]) -> list[Member]:
    """Replace links, also links to links, by members with the bytes of their files."""
    if not any(isinstance(one, _Link) for one in found):
        return [one for one in found if isinstance(one, Member)]
    by_name = {posixpath.normpath(one.name): one for one in found}
    made = []
    for one in found:
        file: Member | _Link | None = one
        for _ in range(_MAX_LINKS):
            if not isinstance(file, _Link):
                break
            file = by_name.get(file.target)
        made.append(
            file._replace(name=one.name)
            if isinstance(file, Member)
            else Member(one.name, 0, 0, "link without its file")
        )
    return made


def member_size(header: bytes) -> int:
    """Size in bytes of the member that a 512-byte tar header announces.

    Raises:
        ValueError: the bytes are no tar header.
    """
    if header[257:262] != b"ustar":  # tars older than the magic have only the checksum
        stored = int(header[148:156].strip(b"\0 ") or b"x", 8)
        if stored != sum(header) - sum(header[148:156]) + 8 * 32:
            raise ValueError("no tar header")
    if header[124] & 0x80:  # GNU: binary sizes from 8 GiB on
        return int.from_bytes(header[125:136], "big")
    size = int(header[124:136].strip(b"\0 ") or b"0", 8)
    if size < 0:  # the next header would be before this one, again and again
        raise ValueError("negative size")
    return size


def _members(fd: int, end: int, path: Path) -> Iterator[Member | _Link]:
    if not end:
        raise DataError(
            f"tar: {path}: an empty file; expected a tar. A download that failed leaves one: fetch "
            "it again, or remove it."
        )
    position = 0
    long_name: str | None = None
    long_target: str | None = None
    long_size: int | None = None
    while position + BLOCK <= end:
        header = os.pread(fd, BLOCK, position)
        if header == _END:
            _check_tail(fd, position, end, path)
            return
        try:
            size = member_size(header)
        except ValueError:
            what = "damaged" if position else "no uncompressed tar"
            raise DataError(
                f"tar: {path}: {what} at byte {position}; expected a tar header. Unpack "
                "compressed tars, repair or remove damaged ones."
            ) from None
        kind = header[156:157]
        offset = position + BLOCK
        if kind in (b"L", b"K", b"x"):
            if size > _MAX_HEADER_DATA_BYTES:
                raise DataError(
                    f"tar: {path}: header of {size} bytes at byte {position}; expected at most 1 "
                    "MiB. Repair or remove it."
                )
            data = os.pread(fd, size, offset)
            if kind == b"L":
                long_name = _text(data)
            elif kind == b"K":
                long_target = _text(data)
            else:
                pax = _pax(data, path)
                long_name = pax.get("path", long_name)
                long_target = pax.get("linkpath", long_target)
                if "size" in pax:
                    long_size = _pax_size(pax["size"], path)
        else:
            size = size if long_size is None else long_size
            prefix = (
                header[345:500] if header[257:263] == b"ustar\0" else b""
            )  # GNU tar keeps times there
            short = _text(header[:100])
            name = long_name or (
                f"{_text(prefix)}/{short}" if prefix[:1] not in (b"", b"\0") else short
            )
            if kind in _REGULAR:
                if offset + size > end:
                    break
                yield Member(name, offset, size)
            elif kind in (_HARD, _SYMBOLIC):
                size = 0  # links have no data, whatever their header says
                target = long_target or _text(header[157:257])
                yield _Link(
                    name,
                    posixpath.normpath(
                        target if kind == _HARD else posixpath.join(posixpath.dirname(name), target)
                    ),
                )
            elif kind == _SPARSE:
                yield Member(name, 0, 0, "sparse file")
            long_name = long_target = long_size = None
        position = offset + (size + BLOCK - 1) // BLOCK * BLOCK
    if position > end or position + BLOCK <= end:
        raise DataError(
            f"tar: {path}: ends inside a member, at byte {end}; expected a whole file. Copy it "
            "again or remove it."
        )
    if position < end:
        raise DataError(
            f"tar: {path}: ends inside a header, at byte {end}; expected a whole file. Copy it "
            "again (from a URL: run the same command again) or remove it."
        )
    raise DataError(
        f"tar: {path}: ends at byte {end} without its end mark, blocks of zeros; expected a whole "
        "tar: members may be lost. Copy it again (from a URL: run the same command again). If it "
        "is whole, and its writer leaves the mark out: head -c 1024 /dev/zero >> FILE."
    )


def _check_tail(fd: int, position: int, end: int, path: Path) -> None:
    """Refuse anything but zeros after a tar's end mark.

    In an interrupted download into a file of the full size, or with a second tar appended by `cat`,
    images would be silently lost.
    """
    tail = os.pread(fd, min(end - position, _MAX_TAIL_BYTES), position)
    if end - position > _MAX_TAIL_BYTES or tail.strip(b"\0"):
        raise DataError(
            f"tar: {path}: {end - position:,} bytes after its end at byte {position}; expected a "
            "whole tar, and one only. Copy it again, or take tars apart that were appended to "
            "each other."
        )


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "replace")


def _pax(data: bytes, path: Path) -> dict[str, str]:
    """Records ``LENGTH KEY=VALUE\\n`` of an extended header."""
    found = {}
    while data:
        length, _, rest = data.partition(b" ")
        if (
            not length.isdigit()
            or len(length) > 7
            or not len(length) + 2 < int(length) <= len(data)
        ):
            raise _damaged_pax(path)
        key, _, value = rest[: int(length) - len(length) - 2].partition(b"=")
        found[key.decode("utf-8", "replace")] = value.decode("utf-8", "replace")
        data = data[int(length) :]
    return found


def _pax_size(value: str, path: Path) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= 18):
        raise _damaged_pax(path)
    return int(value)


def _damaged_pax(path: Path) -> DataError:
    return DataError(
        f"tar: {path}: damaged extended header; expected `LENGTH KEY=VALUE`. Repair or remove the "
        "file."
    )


class TarWriter:
    """Writes plain tar files: members in sequence, without owners and times."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.position = 0

    def add(self, name: str, data: bytes) -> int:
        """Append a member; return the offset of its bytes in the tar."""
        info = tarfile.TarInfo(name)
        info.size = len(data)
        header = info.tobuf(tarfile.GNU_FORMAT)
        offset = self.position + len(header)
        self._file.write(header)
        self._file.write(data)
        self._file.write(bytes(-len(data) % BLOCK))
        self.position = offset + (len(data) + BLOCK - 1) // BLOCK * BLOCK
        return offset

    def copy(self, members: bytes) -> None:
        """Append whole members of another tar."""
        self._file.write(members)
        self.position += len(members)

    def finish(self) -> int:
        """Write the end-of-archive blocks; return the size of the tar in bytes."""
        self._file.write(_END * 2)
        self.position += 2 * BLOCK
        return self.position
