"""The DP-Cap recipes' captioners to measure with: two forms of their loss, a batch, and the paper's
own figures to set beside.

Legend: B records, V views or (in ``_VD``) words, L caption tokens, D width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.dp.clip import LossFn
from dpvision.models.captioner import Captioner
from dpvision.recipes.dpcap import base
from dpvision.train.objectives import caption_losses

VOCABULARY, NUM_TOKENS = base().model.vocab_size, base().model.num_tokens

_GPUS, _EPOCHS = 128, 32
_DAYS = {
    ("large", "functorch"): 61.0,
    ("large", "ghost norm"): 3.3 * 13.0,
    ("large", "ghost norm + AMP"): 13.0,
    ("base", "as trained"): 5.0,
}
"""Days of DP-Cap's 32 epochs of 233 M pairs on 128 V100 (32 GB). Its figure 4 is a drawing; these
are from the text beside it (61 days; 13 days, a speedup of 3.3 over ghost norm alone) and from
appendix A.2 (Base).
"""
_LARGEST_BATCH = {
    "functorch": {"tiny": 36, "small": 20, "base": 12, "large": 5},
    "ghost norm": {"tiny": 350, "small": 230, "base": 180, "large": 64},
    "ghost norm + AMP": {"tiny": 420, "small": 310, "base": 225, "large": 90},
}
"""Records, one V100 with 32 GB: DP-Cap, Table 1."""


def plain_caption_losses(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    """The recipes' loss with the logits held in full, by operations that every library has a rule
    for.

    Returns:
        losses_B, float32.
    """
    assert isinstance(model, Captioner) and batch.token_BVL is not None
    token_BL = batch.token_BVL[:, 0]
    # Contiguous: Opacus' ghost norm of an embedding takes a view of the ids.
    hidden_BLD = model.decode(token_BL[:, :-1].contiguous(), model.encode(batch.image_BVCHW[:, 0]))
    target_BL = token_BL[:, 1:]
    return (
        F.cross_entropy(
            model.logits(hidden_BLD).flatten(0, 1).float(), target_BL.flatten(), reduction="none"
        )
        .view(target_BL.shape)
        .mean(1)
    )


def make_batch(num_records: int, device: torch.device) -> Batch:
    """Random images of 224 px and captions of full length, the same at every call, made on the
    device.
    """
    generator = torch.Generator(device).manual_seed(0)
    ids_B = torch.arange(1, num_records + 1, device=device)
    image_BVCHW = torch.randn(num_records, 1, 3, 224, 224, device=device, generator=generator)
    token_BVL = torch.randint(
        3, VOCABULARY, (num_records, 1, NUM_TOKENS), device=device, generator=generator
    )
    return Batch(ids_B, torch.ones_like(ids_B, dtype=torch.bool), image_BVCHW, token_BVL)


def loss_forms() -> dict[str, LossFn]:
    """The forms of the vocabulary head, by name; "fused" is what the recipes run."""
    return {"plain": plain_caption_losses, "fused": caption_losses}


def render_beside_dpcap(rows: Sequence[dict[str, Any]], hardware: str) -> str:
    """Our GPU hours for an epoch and largest batches of the captioners, above the figures that
    DP-Cap prints.

    Args:
        rows: of a result (``common.row``).
        hardware: what ours ran on.
    """
    lines = [f"{'':<40} {'GPU hours, 233 M pairs':>22} {'largest batch':>14}"]
    for size in ("tiny", "small", "base", "large"):
        ours: dict[str, dict[str, float]] = {}
        for r in rows:
            if r["case"] == f"cap_{size}" and r["metric"] in (
                "gpu_hours_per_epoch",
                "max_physical_batch",
            ):
                ours.setdefault(r["variant"], {})[r["metric"]] = r["value"]
        lines += [
            _line(
                f"{size:<6} here: {variant}",
                found.get("gpu_hours_per_epoch"),
                found.get("max_physical_batch"),
            )
            for variant, found in ours.items()
        ]
        methods = [
            *_LARGEST_BATCH,
            *(method for at, method in _DAYS if at == size and method not in _LARGEST_BATCH),
        ]
        for method in methods if ours else []:
            days = _DAYS.get((size, method))
            hours = None if days is None else days * 24 * _GPUS / _EPOCHS
            lines.append(
                _line(
                    f"{size:<6} DP-Cap: {method}", hours, _LARGEST_BATCH.get(method, {}).get(size)
                )
            )
    lines.append(
        f"here: {hardware}. DP-Cap: V100 with 32 GB (Sander et al., ICML 2024: text of figure 4, "
        "Table 1, appendix A.2). -: not printed."
    )
    return "\n".join(lines)


def _line(label: str, hours: float | None, records: float | None) -> str:
    shown = ["-" if value is None else f"{value:,.0f}" for value in (hours, records)]
    return f"{label:<40} {shown[0]:>22} {shown[1]:>14}"
