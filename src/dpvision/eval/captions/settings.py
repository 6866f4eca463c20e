"""Choices of the caption protocols that commands offer before anything slow is imported."""

from collections.abc import Sequence
from typing import Literal, get_args

from dpvision.errors import ConfigError

Fit = Literal["squash", "crop"]
"""How an image becomes square: "squash" keeps all of it (DP-Cap's protocol), "crop" cuts the centre of the resized one."""
PROMPT = "this is a photo of a"
"""DP-Cap's (appendix A.3.1)."""
Control = Literal["random", "other"]
CONTROLS: tuple[Control, ...] = get_args(Control)
"""The network untrained; of compositional tests, the captioner asked about another image (what words alone give away)."""


def checked_controls(names: Sequence[str]) -> tuple[Control, ...]:
    """The controls of these names. Raises ConfigError for an unknown one."""
    if set(names) - set(CONTROLS):
        raise ConfigError(f"evaluate: against={','.join(names)!r}; expected random, other, both or none. Leave it out for both.")
    return tuple(c for c in CONTROLS if c in names)


def checked_fit(name: str) -> Fit:
    """``name``, if it is a way to make images square. Raises ConfigError otherwise."""
    for fit in get_args(Fit):
        if name == fit:
            return fit
    raise ConfigError(f"evaluate: fit={name!r}; expected squash or crop. DP-Cap squashes.")
