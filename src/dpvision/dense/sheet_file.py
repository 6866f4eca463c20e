"""Write a contact sheet atomically."""

from pathlib import Path

from PIL import Image

from dpvision.errors import DataError
from dpvision.files import replacing


def save_sheet(sheet: Image.Image, path: Path) -> None:
    """Write the sheet atomically. Raises DataError if the path cannot be written."""
    try:
        with replacing(path) as partial:
            sheet.save(partial, "PNG")
    except OSError as error:
        raise DataError(
            f"image: {path} ({error.strerror or error}); expected a writable path with free "
            "space. Choose another."
        ) from None
