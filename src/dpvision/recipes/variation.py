"""Rows of a paper as changes to another recipe, so that a test can check that everything else is
equal.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dpvision.config import RunConfig


@dataclass(frozen=True)
class Variation:
    """One row: ``of()`` with these settings replaced."""

    doc: str
    of: Callable[[], RunConfig]
    privacy: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    """Other settings of the run, such as ``init_from``."""

    def make(self, name: str) -> RunConfig:
        """Make the config of the row, with recipe name ``name``."""
        config = self.of()
        return replace(
            config,
            recipe=name,
            privacy=replace(config.privacy, **self.privacy),
            model=replace(config.model, **self.model),
            data=replace(config.data, **self.data),
            optim=replace(config.optim, **self.optim),
            **self.run,
        )


def recipe_functions(variations: Mapping[str, Variation]) -> dict[str, Callable[[], RunConfig]]:
    """One documented function for each variation, for RECIPES."""

    def function(name: str, row: Variation) -> Callable[[], RunConfig]:
        def make() -> RunConfig:
            return row.make(name)

        make.__doc__ = row.doc
        return make

    return {name: function(name, row) for name, row in variations.items()}
