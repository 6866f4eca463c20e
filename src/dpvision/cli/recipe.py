"""Recipe names on the command line."""

from dpvision.config import RunConfig
from dpvision.errors import ConfigError
from dpvision.recipes import RECIPES


def get_recipe(name: str) -> RunConfig:
    """The config of a recipe.

    Raises:
        ConfigError: no recipe has that name.
    """
    if name not in RECIPES:
        raise ConfigError(f"recipe: {name!r}; expected one of {', '.join(sorted(RECIPES))}. Correct the name.")
    return RECIPES[name]()
