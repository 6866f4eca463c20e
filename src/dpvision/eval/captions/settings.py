"""Settings of the caption protocols for the command line, without slow imports."""

from collections.abc import Sequence
from typing import Literal, get_args

from dpvision.errors import ConfigError

Fit = Literal["squash", "crop"]
"""How to make an image square: "squash" keeps all of it (DP-Cap's protocol), "crop" takes the
centre of the resized image.
"""
PROMPT = "this is a photo of a"
"""DP-Cap's (appendix A.3.1)."""
Control = Literal["random", "other"]
CONTROLS: tuple[Control, ...] = get_args(Control)
"""Baselines: the untrained network; for compositional tests, the captioner shown another image
(what text alone reveals).
"""


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
