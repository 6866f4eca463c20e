"""Continual pre-training: a small public share of the images first, then the rest with privacy (Bu
et al. 2024, arXiv 2402.18752).

    dpvision train synthetic.vip_micro
    dpvision train vip.continual_public_micro --data PUBLIC     images imported with --public; no
                                                                guarantee, costs no epsilon
    dpvision train vip.continual_micro --data STORE             the rest: epsilon 8, from
                                                                runs/vip.continual_public_micro

From the paper's abstract: a tenth of the images are public, epsilon is 8, and public images first
mitigate much of what noise costs pre-training; it trains classifiers of ImageNet-21k. Everything
else is ours: network and loss are ViP's; step 1 starts from ViP's warm start on textures
(``--init-from None``: from random weights) and repeats its schedule on the public images; step 2
has ViP's private settings, with the noise that fewer images need. A trial with a twentieth of the
private steps gained nothing (docs/log).
"""

from dataclasses import replace

from dpvision.config import RunConfig
from dpvision.recipes import synthetic, vip

_PUBLIC_SHARE = 0.1


def _public(size: str, warm: RunConfig, alone: RunConfig) -> RunConfig:
    images = round(_PUBLIC_SHARE * alone.privacy.dataset_size)
    return replace(
        warm,
        recipe=f"vip.continual_public_{size}",
        privacy=replace(warm.privacy, dataset_size=images),
        data=replace(alone.data, images="public"),
        init_from=f"runs/{warm.recipe}",
    )


def _private(size: str, alone: RunConfig) -> RunConfig:
    rest = alone.privacy.dataset_size - round(_PUBLIC_SHARE * alone.privacy.dataset_size)
    return replace(
        alone,
        recipe=f"vip.continual_{size}",
        privacy=replace(
            alone.privacy, dataset_size=rest, noise_multiplier=None, target_epsilon=8.0
        ),
        init_from=f"runs/vip.continual_public_{size}",
    )


def public_base() -> RunConfig:
    """Step 1 of vip.continual_base: a tenth of the images, without privacy; refuses a private
    store.
    """
    return _public("base", synthetic.vip_base(), vip.base())


def base() -> RunConfig:
    """vip.base on nine tenths of the images, from weights trained on the public tenth."""
    return _private("base", vip.base())


def public_micro() -> RunConfig:
    """Step 1 of vip.continual_micro: 5,000 public images of 32 px; refuses a private store."""
    return _public("micro", synthetic.vip_micro(), vip.micro())


def micro() -> RunConfig:
    """vip.micro on 45,000 images, from weights trained on 5,000 public ones."""
    return _private("micro", vip.micro())
