"""What only the operator knows: declared in a JSON file, for forms and for the report."""

import json
from dataclasses import MISSING, dataclass, fields
from datetime import date
from pathlib import Path
from typing import Literal, get_args

from dpvision.errors import ConfigError
from dpvision.strict_json import parse_json

Sector = Literal["Technology", "Healthcare", "Education", "Government", "Energy", "Finance"]


@dataclass(frozen=True)
class Declared:
    """Facts that no file of a run has. The last four are for the report alone, which leaves room to
    fill in those that are None.
    """

    name: str
    """Name of the model."""
    curators: list[str]
    """Who is responsible for the images and publishes the model."""
    intended_use: str
    region: str
    """What region the images are from, or whose law applies."""
    publication_date: str
    """YYYY-MM-DD."""
    sector: Sector
    justification: str
    """Why these parameters were chosen, and by whom."""
    organisation: str | None = None
    """Who decides on purpose and means: the controller."""
    data_set: str | None = None
    """What the images are, of whom, and where they are from."""
    confidential_held_by: str | None = None
    """Who keeps the images and what lies under ``confidential/``."""
    confidential_kept_until: str | None = None
    """How long they are kept."""


def read_declared(file: Path, command: str) -> Declared:
    """Read the declarations from a JSON object with the fields of ``Declared``.

    Args:
        command: which command reads it, for errors.

    Raises:
        ConfigError: the file cannot be read, or a field is missing, unknown, empty or of another
            kind.
    """
    names = [field.name for field in fields(Declared)]
    needed = {field.name for field in fields(Declared) if field.default is MISSING}
    example = {name: [] if name == "curators" else "" for name in names}
    where, remedy = f"{command}: --declared {file}", f"Fill in {json.dumps(example)}."
    try:
        found = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: {error}; expected a JSON object. {remedy}") from None
    given = set(found) if isinstance(found, dict) else set()
    if wrong := (needed - given) | (given - set(names)):
        raise ConfigError(
            f"{where}: {', '.join(sorted(wrong))}; expected each field once, no others. {remedy}"
        )
    for name, value in found.items():
        if value is None and name not in needed:
            continue
        parts = value if name == "curators" else [value]
        texts = isinstance(parts, list) and all(isinstance(p, str) and p.strip() for p in parts)
        if not (parts and texts):
            raise ConfigError(
                f"{where}: {name}={value!r}; expected "
                f"{'a list of names' if name == 'curators' else 'a text'}. Fill it in"
                f"{'.' if name in needed else ', or leave the field out.'}"
            )
    try:
        day = date.fromisoformat(found["publication_date"]).isoformat()
    except ValueError:
        day = None
    if day != found["publication_date"]:
        raise ConfigError(
            f"{where}: publication_date={found['publication_date']!r}; expected YYYY-MM-DD. "
            "Correct it."
        )
    if found["sector"] not in get_args(Sector):
        raise ConfigError(
            f"{where}: sector={found['sector']!r}; expected one of {', '.join(get_args(Sector))}. "
            "Choose the nearest."
        )
    return Declared(**found)
