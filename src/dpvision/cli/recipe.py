"""Recipe names on the command line."""

import difflib
import inspect

from dpvision.config import RunConfig
from dpvision.errors import ConfigError
from dpvision.recipes import RECIPES, TABLE_ROWS


def get_recipe(name: str) -> RunConfig:
    """Return the config of a recipe.

    Raises:
        ConfigError: no recipe has that name.
    """
    if name not in RECIPES:
        close = difflib.get_close_matches(name, RECIPES, n=4)
        hint = f"Did you mean {' or '.join(close)}?" if close else "`dpvision train` lists them."
        raise ConfigError(f"recipe: {name!r}; expected one of the {len(RECIPES)} recipes. {hint}")
    return RECIPES[name]()


def recipe_lines(start: str = "") -> list[str]:
    """Return the recipes as lines of name and summary. Recipes for single rows of the paper's
    tables are only counted.

    Args:
        start: prefix of the names.
    """
    names = [name for name in RECIPES if name.startswith(start)]
    summary = {name: inspect.getdoc(RECIPES[name]) or "" for name in names}
    lines = [
        f"  {name:32}{' '.join(summary[name].partition(chr(10) * 2)[0].split())}"
        for name in names
        if name not in TABLE_ROWS
    ]
    left_out = [name for name in names if name in TABLE_ROWS]
    if left_out:
        lines.append(
            f"  and {len(left_out)} rows of the DP transfer paper's tables, such as "
            f"{left_out[0]}: docs/transfer.md"
        )
    return lines
