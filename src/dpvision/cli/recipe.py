"""Recipe names on the command line."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from dpvision.config import PrivacyConfig, RunConfig
from dpvision.errors import ConfigError
from dpvision.privacy.printed import up_delta
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


_BUDGETS = ("noise_multiplier", "target_epsilon", "target_unit_epsilon")


def with_budget(cfg: PrivacyConfig, typed: dict[str, Any]) -> PrivacyConfig:
    """Return a recipe's privacy settings with its noise or target replaced by the typed one.

    If units are declared and no budget is typed, the recipe's target epsilon becomes the unit's. Without a guarantee, the noise, the
    target and the clipping norm are dropped.

    Args:
        typed: typed settings by name; the values of budget settings are ignored.
    """
    budgets = [name for name in _BUDGETS if typed.get(name) not in (None, "None")]
    if typed.get("guarantee") == "none" and cfg.guarantee == "dp":
        return replace(cfg, guarantee="none", max_grad_norm=None, noise_multiplier=None, target_epsilon=None, target_unit_epsilon=None)
    if cfg.guarantee != "dp" or "guarantee" in typed or len(budgets) > 1:
        return cfg
    if budgets:
        placeholder: dict[str, Any] = dict.fromkeys(_BUDGETS) | {budgets[0]: 1.0}
        return replace(cfg, **placeholder)
    if typed.get("num_units") not in (None, "None") and cfg.target_epsilon is not None:
        return replace(cfg, target_epsilon=None, target_unit_epsilon=cfg.target_epsilon)
    return cfg


def spelled_out(argv: Sequence[str]) -> list[str]:
    """Return the command line with ``--non-private`` replaced by ``--privacy.guarantee none``."""
    return [part for word in argv for part in (("--privacy.guarantee", "none") if word == "--non-private" else (word,))]


def typed_settings(argv: Sequence[str]) -> dict[str, str]:
    """Return the settings --PART.NAME of a command line, by part.name, with their values as typed."""
    found: dict[str, str] = {}
    for i, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name.startswith("--") and "." in name:
            found[name.removeprefix("--").replace("-", "_")] = value if equals else argv[i + 1] if i + 1 < len(argv) else ""
    return found


def typed_privacy(argv: Sequence[str]) -> dict[str, str]:
    """Return the settings --privacy.NAME of a command line, by NAME."""
    return {name.removeprefix("privacy."): value for name, value in typed_settings(argv).items() if name.startswith("privacy.")}


def with_values(config: Any, source: Any, names: Iterable[str]) -> Any:
    """Return ``config`` with the named settings (part.name) taken from ``source``, a config of the same type. Unknown names are ignored."""
    for name in names:
        part, _, rest = name.partition(".")
        part = part if hasattr(source, part) else part.removeprefix("no_")  # a --no-flag
        if hasattr(source, part):
            value = with_values(getattr(config, part), getattr(source, part), [rest]) if rest else getattr(source, part)
            config = replace(config, **{part: value})
    return config


def untyped_delta(recipe: PrivacyConfig, cfg: PrivacyConfig, typed: dict[str, Any]) -> str | None:
    """Return why the recipe's delta cannot be used with the declared number (N x delta > 1 requires a typed delta), or None if it can."""
    population = cfg.num_units or cfg.dataset_size
    if cfg.guarantee != "dp" or recipe.delta is None or cfg.delta != recipe.delta or "delta" in typed:
        return None
    if population * recipe.delta <= 1 + 1e-9:
        return None
    return (
        f"privacy: N x delta={up_delta(population * recipe.delta)} (the recipe's {up_delta(recipe.delta)} is for {recipe.dataset_size:,} "
        f"records, and {population:,} are declared); expected at most 1. Give --privacy.delta None for the default."
    )


def recipe_lines(start: str = "") -> list[str]:
    """Return the recipes as lines of name and summary. Recipes for single rows of the paper's tables are only counted.

    Args:
        start: prefix of the names.
    """
    names = [name for name in RECIPES if name.startswith(start)]
    lines = [f"  {name:32}{(RECIPES[name].__doc__ or '').strip().splitlines()[0]}" for name in names if name not in TABLE_ROWS]
    left_out = [name for name in names if name in TABLE_ROWS]
    if left_out:
        lines.append(f"  and {len(left_out)} rows of the DP transfer paper's tables, such as {left_out[0]}: docs/transfer.md")
    return lines
