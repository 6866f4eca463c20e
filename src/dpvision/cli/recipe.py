"""Recipe names on the command line."""

import difflib

from dpvision.config import RunConfig
from dpvision.errors import ConfigError
from dpvision.recipes import RECIPES, TABLE_ROWS


def get_recipe(name: str) -> RunConfig:
    """The config of a recipe.

    Raises:
        ConfigError: no recipe has that name.
    """
    if name not in RECIPES:
        close = difflib.get_close_matches(name, RECIPES, n=4)
        hint = f"Did you mean {' or '.join(close)}?" if close else "Correct the name; `dpvision train` lists them."
        raise ConfigError(f"recipe: {name!r}; expected one of the {len(RECIPES)} recipes. {hint}")
    return RECIPES[name]()


def recipe_lines(start: str = "") -> list[str]:
    """A list of recipes for people: name and first line of each; one for each number of a paper's table is left out, and said to be.

    Args:
        start: what the names begin with.
    """
    names = [name for name in RECIPES if name.startswith(start)]
    lines = [f"  {name:32}{(RECIPES[name].__doc__ or '').strip().splitlines()[0]}" for name in names if name not in TABLE_ROWS]
    left_out = [name for name in names if name in TABLE_ROWS]
    if left_out:
        lines.append(f"  and {len(left_out)} rows of the DP transfer paper's tables, {left_out[0]} say: docs/transfer.md")
    return lines
