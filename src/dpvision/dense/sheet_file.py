"""A contact sheet on a disk: whole or not at all."""

from pathlib import Path

from PIL import Image

from dpvision.errors import DataError
from dpvision.files import replacing


def save_sheet(sheet: Image.Image, path: Path) -> None:
    """Write the sheet whole or not at all. Raises DataError when the place cannot be written."""
    try:
        with replacing(path) as partial:
            sheet.save(partial, "PNG")
    except OSError as error:
        raise DataError(f"image: {path} ({error.strerror or error}); expected a writable place with space. Choose another.") from None
