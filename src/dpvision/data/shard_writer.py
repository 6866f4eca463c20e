"""Write copied images to tar shards, and join the tars of the parts of an import."""

import contextlib
import json
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dpvision.data.decode import extension
from dpvision.data.sample import Sample
from dpvision.data.tarindex import BLOCK, TarWriter, member_size
from dpvision.errors import DataError

SHARD_BYTES = 1 << 28
_COPIED_AT_ONCE = 1 << 24
_DIGITS = 9
"""Of a sample's number, with which the names of its members begin."""
_SUM = slice(148, 156)
"""Where a tar header has the sum of its bytes: six octal digits, a zero and a blank."""


class ShardWriter:
    """Writes tar shards of about ``SHARD_BYTES``.

    NUMBER.jpg, and NUMBER.json with key, captions, label and unit.
    """

    def __init__(self, folder: Path, files: contextlib.ExitStack, *, whole: bool = False) -> None:
        """
        Args:
            files: closes the file that is being written.
            whole: write one shard only, however large.
        """
        self._folder, self._files, self.whole = folder, files, whole
        self._tar: TarWriter | None = None
        self._file: BinaryIO | None = None
        self._done: list[tuple[str, int]] = []
        self._number = 0

    def add(
        self, sample: Sample, captions: tuple[str, ...], label: Any, unit: int
    ) -> tuple[int, int]:
        """Write one sample; return its shard number and the image's offset in it."""
        tar = self._current()
        name = f"{self._number:0{_DIGITS}d}"
        self._number += 1
        offset = tar.add(f"{name}.{extension(sample.image)}", sample.image)
        beside = {
            "key": sample.key,
            "captions": captions,
            "label": label,
            "unit": None if unit < 0 else f"{unit:016x}",
        }
        tar.add(
            f"{name}.json",
            json.dumps({k: v for k, v in beside.items() if v not in (None, ())}).encode(),
        )
        return len(self._done), offset

    def _current(self) -> TarWriter:
        if self._tar is not None and self._tar.position >= SHARD_BYTES and not self.whole:
            self._close()
        if self._tar is None:
            (self._folder / "shards").mkdir(exist_ok=True)
            self._file = self._files.enter_context((self._folder / self._name()).open("wb"))
            self._tar = TarWriter(self._file)
        return self._tar

    def join(
        self, tar: BinaryIO, offset_N: np.ndarray, size_N: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Append samples of another shard, numbered on: the bytes that ``add`` would write.

        Args:
            tar: a shard that this class wrote.
            offset_N, size_N: int64, of the images of consecutive samples in it.

        Returns:
            Shard number and offset of each image, int64.

        Raises:
            DataError: the shard is damaged.
        """
        start_N = offset_N - BLOCK
        end_N = np.append(start_N[1:], _end(tar, int(offset_N[-1] + size_N[-1])))
        tar.seek(int(start_N[0]))
        if self._number + len(offset_N) > 10**_DIGITS:
            raise DataError(
                f"data import: more than {10**_DIGITS:,} images to copy; expected fewer. Import "
                "them as several stores."
            )
        shard_N, place_N, at = np.empty_like(offset_N), np.empty_like(offset_N), 0
        while at < len(offset_N):
            current = self._current()
            # a sample that begins at SHARD_BYTES or later begins the next shard
            room = min(SHARD_BYTES - current.position, _COPIED_AT_ONCE)
            stop = max(at + 1, int(np.searchsorted(start_N, start_N[at] + room)))
            block = np.frombuffer(
                bytearray(tar.read(int(end_N[stop - 1] - start_N[at]))), dtype=np.uint8
            )
            image = start_N[at:stop] - start_N[at]
            text = image + BLOCK + -(-size_N[at:stop] // BLOCK) * BLOCK
            number = np.arange(self._number, self._number + stop - at)
            _renumber(block, image, number)
            _renumber(block, text, number)
            shard_N[at:stop] = len(self._done)
            place_N[at:stop] = offset_N[at:stop] - start_N[at] + current.position
            current.copy(block.tobytes())
            self._number += stop - at
            at = stop
        return shard_N, place_N

    def _name(self) -> str:
        return f"shards/shard-{len(self._done):06d}.tar"

    def _close(self) -> None:
        assert self._tar is not None and self._file is not None
        self._done.append((self._name(), self._tar.finish()))
        self._file.close()
        self._tar = self._file = None

    def finish(self) -> list[tuple[str, int]]:
        """Close the last shard; return (path inside the store, size in bytes) of each."""
        if self._tar is not None:
            self._close()
        return self._done


def _end(tar: BinaryIO, image_end: int) -> int:
    """Return where a sample ends: after the text that follows its image."""
    text = -(-image_end // BLOCK) * BLOCK
    tar.seek(text)
    try:
        size = member_size(tar.read(BLOCK))
    except ValueError:
        raise DataError(
            f"data import: {tar.name}: damaged at byte {text}; expected the text of an image. "
            "Import the images again, or restore the file."
        ) from None
    return text + BLOCK + -(-size // BLOCK) * BLOCK


def _renumber(block: np.ndarray, header_N: np.ndarray, number_N: np.ndarray) -> None:
    """Write numbers into the names of members, and the sums of their headers."""
    head = block[header_N[:, None] + np.arange(BLOCK)]
    power = 10 ** np.arange(_DIGITS - 1, -1, -1)
    head[:, :_DIGITS] = number_N[:, None] // power % 10 + ord("0")
    head[:, _SUM] = ord(" ")
    octal = head.sum(1, dtype=np.int64)[:, None] // 8 ** np.arange(5, -1, -1) % 8
    head[:, 148:154] = octal + ord("0")
    head[:, 154] = 0
    block[header_N[:, None] + np.arange(BLOCK)] = head
