"""The privacy claims of the papers, and what the same settings cost by this package's accounting.

Each row is one mechanism: ``steps`` Poisson-sampled Gaussian steps. For each we compute epsilon
three ways at the claim's delta: by Renyi divergences with the conversion of Mironov (arXiv
1702.07476, proposition 3); with that of Balle et al. (arXiv 1905.09982, theorem 21), which gives
the papers' figures; and by privacy loss distributions, which dpvision states.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dpvision.config.unit import Unit
from dpvision.privacy import accountant
from dpvision.privacy.sampling import Poisson


@dataclass(frozen=True)
class Claim:
    """One row of a paper, or of a repository's documentation."""

    name: str
    paper: str
    where: str
    dataset_size: int
    expected_batch_size: int
    noise_multiplier: float
    steps: int
    delta: float
    claimed_epsilon: float | None
    """If None, settings without a claim."""
    steps_stated: bool
    """Whether the number of steps stands with the row; else it is inferred from other rows."""


@dataclass(frozen=True)
class Recomputed:
    """A claim beside what its settings cost."""

    claim: Claim
    epsilon: float
    """By privacy loss distributions: an upper bound, within 0.003 of the tight value."""
    epsilon_rdp: float
    """Renyi, conversion of Balle et al."""
    epsilon_rdp_mironov: float
    """Renyi, conversion of Mironov."""

    @property
    def holds(self) -> bool | None:
        """Whether the settings keep the claimed epsilon; None without a claim."""
        return (
            None
            if self.claim.claimed_epsilon is None
            else self.epsilon <= self.claim.claimed_epsilon
        )

    @property
    def as_published(self) -> bool | None:
        """Whether the papers' accounting (Balle) gives the claim, within 1.5%: their two digits;
        None without a claim.
        """
        claimed = self.claim.claimed_epsilon
        return None if claimed is None else abs(self.epsilon_rdp - claimed) <= 0.015 * claimed


def recompute(claim: Claim) -> Recomputed:
    """What the settings of ``claim`` cost, at its delta."""
    draws = Poisson(Unit(claim.dataset_size), claim.expected_batch_size)
    event = draws.event(claim.noise_multiplier, claim.steps)
    curve, balle = accountant.rdp_curve(event), accountant.epsilon_rdp(event, claim.delta)
    assert curve is not None and balle is not None, (
        "Poisson-sampled Gaussians have Renyi divergences"
    )
    mironov = float(np.min(curve[1] - math.log(claim.delta) / (curve[0] - 1)))
    return Recomputed(claim, accountant.epsilon(event, claim.delta), balle, mironov)


def recompute_all() -> Iterator[Recomputed]:
    """All of ``CLAIMS``, in order; about half a second each."""
    return map(recompute, CLAIMS)


# fmt: off
CLAIMS = (
    Claim("vip-arxiv-4.1", "ViP arXiv", "Sec 4.1 text",
          233_804_767, 81_920, 0.5, 6_000, 2.1385e-09, 8, False),
    Claim("vip-icml-4.1", "ViP ICML", "Sec 4.1 text",
          233_804_767, 98_304, 0.48, 6_100, 2.1385e-09, 8, True),
    Claim("vip-T3-98k-233M", "ViP arXiv T3 / ICML T10", "row 4/7",
          233_804_767, 98_304, 0.48, 6_000, 2.1385e-09, 8, False),
    Claim("vip-T3-23M", "ViP arXiv T3 / ICML T10", "row 3",
          23_380_476, 98_304, 0.66, 6_000, 2.1385e-08, 8, False),
    Claim("vip-T3-23M-T6100", "ViP arXiv T3 / ICML T10", "row 3",
          23_380_476, 98_304, 0.66, 6_100, 2.1385e-08, 8, False),
    Claim("vip-T3-2M", "ViP arXiv T3 / ICML T10", "row 2",
          2_338_047, 98_304, 2.5, 6_000, 2.1385e-07, 8, False),
    Claim("vip-T3-2M-n2.0M", "ViP arXiv T3 / ICML T10", "row 2 with n=2.0M exactly",
          2_000_000, 98_304, 2.5, 6_000, 2.5e-07, 8, False),
    Claim("vip-T3-2M-T6100", "ViP arXiv T3 / ICML T10", "row 2",
          2_338_047, 98_304, 2.5, 6_100, 2.1385e-07, 8, False),
    Claim("vip-T3-32k", "ViP arXiv T3 / ICML T10", "row 6",
          233_804_767, 32_768, 0.45, 18_000, 2.1385e-09, 8, False),
    Claim("vip-T3-32k-T18300", "ViP arXiv T3 / ICML T10", "row 6",
          233_804_767, 32_768, 0.45, 18_300, 2.1385e-09, 8, False),
    Claim("vip-T3-8k", "ViP arXiv T3 / ICML T10", "row 5",
          233_804_767, 8_192, 0.41, 72_000, 2.1385e-09, 8, False),
    Claim("vip-T3-8k-T73200", "ViP arXiv T3 / ICML T10", "row 5",
          233_804_767, 8_192, 0.41, 73_200, 2.1385e-09, 8, False),
    Claim("vip-icml-T8-eps2", "ViP ICML T8", "eps=2",
          233_804_767, 98_304, 0.787, 1_500, 2.1385e-09, 2, True),
    Claim("vip-icml-T8-eps4", "ViP ICML T8", "eps=4",
          233_804_767, 98_304, 0.603, 3_000, 2.1385e-09, 4, True),
    Claim("vip-icml-T6-dedup245M", "ViP ICML T6", "Dedup-LAION-245M",
          245_000_000, 98_304, 0.48, 6_100, 2.0408e-09, 8, False),
    Claim("vip-A.2-81920", "ViP ICML A.2", "cost paragraph",
          233_804_767, 81_920, 0.48, 6_000, 2.1385e-09, 8, True),
    Claim("vip-A.5-imagenet-ft", "ViP A.5 / T4(T5)", "DP fine-tune ImageNet",
          1_281_167, 262_144, 5.6, 1_500, 8e-07, 8, True),
    Claim("vip-code-PRETRAIN.md", "ViP repo, PRETRAIN.md", "ImageNet demo command",
          1_281_167, 81_920, 0.5, 10_000, 3.9027e-07, None, True),
    Claim("vip-code-default-233M", "ViP repo, code's defaults", "on 233 M",
          233_804_767, 81_920, 0.5, 10_000, 2.1385e-09, None, True),
    Claim("dpcap-T4-eps8", "DP-Cap T4/T7", "eps=8 base",
          233_804_767, 1_310_720, 0.728, 5_708, 4.2771e-09, 8, True),
    Claim("dpcap-T4-eps2", "DP-Cap T4", "eps=2",
          233_804_767, 1_310_720, 1.18, 2_854, 4.2771e-09, 2, True),
    Claim("dpcap-T4-eps1", "DP-Cap T4", "eps=1",
          233_804_767, 1_310_720, 1.5, 1_427, 4.2771e-09, 1, True),
    Claim("dpcap-T4-23M", "DP-Cap T4", "23M, B=130K",
          23_380_476, 131_072, 0.728, 5_708, 4.2771e-08, 8, True),
    Claim("dpcap-T4-2.3M", "DP-Cap T4", "2.3M, B=13K",
          2_338_047, 13_107, 0.728, 5_708, 4.2771e-07, 8, True),
    Claim("dpcap-T7-vip-orig", "DP-Cap T7", "ViP",
          233_804_767, 98_304, 0.48, 6_000, 4.2771e-09, 8, True),
    Claim("dpcap-T7-98k", "DP-Cap T7", "98k",
          233_804_767, 98_304, 0.474, 5_708, 4.2771e-09, 8, True),
    Claim("dpcap-T7-200k", "DP-Cap T7", "200k",
          233_804_767, 196_608, 0.513, 5_708, 4.2771e-09, 8, True),
    Claim("dpcap-T7-400k", "DP-Cap T7", "400k",
          233_804_767, 393_216, 0.564, 5_708, 4.2771e-09, 8, True),
    Claim("dpcap-T13-64ep", "DP-Cap T13", "64 epochs sigma .81",
          233_804_767, 1_310_720, 0.81, 11_416, 4.2771e-09, 8, False),
    Claim("dpcap-T13-128ep", "DP-Cap T13", "128 epochs sigma .95",
          233_804_767, 1_310_720, 0.95, 22_832, 4.2771e-09, 8, False),
    Claim("dpcap-readme-eps7-2.0B", "DP-Cap repo, released weights", "N=2e9",
          2_000_000_000, 1_310_720, 0.527, 5_000, 5e-10, 7, True),
    Claim("dpcap-readme-eps7-2.1B", "DP-Cap repo, released weights", "2.1e9",
          2_100_000_000, 1_310_720, 0.527, 5_000, 4.7619e-10, 7, True),
    Claim("dpcap-readme-eps7-2.5B", "DP-Cap repo, released weights", "N=2.5e9",
          2_500_000_000, 1_310_720, 0.527, 5_000, 4e-10, 7, True),
    Claim("tan-imagenet", "TAN repo", "ImageNet final run",
          1_281_167, 32_768, 2.5, 18_000, 8e-07, 8, True),
    Claim("tan-cifar10", "TAN repo", "CIFAR-10",
          50_000, 4_096, 3.0, 2_500, 1e-05, 8, True),
)
# fmt: on
