"""A contact sheet on a disk: whole or not at all."""

import io
from pathlib import Path

from PIL import Image

from dpvision.errors import DataError


def save_sheet(sheet: Image.Image, path: Path) -> None:
    """Write the sheet whole or not at all. Raises DataError when the place cannot be written."""
    blob = io.BytesIO()
    sheet.save(blob, "PNG")
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(blob.getvalue())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DataError(f"picture: {path} ({error.strerror or error}); expected a writable place with space. Choose another.") from None
