"""Canaries: synthetic records whose clipped gradients the auditor knows, in a run of the real step.

The records and their losses are the auditor's. All that gives the guarantee is the product's, as in
``train.loop``: ``train.step.step_sum`` draws by the plan, reads, clips and adds up over physical
batches and ranks, and ``dp.noise.privatize`` releases. The weights stay as they are, so that a
record has the same gradient in every step.

Legend: N records, P coordinates of all trained parameters, B rows, V views, L tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpvision.config import (
    DataConfig,
    MAEConfig,
    ModelConfig,
    PrivacyConfig,
    RunConfig,
    ViTConfig,
)
from dpvision.data.batch import Batch, take
from dpvision.data.keys import StepKey
from dpvision.data.store import Store
from dpvision.data.tokenizer import CaptionReader
from dpvision.data.transform import normalise_tensor
from dpvision.dp.clip import LossFn
from dpvision.dp.noise import privatize
from dpvision.dp.rounding import AUTOMATIC_GAMMA, reserve
from dpvision.dp.separable import perturb_zeros
from dpvision.errors import ConfigError
from dpvision.models import make_model
from dpvision.privacy.plan import draft_plan
from dpvision.runs.run import Secrets
from dpvision.train.distributed import Group, all_reduce_vector
from dpvision.train.gates import small_model
from dpvision.train.loop import shared_secrets
from dpvision.train.objectives import example_batch, loss_function
from dpvision.train.step import Training, check_reference_bits, step_sum

NORM = 10.0
"""Norm of a canary's gradient before the clip, in clipping norms."""
_MOST = 1_000_000
"""Coordinates of the gradients that are held, of each of 32 records in float64."""
_ROWS, _WIDTH = 2048, 64
"""Rows of a pass of ``weights_run``, and weights in a row of its table."""


class CanaryStore(Store):
    """Public records held in memory, with the ids 1 to N and the same views in every step."""

    def __init__(self, image_NVCHW: np.ndarray, batch: Batch) -> None:
        """Take images uint8, and labels and captions of ``batch``."""
        num = len(image_NVCHW)
        self.path, self.store_id, self.visibility, self.num_records = (
            Path("canaries"),
            "canaries",
            "public",
            num,
        )
        self.meta, self.label_names, self.licence, self.shard_paths = {}, None, None, []
        self._image_NVCHW, self._targets = image_NVCHW, batch.label_B
        single = batch.label_B is not None and batch.label_B.ndim == 1
        label = batch.label_B.numpy() if single and batch.label_B is not None else np.zeros(num)
        self.index = {"id": np.arange(1, num + 1), "label": label.astype(np.int64)}  # type: ignore[assignment]

    @property
    def multi_label(self) -> bool:
        return self._targets is not None and self._targets.ndim == 2

    def targets(self, rows: np.ndarray, num_classes: int) -> np.ndarray:
        assert self._targets is not None and self._targets.shape[-1] == num_classes
        return self._targets.numpy()[rows]

    def views(
        self,
        rows: np.ndarray,
        key: StepKey,
        data: DataConfig,
        image_size: int,
        device: str | torch.device = "cpu",
    ) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self._image_NVCHW[rows]), torch.ones(len(rows), dtype=torch.bool)


@dataclass(frozen=True)
class _Captions(CaptionReader):
    """Captions that are tokens already."""

    token_NVL: np.ndarray

    def read(
        self, store: Store, rows: np.ndarray, key: StepKey, views: int
    ) -> tuple[np.ndarray, np.ndarray]:
        return self.token_NVL[rows], np.ones(len(rows), dtype=bool)


@dataclass(frozen=True)
class _Scaled:
    """A loss whose records are scaled, each by a constant, with the masks of step 0 in all
    steps.
    """

    loss_fn: LossFn
    scale_N: Tensor
    key: StepKey

    def __call__(self, model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
        # The checks before a run have ids of their own.
        place_B = (batch.record_id_B - 1).clamp(0, len(self.scale_N) - 1)
        return self.loss_fn(model, batch, self.key) * self.scale_N[place_B]


@dataclass(frozen=True)
class _OneWeight:
    """A loss that moves one weight of a table by record: orthogonal gradients of one norm."""

    norm: float

    def __call__(self, model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
        assert isinstance(model, nn.Embedding)
        place_B = (batch.record_id_B - 1).clamp(0, model.weight.numel() - 1)
        width = model.embedding_dim
        chosen_BD = F.one_hot(place_B % width, width).float()
        return self.norm * (model(place_B // width) * chosen_BD).sum(1)


@dataclass(frozen=True, eq=False)
class CanaryRun:
    """A run of the real step on canaries, and what the auditor knows of it."""

    training: Training
    clipped_NP: np.ndarray
    """float64: what each record adds to a sum, computed alone by autograd, (N, P); of
    ``weights_run`` only the norm, (N, 1).
    """
    num_canaries: int
    """Records, the first ones, whose gradients have the norm ``NORM`` C before the clip."""
    parameters: dict[str, slice]
    """Coordinates of each trained parameter."""

    def steps(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Execute the plan. Yield of each step the release times the public divisor, float64 (P,),
        and which records were in it, bool (N,).
        """
        t, secrets = self.training, shared_secrets(Secrets(), self.training.group)
        for step in range(t.plan.steps):
            total, _ = step_sum(step, t, secrets.draw)
            drawn_N = torch.zeros(t.store.num_records, dtype=torch.float64)
            drawn_N[torch.from_numpy(total.record_id_B - 1)] = 1.0
            drawn_N = all_reduce_vector(drawn_N, t.group)
            released = privatize(total, t.plan, step, secrets.noise, owners=t.group)
            flat_P = torch.cat([released.grads[name].flatten() for name in self.parameters])
            yield (
                flat_P.cpu().double().numpy() * t.plan.expected_batch_size,
                drawn_N.numpy() > 0,
            )


def network_run(
    config: RunConfig, privacy: PrivacyConfig, num_canaries: int, group: Group
) -> CanaryRun:
    """Make a run of the config's loss on a small network of its kind (``train.gates.small_model``),
    whose records' losses are scaled so that the first ``num_canaries`` gradients have norm 10 C.

    Raises:
        ConfigError: a canary's gradient is zero or not finite.
    """
    num = privacy.dataset_size
    config = _config(config, privacy, small_model(config.model))
    model = perturb_zeros(make_model(config.model, config.seed))
    _freeze_rest(model)
    batch, size = example_batch(config, num), config.model.encoder.image_size
    pixels = np.random.default_rng(config.seed).integers(
        0, 256, (num, config.views, 3, size, size), dtype=np.uint8
    )
    image = normalise_tensor(torch.from_numpy(pixels), config.data.mean, config.data.std)
    batch, key = batch._replace(image_BVCHW=image), StepKey(config.seed, 0)
    loss_fn = loss_function(config)
    gradient_NP, parameters = _gradients(loss_fn, model, batch, key)
    norm_N, clip = gradient_NP.norm(dim=1), float(privacy.max_grad_norm or 0.0)
    if not bool((norm_N.isfinite() & (norm_N > 0)).all()):
        raise ConfigError(
            f"audit: recipe={config.recipe!r}; expected gradients of random images that are finite "
            "and not zero. Check the network with `dpvision doctor`."
        )
    scale_N = torch.ones(num, dtype=torch.float64)
    scale_N[:num_canaries] = NORM * clip / norm_N[:num_canaries]
    factor_N = _factors(norm_N * scale_N, privacy)
    words = None
    if batch.token_BVL is not None:
        tokens = batch.token_BVL.numpy()
        words = _Captions(None, tokens.shape[-1], tokens)  # type: ignore[arg-type]
    scaled = _Scaled(loss_fn, scale_N.float().to(group.device), key)
    training = _training(config, CanaryStore(pixels, batch), words, model, scaled, group)
    clipped_NP = (gradient_NP * (scale_N * factor_N)[:, None]).numpy()
    return CanaryRun(training, clipped_NP, num_canaries, parameters)


def weights_run(
    config: RunConfig, privacy: PrivacyConfig, num_more: int, group: Group
) -> CanaryRun:
    """Make a run in which each record moves one weight of a table, by C after the clip. A pass
    looks up rows of the table, so that its cost does not grow with the number of weights.

    Args:
        num_more: weights, after those of the records, that no record moves.
    """
    num, clip = privacy.dataset_size, float(privacy.max_grad_norm or 0.0)
    vit = ViTConfig(image_size=4, patch_size=4, depth=1, width=4, num_heads=1)
    config = _config(config, privacy, MAEConfig(encoder=vit))  # for the size of the images
    hardware = replace(config.hardware, physical_batch_size=_ROWS)
    config = replace(config, data=DataConfig(), hardware=hardware)
    store = CanaryStore(np.zeros((num, 1, 3, 4, 4), dtype=np.uint8), example_batch(config, 1))
    table = nn.Embedding(-(-(num + num_more) // _WIDTH), _WIDTH)
    nn.init.zeros_(table.weight)
    training = _training(config, store, None, table, _OneWeight(NORM * clip), group)
    norm_N = torch.full((num,), NORM * clip, dtype=torch.float64)
    clipped_N1 = (norm_N * _factors(norm_N, privacy))[:, None].numpy()
    return CanaryRun(training, clipped_N1, num, {"weight": slice(0, table.weight.numel())})


def _factors(norm_N: Tensor, privacy: PrivacyConfig) -> Tensor:
    """Return the factors of gradients of these norms, as docs/clipping.md has them, not by the code
    that is audited.
    """
    usable = float(privacy.max_grad_norm or 0.0) * (1 - reserve(torch.float32))
    if privacy.clipping == "automatic":
        return usable / (norm_N + AUTOMATIC_GAMMA)
    return (usable / norm_N).clamp(max=1.0)


def _config(config: RunConfig, privacy: PrivacyConfig, model: ModelConfig) -> RunConfig:
    rows = min(config.hardware.physical_batch_size, 16)
    hardware = replace(config.hardware, physical_batch_size=rows, compile=False, workers=1)
    return replace(config, privacy=privacy, model=model, hardware=hardware, init_from=None)


def _training(
    config: RunConfig,
    store: Store,
    words: CaptionReader | None,
    model: nn.Module,
    loss_fn: LossFn,
    group: Group,
) -> Training:
    rows = np.arange(store.num_records)
    plan, model = draft_plan(config.privacy), model.to(group.device)
    made = Training(config, plan, store, rows, words, model, loss_fn, group)
    check_reference_bits(made)
    return made


def _freeze_rest(model: nn.Module) -> None:
    """Leave the last trained parameters, of at most ``_MOST`` numbers, and freeze the others: for
    networks that have no small form.
    """
    left = _MOST
    for p in reversed([p for p in model.parameters() if p.requires_grad]):
        if p.numel() <= left:
            left -= p.numel()
        else:
            p.requires_grad_(False)


def _gradients(
    loss_fn: LossFn, model: nn.Module, batch: Batch, key: StepKey
) -> tuple[Tensor, dict[str, slice]]:
    """Return the gradient of each record, one record at a time, float64 (N, P) on the CPU, and the
    coordinates of each parameter.
    """
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    ends = np.cumsum([0, *(p.numel() for p in params.values())]).tolist()
    found = []
    for i in range(len(batch.record_id_B)):
        (loss,) = loss_fn(model, take(batch, slice(i, i + 1)), key)
        grads = torch.autograd.grad(
            loss, list(params.values()), allow_unused=True, materialize_grads=True
        )
        found.append(torch.cat([g.flatten() for g in grads]).double())
    return torch.stack(found), {
        name: slice(a, b) for name, a, b in zip(params, ends, ends[1:], strict=False)
    }
