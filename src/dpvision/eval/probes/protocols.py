"""The protocols by name."""

from collections.abc import Iterable

from dpvision.eval.probes.dpcap_probe import DPCapProbe
from dpvision.eval.probes.few_shot_probe import FewShotProbe
from dpvision.eval.probes.fine_tune import FineTune
from dpvision.eval.probes.knn import KNN
from dpvision.eval.probes.lars_probe import LinearCls, LinearLars
from dpvision.eval.probes.linear_probe import Linear
from dpvision.eval.probes.own_head import OwnHead
from dpvision.eval.probes.protocol import Protocol
from dpvision.eval.probes.ridge import Ridge
from dpvision.eval.probes.settings import (
    PROTOCOL_NAMES,
    FewShotProbeSettings,
    FineTuneSettings,
    LarsSettings,
    checked_protocols,
)

PROTOCOLS: dict[str, type[Protocol]] = {
    kind.name: kind
    for kind in (
        KNN,
        Linear,
        Ridge,
        LinearLars,
        LinearCls,
        FineTune,
        FewShotProbe,
        DPCapProbe,
        OwnHead,
    )
}
assert tuple(PROTOCOLS) == PROTOCOL_NAMES, "settings.PROTOCOL_NAMES must list all protocols"


def make_protocols(
    names: Iterable[str],
    *,
    shots: tuple[int, ...] = (10,),
    few_shot_probe: FewShotProbeSettings | None = None,
    fine_tune: FineTuneSettings | None = None,
    lars: LarsSettings | None = None,
) -> tuple[Protocol, ...]:
    """Make the protocols of these names, without duplicates.

    Args:
        shots: images per class for the few-shot protocols.
        few_shot_probe: settings of few_shot_probe, and number of draws of few_shot_dpcap.
        lars: settings of linear_lars and linear_cls.

    Raises:
        ConfigError: an unknown name, or none; a setting out of range.
    """
    names = checked_protocols(names)
    drawn, lars = few_shot_probe or FewShotProbeSettings(), lars or LarsSettings()
    set_up = {
        p.name: p
        for p in (
            FewShotProbe(shots, drawn),
            DPCapProbe(shots, drawn.draws),
            FineTune(shots, fine_tune or FineTuneSettings()),
            LinearLars(lars),
            LinearCls(lars),
        )
    }
    return tuple(set_up[name] if name in set_up else PROTOCOLS[name]() for name in names)
