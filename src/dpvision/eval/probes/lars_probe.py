"""The linear probe of the MAE paper, as ViP uses it: a batch-normalised linear head trained with
LARS on augmented images.

ViP, appendix A.3 (Yu et al. 2024) follows He et al. (2022): BatchNorm without affine parameters
before the head, LARS (You et al. 2017) with momentum 0.9 and trust coefficient 0.001, no decay,
learning rate = blr x batch / 256 at batch 16,384, 90 epochs of which 10 warm up, then a half
cosine; RandomResizedCrop and flip in training. ViP concatenates the mean patch tokens of the last
12 blocks (9216 dimensions for Base); the MAE paper uses the class token. Neither says how blr was
chosen; here a held-out fifth of the *training* units decides: a second set of heads is trained
without them, and the head that is scored is trained on all.

Legend: B records of a batch, N training records, M test records, D feature dimension, R values of
blr, C channels, H height, W width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
import torch
from timm.optim.lars import Lars
from torch import Tensor, nn
from torch.nn import functional as F

from dpvision.config import DataConfig
from dpvision.data.keys import StepKey
from dpvision.data.loader import image_batches, physical_batches
from dpvision.data.store import Store
from dpvision.encoders.encoder import Encoder
from dpvision.errors import ConfigError, DataError
from dpvision.eval.probes.linear_probe import held_out
from dpvision.eval.probes.protocol import Protocol, Subject, Task
from dpvision.eval.probes.records import Epochs
from dpvision.eval.probes.settings import LarsSettings
from dpvision.eval.score import Score

Tokens = Literal["blocks", "cls"]
FeatureOf = Callable[[Tensor], Tensor]
_NORM_EPS, _HEAD_STD = 1e-6, 0.01


def token_features(encoder: Encoder, tokens: Tokens, num_blocks: int = 12) -> tuple[FeatureOf, str]:
    """Return the probe's feature function, from x_BCHW to x_BD float32, and its name.

    "blocks": the mean patch tokens of the last ``num_blocks`` blocks, concatenated; for an encoder
    without blocks its default pooling. "cls": the class token after the final norm, without the
    norm's scale and shift, which the probe's BatchNorm undoes (up to a sign per dimension, which
    the head absorbs).

    Raises:
        ConfigError: "cls" for an encoder without a class token.
    """
    blocks = encoder.blocks
    if blocks is None:
        if tokens == "cls":
            raise ConfigError(
                f"linear_cls: {encoder.name} has no class token; expected a transformer. Use "
                "--protocols linear_lars."
            )
        return lambda x_BCHW: encoder(x_BCHW).float(), "default pooling (it has no blocks)"

    def joined(x_BCHW: Tensor) -> Tensor:
        return torch.cat(
            [token_BLD[:, 1:].float().mean(dim=1) for token_BLD in blocks(x_BCHW)[-num_blocks:]],
            dim=1,
        )

    def class_token(x_BCHW: Tensor) -> Tensor:
        token_BD = blocks(x_BCHW)[-1][:, 0].float()
        return F.layer_norm(token_BD, token_BD.shape[1:], eps=_NORM_EPS)

    return (
        (joined, "mean patch tokens of the last blocks")
        if tokens == "blocks"
        else (class_token, "class token")
    )


class LarsHeads(nn.Module):
    """One normalisation and R linear heads, one per blr, trained in parallel on the same
    features.
    """

    def __init__(
        self, width: int, num_classes: int, settings: LarsSettings, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width, affine=False, eps=_NORM_EPS)
        self.weight_R = nn.ParameterList(
            torch.empty(num_classes, width).normal_(0, _HEAD_STD, generator=generator)
            for _ in settings.blrs
        )
        self.bias_R = nn.ParameterList(torch.zeros(num_classes) for _ in settings.blrs)

    def forward(self, x_BD: Tensor) -> list[Tensor]:
        """Return the logits of each head. In evaluation mode a record's logits do not depend on
        other records.
        """
        z_BD = self.norm(x_BD)
        return [
            F.linear(z_BD, weight, bias)
            for weight, bias in zip(self.weight_R, self.bias_R, strict=True)
        ]

    @torch.no_grad()
    def predict(self, x_MD: Tensor) -> Tensor:
        """Return the predicted labels of each head, int64 (R, M)."""
        self.eval()
        return torch.stack([logits.argmax(dim=1) for logits in self(x_MD)])


class LarsTrainer:
    """Trains heads batch by batch. The trust ratio applies to weights, not to biases (as in MAE's
    code).
    """

    def __init__(self, heads: LarsHeads, settings: LarsSettings) -> None:
        self.heads, self.settings, self.steps = heads, settings, 0
        groups = [{"params": [w], "always_adapt": True} for w in heads.weight_R] + [
            {"params": [b]} for b in heads.bias_R
        ]
        # Without weight decay timm skips the trust ratio unless always_adapt is set.
        self.optimizer = Lars(
            groups, lr=0.0, momentum=settings.momentum, trust_coeff=settings.trust, weight_decay=0.0
        )

    def step(self, x_BD: Tensor, label_B: Tensor, factor: float) -> Tensor:
        """Make one update at rate blr x ``factor`` and return the heads' mean losses before it,
        (R,).
        """
        for group, blr in zip(self.optimizer.param_groups, [*self.settings.blrs] * 2, strict=True):
            group["lr"] = blr * factor
        # A cumulative average first, torch's moving average later, so that the initial mean 0 and
        # variance 1 have no influence.
        self.heads.norm.momentum = max(0.1, 1 / (self.steps + 1))
        self.heads.train()
        loss_R = torch.stack([F.cross_entropy(logits, label_B) for logits in self.heads(x_BD)])
        self.optimizer.zero_grad()
        loss_R.sum().backward()
        self.optimizer.step()
        self.steps += 1
        return loss_R.detach()


@dataclass(frozen=True)
class LarsResult:
    """Predictions for the test images."""

    predicted_M: np.ndarray
    label_M: np.ndarray
    row_M: np.ndarray
    """Rows of the test images."""
    blr: float
    """The chosen value."""
    num_features: int


@dataclass(frozen=True)
class LinearLars(Protocol):
    """``lars_probe`` on the mean patch tokens of the last blocks."""

    name: ClassVar[str] = "linear_lars"
    needs = "images"
    tokens: ClassVar[Tokens] = "blocks"
    settings: LarsSettings = field(default_factory=LarsSettings)

    def check(self, subject: Subject, task: Task) -> None:
        token_features(subject.encoder, self.tokens)

    def run(self, subject: Subject, task: Task) -> list[Score]:
        encoder, lars = subject.encoder, self.settings
        feature_of, what = token_features(encoder, self.tokens, lars.num_blocks)
        probed = lars_probe(
            feature_of, task, encoder.data, encoder.image_size, lars, seed=self.seed
        )
        how = f"{lars.words(len(task.train[1]))}, {what}"
        return [
            task.scoring.score(
                encoder.name, "LARS probe", how, [probed.predicted_M], probed.label_M, probed.row_M
            )
        ]


class LinearCls(LinearLars):
    """``lars_probe`` on the class token."""

    name = "linear_cls"
    tokens = "cls"


def lars_probe(
    feature_of: FeatureOf,
    task: Task,
    data: DataConfig,
    image_size: int,
    settings: LarsSettings | None = None,
    *,
    seed: int = 0,
) -> LarsResult:
    """Train a head for each blr on the training rows, choose one by held-out training units, and
    predict the test rows.

    1. Hold out a fifth of the training units, if there is a choice of blr.
    2. Pass over all training images in large batches. The first trainer's heads, one for each blr,
       learn from the whole batch; the second trainer's, which start from the same weights, from the
       batch without the held-out images.
    3. Choose the blr whose head of the second trainer is right on most held-out images.
    4. Predict the test images by the first trainer's head of this blr.

    Args:
        feature_of: frozen function from x_BCHW on ``task.device`` to x_BD (``token_features``).
        task: its batch size is that of the encoder's passes; it changes only time and memory.
        data: gives the normalisation.
        seed: of the heads' initial weights, the order of the images, crops and flips.

    Raises:
        DataError: no image could be read, or too few to hold some out.
    """
    settings = settings or LarsSettings()
    store, rows = task.train
    held_N = np.zeros(len(rows), dtype=bool)
    if len(settings.blrs) > 1:
        held_N = _held_out(store.labels[rows], task.unit_N, seed)
    view = _Views(feature_of, task, data, image_size, settings, seed)
    trainers = _train(view, rows[held_N])
    best = 0
    if len(settings.blrs) > 1:
        right_R, n = torch.zeros(len(settings.blrs)), 0
        for x_BD, row_B in view.centred(store, rows[held_N]):
            predicted_RB = trainers[1].heads.predict(x_BD).cpu()
            right_R += (predicted_RB == torch.from_numpy(store.labels[row_B])).sum(dim=1)
            n += len(x_BD)
        best = int(right_R.argmax())
        task.say(
            f"LARS probe: blr {settings.blrs[best]:g} ({float(right_R[best]) / max(1, n):.1%} of "
            "the held-out images)"
        )
    test_store, test_rows = task.test
    found = [
        (trainers[0].heads.predict(x_BD)[best].cpu().numpy(), row_B)
        for x_BD, row_B in view.centred(test_store, test_rows)
    ]
    if not found:
        raise _unreadable(test_store, test_rows)
    predicted_M, row_M = (np.concatenate(part) for part in zip(*found, strict=True))
    num_features = trainers[0].heads.weight_R[0].shape[1]
    blr = settings.blrs[best]
    return LarsResult(predicted_M, test_store.labels[row_M], row_M, blr, num_features)


def _held_out(label_N: np.ndarray, unit_N: np.ndarray, seed: int) -> np.ndarray:
    held_N = held_out(label_N, unit_N, seed)
    if not held_N.any() or len(np.unique(label_N[~held_N])) < 2:
        raise DataError(
            f"lars: {len(label_N)} training records; expected enough to hold out a fifth. Label "
            "more images, or give one blr."
        )
    return held_N


def _train(view: "_Views", held_rows: np.ndarray) -> list[LarsTrainer]:
    """Return a trainer that saw all training rows and, if some are held out, one that saw the
    others only.
    """
    task, settings = view.task, view.settings
    store, rows = task.train
    num_classes = int(store.labels[rows].max()) + 1
    is_held = np.zeros(store.num_records, dtype=bool)
    is_held[held_rows] = True
    epochs = Epochs(
        len(rows), settings.batch_size, settings.epochs, settings.warmup_epochs, view.seed
    )
    # The rate is blr x batch / 256, times the schedule's level of the step.
    factor, done = len(rows) / epochs.batches / 256, 0
    trainers: list[LarsTrainer] = []
    for epoch in range(settings.epochs):
        loss, seen = 0.0, 0
        for x_BD, row_B in view.epoch(store, rows, epoch, epochs):
            label_B = torch.from_numpy(store.labels[row_B]).to(task.device)
            if not trainers:  # the first batch tells the width
                for _ in range(2 if len(held_rows) else 1):
                    generator = torch.Generator().manual_seed(view.seed)
                    heads = LarsHeads(x_BD.shape[1], num_classes, settings, generator)
                    trainers.append(LarsTrainer(heads.to(task.device), settings))
            rate = factor * epochs.level(done)
            if len(x_BD) > 1:  # batch statistics need two
                losses_R = trainers[0].step(x_BD, label_B, rate)
                loss, seen = loss + float(losses_R.min()) * len(x_BD), seen + len(x_BD)
            kept_B = torch.from_numpy(~is_held[row_B]).to(task.device)
            if len(trainers) > 1 and int(kept_B.sum()) > 1:
                trainers[1].step(x_BD[kept_B], label_B[kept_B], rate)
            done += 1
        mean = loss / max(1, seen)
        task.say(f"LARS probe: epoch {epoch + 1} of {settings.epochs}, loss {mean:.3f}")
    if not trainers:
        raise _unreadable(store, rows)
    return trainers


def _unreadable(store: Store, rows: np.ndarray) -> DataError:
    return DataError(
        f"lars: {store.path} has no readable image among {len(rows)}; expected some. Import the "
        "source again."
    )


class _Views:
    """Features of augmented and of centre-cropped images, with their rows."""

    def __init__(
        self,
        feature_of: FeatureOf,
        task: Task,
        data: DataConfig,
        image_size: int,
        settings: LarsSettings,
        seed: int,
    ) -> None:
        self.feature_of, self.task, self.image_size = feature_of, task, image_size
        self.settings, self.seed = settings, seed
        self.data = DataConfig(mean=data.mean, std=data.std, crop_scale=settings.crop_scale)
        self._kept: tuple[Tensor, np.ndarray] | None = None

    def epoch(
        self, store: Store, rows: np.ndarray, epoch: int, epochs: Epochs
    ) -> Iterator[tuple[Tensor, np.ndarray]]:
        """Yield batches x_BD and row_B of one pass in random order, of nearly equal size."""
        order = epochs.order(epoch)
        if not self.settings.augment:
            if self._kept is None:
                found = [*self.centred(store, rows)]
                if not found:
                    return
                self._kept = (
                    torch.cat([x for x, _ in found]),
                    np.concatenate([row for _, row in found]),
                )
            x_ND, row_N = self._kept
            order = order[order < len(row_N)]  # without images that do not decode
            for part in np.array_split(order, epochs.batches):
                yield x_ND[torch.from_numpy(part).to(x_ND.device)], row_N[part]
            return
        for part in np.array_split(rows[order], epochs.batches):
            x, row = self._augmented(store, part, epoch)
            if len(row):
                yield torch.cat(x), row

    @torch.no_grad()
    def _augmented(
        self, store: Store, rows: np.ndarray, epoch: int
    ) -> tuple[list[Tensor], np.ndarray]:
        key, found, valid = StepKey(self.seed, epoch), [], []
        size, num, workers = self.image_size, self.task.batch_size, self.task.workers
        for batch in physical_batches(
            store, rows, key, self.data, size, physical_batch_size=num, workers=workers
        ):
            valid.append(batch.valid_B)
            if batch.valid_B.any():
                found.append(
                    self.feature_of(batch.image_BVCHW[batch.valid_B][:, 0].to(self.task.device))
                )
        return found, rows[torch.cat(valid).numpy()]

    @torch.no_grad()
    def centred(self, store: Store, rows: np.ndarray) -> Iterator[tuple[Tensor, np.ndarray]]:
        """Yield features under the evaluation transform, batch by batch, in the order of
        ``rows``.
        """
        size = self.image_size
        edge = (round(size * self.settings.eval_resize) - size) // 2
        resized = round(size * self.settings.eval_resize)
        num, workers = self.task.batch_size, self.task.workers
        for x_BCHW, row_B, _ in image_batches(
            store, rows, resized, self.data, batch_size=num, workers=workers
        ):
            x_BCHW = x_BCHW[..., edge : edge + size, edge : edge + size]
            yield self.feature_of(x_BCHW.to(self.task.device)), row_B.numpy()
