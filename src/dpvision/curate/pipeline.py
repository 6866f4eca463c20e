"""The declared steps of a curation, in order, and what the store says of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from dpvision.curate.exact_duplicates import ExactDuplicates
from dpvision.curate.faces import Faces
from dpvision.curate.near_duplicates import NearDuplicates, PublicDuplicates
from dpvision.curate.record import AcrossStep, RecordStep, about
from dpvision.curate.safety import Safety
from dpvision.curate.semantic_duplicates import SemanticDuplicates
from dpvision.curate.size import Size
from dpvision.curate.text import Caption
from dpvision.errors import ConfigError

Step = RecordStep | AcrossStep


@dataclass(frozen=True)
class Settings:
    """The settings of all steps."""

    size: Size = field(default_factory=Size)
    """Small and long images."""
    caption: Caption = field(default_factory=Caption)
    """Languages and lengths of captions."""
    safety: Safety = field(default_factory=Safety)
    """A classifier of unsafe images."""
    faces: Faces = field(default_factory=Faces)
    """Faces, blurred or a reason to leave an image out."""
    public_duplicates: PublicDuplicates = field(default_factory=PublicDuplicates)
    """Images that are also in public stores."""
    exact_duplicates: ExactDuplicates = field(default_factory=ExactDuplicates)
    """Images with equal pixels."""
    near_duplicates: NearDuplicates = field(default_factory=NearDuplicates)
    """Images with near perceptual hashes."""
    semantic_duplicates: SemanticDuplicates = field(default_factory=SemanticDuplicates)
    """Images with near embeddings (SemDeDup)."""


STEPS = tuple(one.name for one in fields(Settings))
"""Names of all steps."""


@dataclass(frozen=True)
class Pipeline:
    """Steps in order: those of one record, then those across records."""

    steps: tuple[Step, ...]

    @classmethod
    def of(cls, names: Sequence[str], settings: Settings) -> "Pipeline":
        """Return the steps of these names.

        Raises:
            ConfigError: an unknown name, or one twice; settings of another step; a step of one
                record after one that compares records. That order is not offered: it would keep the
                same records but for those whose twin is left out later.
        """
        names = [name.replace("-", "_") for name in names]
        unknown = [name for name in names if name not in STEPS]
        twice = [name for name in STEPS if names.count(name) > 1]
        if unknown or twice or not names:
            got = f"no step {', '.join(unknown)}" if unknown else f"twice {', '.join(twice)}"
            raise ConfigError(
                f"data curate: steps={','.join(names)}: {got if names else 'no step'}; expected "
                f"some of {', '.join(STEPS)}. Give e.g. --steps size,caption."
            )
        for name in STEPS:
            if name not in names and getattr(settings, name) != getattr(Settings(), name):
                raise ConfigError(
                    f"data curate: settings of {name}, which is not one of the steps; expected "
                    f"none. Add it: --steps {','.join([*names, name])}."
                )
        steps = tuple(getattr(settings, name) for name in names)
        across = False
        for step in steps:
            if across and not isinstance(step, AcrossStep):
                raise ConfigError(
                    f"data curate: step {step.name} after one that compares records; expected "
                    "steps of one record first. Move it before "
                    f"{next(s.name for s in steps if isinstance(s, AcrossStep))}."
                )
            across = across or isinstance(step, AcrossStep)
        return cls(steps)

    @property
    def across(self) -> tuple[AcrossStep, ...]:
        """The steps that compare records."""
        return tuple(step for step in self.steps if isinstance(step, AcrossStep))

    @property
    def of_one_record(self) -> tuple[RecordStep, ...]:
        """The steps of one record, with those that compute what the others compare."""
        ours = [step for step in self.steps if isinstance(step, RecordStep)]
        return (*ours, *(step.facts() for step in self.across))

    @property
    def names(self) -> set[str]:
        """Of all steps, those that compute what others compare included."""
        return {step.name for step in self.of_one_record} | {step.name for step in self.across}

    @property
    def stability(self) -> int | None:
        """How many records of the store one record of the source changes; None for no bound.

        Equal pixels have equal hashes, so ``exact_duplicates`` and ``near_duplicates`` of radius 0
        together keep the first record of each class too (docs/proofs.md).
        """
        bounds = [step.stability for step in self.across]
        known = [bound for bound in bounds if bound is not None]
        if len(known) < len(bounds):
            return None
        nested = {step.name for step in self.across} == {"exact_duplicates", "near_duplicates"}
        return max(known) if nested else math.prod(known)

    def about(self) -> dict[str, Any]:
        """Return what the store and statements say: names, settings, stability; no paths."""
        return self._about

    @cached_property
    def _about(self) -> dict[str, Any]:
        """Digests of large files are computed once."""
        return {
            "steps": [{"name": step.name, **about(step)} for step in self.steps],
            "stability": self.stability,
        }
