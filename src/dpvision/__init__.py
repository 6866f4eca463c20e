"""dpvision: train image models on images that must stay private.

    encoder = dpvision.load("runs/NAME")
    features_BD = encoder(torch.from_numpy(encoder.preprocess("photo.jpg"))[None])

``dir(dpvision)`` lists the public names; each is imported when it is first used. docs/tour.md
describes the packages.
"""

import importlib
from typing import TYPE_CHECKING, Any

from dpvision.environment import set_defaults

if TYPE_CHECKING:
    from dpvision.adapt.session import adapt as fit_head
    from dpvision.adapt.session import new_head_session as new_head_session
    from dpvision.config import PrivacyConfig as PrivacyConfig
    from dpvision.data.open import open_store as open_store
    from dpvision.data.store import Store as Store
    from dpvision.dp.clip import clipped_sum as clipped_sum
    from dpvision.dp.noise import privatize as privatize
    from dpvision.encoders.classifier import load_classifier as load_classifier
    from dpvision.encoders.open import open_encoder as load
    from dpvision.encoders.predict import predict as predict
    from dpvision.eval.probes.suite import evaluate as evaluate
    from dpvision.privacy.plan import make_plan as make_plan
    from dpvision.report.page import make_report as make_report
    from dpvision.statement.statement import make_statement as make_statement
    from dpvision.train.loop import fit as fit
    from dpvision.train.own_loop import private_loop as private_loop
    from dpvision.train.start import new_session as new_session

set_defaults()

_HOME = {
    "PrivacyConfig": "dpvision.config",
    "Store": "dpvision.data.store",
    "clipped_sum": "dpvision.dp.clip",
    "evaluate": "dpvision.eval.probes.suite",
    "fit": "dpvision.train.loop",
    "fit_head": "dpvision.adapt.session:adapt",
    "load": "dpvision.encoders.open:open_encoder",
    "load_classifier": "dpvision.encoders.classifier",
    "make_plan": "dpvision.privacy.plan",
    "make_report": "dpvision.report.page",
    "make_statement": "dpvision.statement.statement",
    "new_head_session": "dpvision.adapt.session",
    "new_session": "dpvision.train.start",
    "open_store": "dpvision.data.open",
    "predict": "dpvision.encoders.predict",
    "private_loop": "dpvision.train.own_loop",
    "privatize": "dpvision.dp.noise",
}
"""Public name -> module that defines it, with its name there after a colon where that differs.
Imported late, so that ``import dpvision.privacy`` needs no torch.
"""

__all__ = [
    "PrivacyConfig",
    "Store",
    "clipped_sum",
    "evaluate",
    "fit",
    "fit_head",
    "load",
    "load_classifier",
    "make_plan",
    "make_report",
    "make_statement",
    "new_head_session",
    "new_session",
    "open_store",
    "predict",
    "private_loop",
    "privatize",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("dpvision")
    if name in _HOME:
        module, _, attribute = _HOME[name].partition(":")
        return getattr(importlib.import_module(module), attribute or name)
    raise AttributeError(f"module 'dpvision' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_HOME, "__version__", *(name for name in globals() if name.startswith("__"))])
