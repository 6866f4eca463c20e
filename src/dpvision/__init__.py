"""dpvision: train image models on pictures that must stay private.

    encoder, preprocess = dpvision.load("runs/NAME")
    features_BD = encoder(torch.from_numpy(preprocess(picture))[None])

The rooms and the one direction of imports are in docs/tour.md.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpvision.features import load as load

__all__ = ["load"]


def __getattr__(name: str) -> Any:
    # Lazily, so that `import dpvision.privacy` needs no torch.
    if name == "load":
        from dpvision.features import load

        return load
    raise AttributeError(f"module 'dpvision' has no attribute {name!r}")
