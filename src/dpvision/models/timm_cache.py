"""Find pretrained weights in timm's caches. Nothing is downloaded."""

from pathlib import Path
from urllib.parse import urlparse

import timm
import torch
from huggingface_hub import constants, try_to_load_from_cache
from timm.models import PretrainedCfg

_FILES = ("model.safetensors", "pytorch_model.bin")
"""Names under which timm publishes, the preferred one first."""
_NONE = "nowhere: timm publishes none for this name"


def find_timm_weights(name: str) -> tuple[Path | None, list[str]]:
    """Find the file of a timm model's pretrained weights.

    Args:
        name: timm's name of the model; without a tag, timm's default tag.

    Returns:
        The file, or None if no cache has it; and a description of the places searched, for errors.
    """
    published = _published(name)
    if published is None:
        return None, [_NONE]
    places = []
    if published.hf_hub_id:
        repository = published.hf_hub_id.partition("@")[0]
        for file in (published.hf_hub_filename,) if published.hf_hub_filename else _FILES:
            found = try_to_load_from_cache(repository, file)
            if isinstance(found, str):
                return Path(found), []
        places.append(f"{repository} in {constants.HF_HUB_CACHE}")
    if isinstance(published.url, str):
        kept = Path(torch.hub.get_dir()) / "checkpoints" / Path(urlparse(published.url).path).name
        if kept.exists():
            return kept, []
        places.append(str(kept))
    return None, places or [_NONE]


def timm_licence(name: str) -> str | None:
    """Return the licence of a timm model's pretrained weights as stated by timm, or None."""
    published = _published(name)
    return None if published is None else published.license


def _published(name: str) -> PretrainedCfg | None:
    try:
        return timm.get_pretrained_cfg(name, allow_unregistered=True)
    except RuntimeError:  # no such tag
        return None
