"""Recipes: functions that return a RunConfig, by name. A recipe is a document: paper, numbers,
expected result.
"""

import difflib
import inspect
from collections.abc import Callable

from dpvision.config import RunConfig
from dpvision.errors import ConfigError
from dpvision.recipes import (
    continual,
    demo,
    dpcap,
    dpcap_micro,
    dpcap_variations,
    supervised,
    synthetic,
    transfer,
    transfer_heads,
    transfer_micro,
    transfer_tables,
    vip,
    vip_variations,
)
from dpvision.recipes.variation import recipe_functions

RECIPES: dict[str, Callable[[], RunConfig]] = {
    "vip.nano": vip.nano,
    "vip.tiny": vip.tiny,
    "vip.small": vip.small,
    "vip.base": vip.base,
    "vip.large": vip.large,
    **recipe_functions(vip_variations.VARIATIONS),
    "vip.micro": vip.micro,
    "vip.micro_random_start": vip.micro_random_start,
    "vip.micro_non_private": vip.micro_non_private,
    "vip.continual_public_base": continual.public_base,
    "vip.continual_base": continual.base,
    "vip.continual_public_micro": continual.public_micro,
    "vip.continual_micro": continual.micro,
    "synthetic.vip_nano": synthetic.vip_nano,
    "synthetic.vip_tiny": synthetic.vip_tiny,
    "synthetic.vip_small": synthetic.vip_small,
    "synthetic.vip_base": synthetic.vip_base,
    "synthetic.vip_large": synthetic.vip_large,
    "synthetic.vip_base_20_epochs": synthetic.vip_base_20_epochs,
    "synthetic.vip_base_900_epochs": synthetic.vip_base_900_epochs,
    "synthetic.vip_base_decoder1": synthetic.vip_base_decoder1,
    "synthetic.vip_base_decoder2": synthetic.vip_base_decoder2,
    "synthetic.vip_base_decoder8": synthetic.vip_base_decoder8,
    "synthetic.vip_micro": synthetic.vip_micro,
    "dpcap.tiny": dpcap.tiny,
    "dpcap.small": dpcap.small,
    "dpcap.base": dpcap.base,
    "dpcap.large": dpcap.large,
    "dpcap.vip": dpcap_variations.vip_of_dpcap,
    **recipe_functions(dpcap_variations.VARIATIONS),
    "dpcap.decoder_finetune": dpcap.decoder_finetune,
    "synthetic.dpcap_tiny": synthetic.dpcap_tiny,
    "synthetic.dpcap_small": synthetic.dpcap_small,
    "synthetic.dpcap_base": synthetic.dpcap_base,
    "synthetic.dpcap_large": synthetic.dpcap_large,
    "dpcap.micro": dpcap_micro.micro,
    "dpcap.micro_vip": dpcap_micro.micro_vip,
    **recipe_functions(dpcap_micro.VARIATIONS),
    "synthetic.dpcap_micro": synthetic.dpcap_micro_start,
    "vip.dp_finetune": supervised.vip_dp_finetune,
    "vip.micro_finetune": supervised.vip_micro_finetune,
    "supervised.tan": supervised.tan,
    "supervised.dp_nfnet": supervised.dp_nfnet,
    "supervised.micro": supervised.micro,
    **transfer_heads.RECIPES,
    "transfer.micro": transfer_micro.micro,
    **recipe_functions(transfer_micro.VARIATIONS),
    **transfer.RECIPES,
    **recipe_functions(transfer_tables.VARIATIONS),
    **transfer_tables.PRETRAINING,
    "demo": demo.demo,
    "demo.start": demo.start,
}

TABLE_ROWS = tuple(transfer_tables.VARIATIONS)
"""Recipes left out of printed lists: one for each number of a table (docs/transfer.md)."""


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
