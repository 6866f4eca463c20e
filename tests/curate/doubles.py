"""Sources, steps and pipelines made for the tests of curation; worker processes import this."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from dpvision.curate.pipeline import Pipeline, Settings
from dpvision.curate.record import Duplicates, Record
from dpvision.curate.size import Size
from dpvision.curate.text import Caption

from ..data.image_files import encode, js, noise, write_tar

KEY = bytes(range(32))
SETTINGS = Settings(size=Size(min_side_px=10, max_aspect=2.0), caption=Caption(min_words=2))


@dataclass(frozen=True)
class Dim:
    """Test double of a step that changes images: every bright one is made darker."""

    name: ClassVar[str] = "dim"
    decodes: ClassVar[bool] = True

    def opened(self) -> Callable[[Sequence[Record]], None]:
        return self._apply

    def _apply(self, records: Sequence[Record]) -> None:
        for record in records:
            if record.pixels().mean() > 127:
                record.change_image(encode(record.pixels() // 2))


@dataclass(frozen=True)
class _Mean:
    name: ClassVar[str] = "mean"
    decodes: ClassVar[bool] = True

    def opened(self) -> Callable[[Sequence[Record]], None]:
        return self._apply

    def _apply(self, records: Sequence[Record]) -> None:
        for record in records:
            record.facts["mean"] = np.array([record.pixels().mean() // 1], dtype="<f4")


@dataclass(frozen=True)
class SameMean:
    """Test double of a step across records: equal mean colours, rounded."""

    name: ClassVar[str] = "same_mean"
    fact: ClassVar[str] = "mean"
    stability: ClassVar[int] = 2

    def facts(self) -> _Mean:
        return _Mean()

    def duplicates(self, column_N, alive_N, work, progress) -> Duplicates:
        first: dict[float, int] = {}
        pairs = []
        for row, value in enumerate(column_N[:, 0].tolist()):
            if alive_N[row] and first.setdefault(value, row) != row:
                pairs.append((row, first[value]))
        found = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return Duplicates(found[:, 0], found[:, 1])


DOUBLES = Pipeline((SETTINGS.size, Dim(), SETTINGS.caption, SameMean()))


def records(seed: int, num: int) -> list[tuple[bytes, dict]]:
    """Images of many sizes and captions of many lengths, damaged ones, repeats."""
    rng = random.Random(seed)
    made = []
    for i in range(num):
        high, wide = rng.choice([(8, 20), (12, 16), (12, 30), (14, 14)])
        number = rng.choice([1000 * seed + i, rng.randrange(9)])
        data = encode(noise(number, high, wide) // 2 + 7 * number % 128)
        words = [" ".join(["w"] * rng.randrange(4)) for _ in range(rng.randrange(3))]
        made.append((data[:50] if rng.random() < 0.1 else data, {"captions": words, "other": i}))
    return made


def write_tars(folder: Path, num: int = 4, each: int = 40) -> Path:
    folder.mkdir()
    for t in range(num):
        members = {}
        for i, (data, fields) in enumerate(records(t, each)):
            members |= {f"{t}-{i:03}.png": data, f"{t}-{i:03}.json": js(**fields)}
        write_tar(folder / f"s{t}.tar", members)
    return folder


def content(store: Path) -> dict[str, bytes]:
    """The files of a store but for its marks, which have its place, and the curation's own."""
    made = {
        path.relative_to(store).as_posix(): path.read_bytes()
        for path in sorted(store.rglob("*"))
        if path.is_file() and path.name != "ledger_marks.json" and path.parent.name != "curation"
    }
    about = json.loads(made["store.json"])
    about.pop("curation", None)
    return made | {"store.json": json.dumps(about).encode()}
