"""Check whether a model can be trained privately, how its per-record gradients are computed, and at
what cost (docs/doctor.md).

    found = look(find_subject("vip.micro"))     a recipe, a timm name or "module:function"
    figures = measure(found)                    on this machine

"""

from dpvision.doctor.bench import measure
from dpvision.doctor.findings import Findings, find_subject, look

__all__ = ["Findings", "find_subject", "look", "measure"]
