"""What the papers' rows state exactly: numbers of parameters, and epsilons of printed settings."""

from typing import Any

from common import Work, row

from dpvision.models import count_parameters
from dpvision.privacy.claims import recompute_all
from dpvision.recipes import RECIPES

SIZED = {
    "vip": ("nano", "tiny", "small", "base", "large"),
    "dpcap": ("tiny", "small", "base", "large"),
}


def parameters(work: Work) -> list[dict[str, Any]]:
    """ViP Table 3 and DP-Cap Table 6: trainable parameters of the recipes' networks."""
    names = [f"{paper}.{size}" for paper, sizes in SIZED.items() for size in sizes]
    return [
        row(name, "model", "count", [count_parameters(RECIPES[name]().model)]) for name in names
    ]


def accounting(work: Work) -> list[dict[str, Any]]:
    """Epsilon of every printed setting, by PLD and by the papers' Renyi accounting."""
    return [
        row(found.claim.name, way, "epsilon", [epsilon])
        for found in recompute_all()
        for way, epsilon in (("pld", found.epsilon), ("rdp", found.epsilon_rdp))
    ]


MINIATURES = {"parameters": parameters, "accounting": accounting}
