"""Settings of the tests of captioners, without slow imports."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from dpvision.environment import own_cores
from dpvision.errors import ConfigError

Fit = Literal["squash", "crop"]
"""How to make an image square: "squash" keeps all of it (DP-Cap's protocol), "crop" takes the
centre of the resized image.
"""
Square = Literal[Fit, "own preprocessing"]
"""A ``Fit``, or what the folder of a model of two towers says."""
PROMPT = "this is a photo of a"
"""DP-Cap's (appendix A.3.1)."""
Control = Literal["random", "other"]
CONTROLS: tuple[Control, ...] = get_args(Control)
"""Baselines: the untrained network; for compositional tests, the captioner shown another image
(what text alone reveals).
"""


@dataclass(frozen=True)
class Asking:
    """Settings shared by all tests."""

    fit: Square = "squash"
    """How to make images square."""
    other_images: bool = True
    """Whether compositional tests also pair captions with other images, to measure what text alone
    reveals.
    """
    batch_size: int = 32
    workers: int = field(default_factory=own_cores)
    progress: Callable[[str], None] | None = None


@dataclass(frozen=True)
class CaptionTests:
    """The tests asked for, on a store and on procedural scenes (``suite.make_tests``)."""

    zero_shot: str | None = None
    """Classify --store by this label set: store, cifar10, cifar100, or a file: one class per line,
    synonyms separated by commas, or JSON (docs/caption_measures.md).
    """
    labels: Path | None = None
    """For --zero-shot: file of sets of correct classes per image (ImageNet-ReaL's real.json;
    docs/evaluation.md).
    """
    method: str = "trie,loss"
    """For --zero-shot: trie, loss or both."""
    prompt: str = PROMPT
    """Text before the label."""
    match_article: bool = False
    """Use "an" before a, e, i, o, u if the prompt ends in "a"."""
    order: bool = False
    """Run the order test on the captions of --store."""
    captions: bool = False
    """Score generated captions of --store by CIDEr."""
    beams: int | None = None
    """Generate them by beam search of this width; if omitted, greedily."""
    limit: int | None = None
    """Maximum number of images from --store."""
    scenes: int | None = None
    """Run compositional tests on this many procedural scenes."""
    first_scene: int = 1_000_000_000
    """Number of the first scene; choose one beyond the training scenes."""

    def check(self, has_store: bool) -> None:
        """Raise ConfigError for a test without what it needs."""
        for asked_for, flag, what in (
            (self.order, "--order", "captions"),
            (self.captions, "--captions", "captions"),
            (self.zero_shot is not None, "--zero-shot", "labels"),
        ):
            if asked_for and not has_store:
                raise ConfigError(
                    f"evaluate: no store; expected images with {what} for {flag}. Give --store "
                    "STORE."
                )
        if self.labels is not None and self.zero_shot is None:
            raise ConfigError(
                f"evaluate: labels={str(self.labels)!r} without --zero-shot; expected both. Give "
                "--zero-shot LABEL_SET."
            )
        if self.scenes is not None and not self.scenes >= 1:
            raise ConfigError(f"evaluate: scenes={self.scenes}; expected at least 1. Use 2000.")


@dataclass(frozen=True)
class ChoiceFiles:
    """Files of published compositional benchmarks (``choice_files.benchmark_tests``)."""

    sugarcrepe: Path | None = None
    """SugarCrepe's file or folder; its images are in --images."""
    negclip: Path | None = None
    """NegCLIP's negatives; their images are in --images."""
    images: Path | None = None
    """Folder of COCO images."""
    aro: Path | None = None
    """Folder with ARO's visual_genome_relation.json, visual_genome_attribution.json and images/."""
    aro_leave_out: Path | None = None
    """File of relations to leave out, one per line (ARO leaves out those that may hold both
    ways).
    """
    public: bool = False
    """The images of --sugarcrepe, --negclip and --aro need no protection."""
    allow_missing: bool = False
    """Leave out benchmark items whose image is missing, and record it in the score's name."""


def checked_controls(names: Sequence[str]) -> tuple[Control, ...]:
    """Return the baselines of these names. Raises ConfigError for an unknown one."""
    if set(names) - set(CONTROLS):
        raise ConfigError(
            f"evaluate: against={','.join(names)!r}; expected random, other, both or none. Omit "
            "it for both."
        )
    return tuple(c for c in CONTROLS if c in names)


def checked_fit(name: str) -> Fit:
    """Return ``name`` if it is a ``Fit``. Raises ConfigError otherwise."""
    for fit in get_args(Fit):
        if name == fit:
            return fit
    raise ConfigError(
        f"evaluate: fit={name!r}; expected squash or crop. Use squash, as DP-Cap does."
    )
