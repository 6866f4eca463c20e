"""The protocols by name."""

from collections.abc import Iterable

from dpvision.eval.probes.few_shot_probe import DPCapProbe, FewShotProbe
from dpvision.eval.probes.fine_tune import FineTune
from dpvision.eval.probes.knn import KNN
from dpvision.eval.probes.lars_probe import LinearCls, LinearLars
from dpvision.eval.probes.linear_probe import Linear
from dpvision.eval.probes.own_head import OwnHead
from dpvision.eval.probes.protocol import Protocol
from dpvision.eval.probes.ridge import Ridge
from dpvision.eval.probes.settings import PROTOCOL_NAMES, ProtocolSettings, checked_protocols

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
    names: Iterable[str], settings: ProtocolSettings | None = None
) -> tuple[Protocol, ...]:
    """Make the protocols of these names, without duplicates.

    Raises:
        ConfigError: an unknown name, or none; a setting out of range.
    """
    how = settings or ProtocolSettings()
    set_up = {
        p.name: p
        for p in (
            FewShotProbe(how.shots, how.few_shot_probe),
            DPCapProbe(how.shots, how.few_shot_probe.draws),
            FineTune(how.shots, how.fine_tune),
            LinearLars(how.lars),
            LinearCls(how.lars),
        )
    }
    return tuple(
        set_up[name] if name in set_up else PROTOCOLS[name]() for name in checked_protocols(names)
    )
