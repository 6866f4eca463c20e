"""Render HTML pages from templates with one style sheet, and write them atomically."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from dpvision.eval.score import printed
from dpvision.files import write_file
from dpvision.privacy.printed import up, up_delta
from dpvision.report import numbers


def setting_rows(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Flatten nested settings to (dotted name, text) pairs."""
    rows = []
    for key, value in values.items():
        if isinstance(value, dict):
            rows += setting_rows(value, f"{prefix}{key}.")
        else:
            shown = (
                ", ".join(v if isinstance(v, str) else f"{v:g}" for v in value)
                if isinstance(value, list)
                else f"{value:,}"
                if type(value) is int
                else str(value)
            )
            rows.append((prefix + key, "none" if value is None else shown))
    return rows


def render(template: str, **values: Any) -> str:
    """Render a template of this folder. Values are escaped unless they are Markup."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        up=up,
        up_delta=up_delta,
        percent=numbers.percent_up,
        short=numbers.short,
        commas="{:,}".format,
        printed=printed,
    )
    return environment.get_template(template).render(
        css=Markup((Path(__file__).parent / "page.css").read_text()), **values
    )


def write_page(path: Path, html: str) -> Path:
    """Write a page atomically and return its path.

    Raises:
        CheckpointError: the file cannot be written.
    """
    write_file(path, html.encode())
    return path
