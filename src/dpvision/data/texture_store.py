"""A store of procedural textures that holds a description only.

Each image is generated when it is read.

    store.json    format, store_id (random), visibility "public", num_records, first, size_px,
                  generator_version

In training, a record gets a new view in every step (another position, zoom, rotation, mirroring and
exposure of the same texture), which replaces the random resized crop. For everything else (contact
sheets, features, export to shards) it is a PNG file of ``size_px``.

Legend: B records, V views, C channels, H height, W width.
"""

import io
import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dpvision.config import DataConfig
from dpvision.data.keys import StepKey
from dpvision.data.rows import Rows
from dpvision.data.store import TEXTURES_FORMAT, Record, Store
from dpvision.errors import DataError
from dpvision.files import new_folder
from dpvision.synthetic.textures import VERSION, textures

_LICENCE = "Apache-2.0 (procedural)"
_MOST_RECORDS = 1 << 28  # an open store holds its ids, 2 GB for this many
_FIRST_BOUND = 1 << 62


class TextureStore(Store):
    """Public records by position; record i is texture number ``first`` + i.

    That is also its id. Opened by ``data.open.open_store``.
    """

    generated = True

    def __init__(self, path: Path, meta: dict[str, Any]) -> None:
        if meta.get("generator_version") != VERSION:
            got = meta.get("generator_version")
            raise DataError(
                f"store: {path}: textures of generator {got!r}; expected {VERSION}, which makes "
                "other images. Make the store again with `dpvision synth`."
            )
        self.path, self.meta = path, {"shards": [], "unit_field": None, **meta}
        self.store_id, self.visibility, self.num_records = (
            meta["store_id"],
            "public",
            meta["num_records"],
        )
        self.label_names, self.licence, self.shard_paths = None, _LICENCE, []
        self.first, self.size_px = int(meta["first"]), int(meta["size_px"])
        none = np.broadcast_to(np.int32(-1), self.num_records)
        no_bytes = np.broadcast_to(np.uint32(0), self.num_records)
        self.index: Any = {
            "id": np.arange(self.first, self.first + self.num_records),
            "unit": none,
            "label": none,
            "size": no_bytes,
        }

    def read_many(self, rows: np.ndarray) -> list[bytes]:
        """PNG files of the canonical views of the textures of ``rows``."""
        number_B = torch.from_numpy(self.index["id"][np.asarray(rows)])
        return [_png(x) for x in textures(number_B, self.size_px).permute(0, 2, 3, 1).numpy()]

    def views(
        self,
        rows: np.ndarray,
        key: StepKey,
        data: DataConfig,
        image_size: int,
        device: str | torch.device = "cpu",
    ) -> tuple[Tensor, Tensor]:
        """This step's views of the textures of ``rows``.

        Functions of (seed, step, view, number): image_BVCHW uint8 on ``device``, and valid_B, all
        True, on the CPU. Each replaces a crop, so only the number of views is taken from ``data``.
        """
        number_B = torch.from_numpy(self.index["id"][rows])
        looks = [key.bits(number_B, f"look.{v}", 1)[:, 0] for v in range(data.views)]
        image_BVCHW = torch.stack(
            [textures(number_B, image_size, instance_N=look_B, device=device) for look_B in looks],
            dim=1,
        )
        return image_BVCHW, torch.ones(len(rows), dtype=torch.bool)

    def captions(self, row: int) -> tuple[str, ...]:
        """Return no captions."""
        return ()

    def captions_many(self, rows: np.ndarray) -> list[tuple[str, ...]]:
        """Return no captions for each row."""
        return [()] * len(rows)

    def has_captions(self, rows: Rows) -> np.ndarray:
        """Return False for each row."""
        return np.zeros(len(rows), dtype=bool)

    def record(self, row: int) -> Record:
        """One record; its id is its texture's number."""
        number = int(self.index["id"][row])
        return Record(
            id=number,
            key=f"texture-{number}",
            unit=None,
            image=self.read(row),
            captions=(),
            labels=(),
        )

    def import_summary(self) -> dict[str, Any]:
        """The number of records, and a flag for textures."""
        return {"records": self.num_records, "textures": True}


def write_texture_store(
    store_dir: str | Path, num: int, *, first: int = 0, size_px: int = 64
) -> TextureStore:
    """Make the folder of a store of ``num`` textures, a few hundred bytes.

    Args:
        num: records, 1 to 2^28 (268 million).
        first: number of the first texture, as ``check_first``; different numbers are different
            textures.
        size_px: side of the images outside training; training generates them at the model's size.

    Raises:
        DataError: a number is out of range, or the folder exists.
    """
    store_dir = Path(store_dir)
    if not 1 <= num <= _MOST_RECORDS:
        raise DataError(
            f"synth: num={num}; expected 1 to 2^28 (268 million). ViP's warm start has about 1.3 "
            "million."
        )
    check_first(first)
    if store_dir.exists():
        raise DataError(
            f"synth: {store_dir} exists; expected a new folder. Choose another name, or remove it."
        )
    textures(torch.zeros(1, dtype=torch.int64), size_px)  # refuses a size out of range
    meta = {
        "format": TEXTURES_FORMAT,
        "store_id": secrets.token_hex(16),
        "visibility": "public",
        "num_records": num,
        "first": first,
        "size_px": size_px,
        "generator_version": VERSION,
        "label_names": None,
        "licence": _LICENCE,
    }
    try:
        with new_folder(store_dir) as folder:
            (folder / "store.json").write_text(json.dumps(meta, indent=1))
    except OSError as error:
        raise DataError(
            f"synth: {store_dir} ({error.strerror}); expected a folder that can be made. Choose "
            "another path."
        ) from None
    return TextureStore(store_dir, meta)


def check_first(first: int) -> None:
    """Raise DataError unless the number of a first texture is in [0, 2^62)."""
    if not 0 <= first < _FIRST_BOUND:
        raise DataError(
            f"synth: first={first}; expected 0 or more, below 2^62. Number the textures from 0."
        )


def texture_files(numbers: Sequence[int], size_px: int) -> list[tuple[str, bytes]]:
    """(key, PNG file) of the canonical view of each texture."""
    made = textures(torch.tensor(numbers, dtype=torch.int64), size_px).permute(0, 2, 3, 1).numpy()
    return [(f"texture-{number}", _png(x)) for number, x in zip(numbers, made, strict=True)]


def _png(x_HWC: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(x_HWC).save(file, "PNG", compress_level=1)
    return file.getvalue()
