"""What dp-accounting computes itself: divergences of private selections, and distributions of
truncated batches and single Gaussians.

Imported only where such an event is asked for: importing dp-accounting takes longer than most
questions (decision 0036).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from absl import logging
from dp_accounting import rdp
from dp_accounting.dp_event import DpEvent
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.pld.pld_pmf import PLDPmf

from dpvision.privacy.loss_distribution import Distribution, Masses
from dpvision.privacy.renyi import at_orders


def renyi_divergences(event: DpEvent) -> np.ndarray | None:
    """Renyi divergences of ``event`` at ``renyi.ORDERS``, infinite at orders that dp-accounting
    leaves out; None if it has none.
    """
    accountant = rdp.RdpAccountant()
    if not accountant.supports(event):
        return None
    with _quiet():
        accountant.compose(event)
    return at_orders(
        np.asarray(accountant.orders, dtype=np.float64),
        np.asarray(accountant.rdp, dtype=np.float64),
    )


def gaussian_losses(noise_multiplier: float, interval: float) -> Distribution:
    """Privacy loss distribution of one Gaussian, on a grid of ``interval``."""
    return _distribution(
        pld.from_gaussian_mechanism(noise_multiplier, value_discretization_interval=interval)
    )


def truncated_losses(
    dataset_size: int, sample_rate: float, max_batch_size: int, noise: float, interval: float
) -> Distribution:
    """Privacy loss distribution of one Gaussian over a truncated Poisson batch."""
    return _distribution(
        pld.from_truncated_subsampled_gaussian_mechanism(
            dataset_size,
            sample_rate,
            max_batch_size,
            noise,
            value_discretization_interval=interval,
        )
    )


def _distribution(made: pld.PrivacyLossDistribution) -> Distribution:
    removing = _masses(made._pmf_remove)
    return Distribution(removing, removing if made._symmetric else _masses(made._pmf_add))


def _masses(pmf: PLDPmf) -> Masses:
    dense = pmf.to_dense_pmf()
    return Masses(
        dense._discretization,
        dense._lower_loss,
        np.asarray(dense._probs),
        float(dense._infinity_mass),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence dp-accounting's log of Renyi orders that it skips: the remaining orders give a valid
    bound.
    """
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)
