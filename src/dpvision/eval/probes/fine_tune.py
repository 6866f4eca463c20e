"""Few-shot fine-tuning: the whole network and a new head trained on K images per class (ViP,
appendix A.3).

Transformers: AdamW, learning rate 3e-3, 3e-4 or 3e-5, decay 0.05. Convnets: SGD, 1e-2, 1e-3 or
1e-4, momentum 0.9, no decay. 200 epochs, 10 of them warm-up, then a half cosine; AutoAugment (Cubuk
et al. 2018). The paper does not specify the choice of the rate, the batch, the crops or the number
of draws. Here the rate is chosen by the mean accuracy over all draws on a held-out fifth of the K
images, and the final training uses all of them (fewer than five images cannot be split: the middle
rate); batch 64; random resized crop and flip; three draws.

Legend: B images of a batch, N training records, M test records, C channels (or classes), H height,
W width.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms import v2

from dpvision.data.decode import BadImage, decode
from dpvision.data.keys import StepKey
from dpvision.data.loader import image_batches
from dpvision.data.ordered import ordered_map
from dpvision.data.store import Store
from dpvision.data.transform import CROP_NUMBERS, crop_box, cut, normalise
from dpvision.encoders.encoder import Encoder
from dpvision.errors import ConfigError, DataError
from dpvision.eval.probes.linear_probe import held_out
from dpvision.eval.probes.protocol import Protocol, Subject, Task
from dpvision.eval.probes.records import Epochs, check_shots, draw_shots, draws_of
from dpvision.eval.probes.settings import FineTuneSettings, middle_rate
from dpvision.eval.score import Score


class Tuned(nn.Module):
    """A trainable copy of an encoder with a linear head that starts at zero."""

    def __init__(self, encoder: Encoder, num_classes: int) -> None:
        super().__init__()
        assert encoder.backbone is not None
        self.backbone = encoder.backbone()
        with torch.no_grad():
            probe = self.backbone.eval()(torch.zeros(1, 3, encoder.image_size, encoder.image_size))
        self.weight, self.bias = (
            nn.Parameter(torch.zeros(num_classes, probe.shape[1])),
            nn.Parameter(torch.zeros(num_classes)),
        )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the logits, (B, C)."""
        return F.linear(self.backbone(x_BCHW).float(), self.weight, self.bias)


@dataclass(frozen=True)
class FineTuneResult:
    """Predictions for the test images, one array per draw."""

    predicted: list[np.ndarray]
    label_M: np.ndarray
    row_M: np.ndarray
    """Rows of the test images."""
    learning_rate: float
    """The rate chosen for all draws."""


@dataclass(frozen=True)
class FineTune(Protocol):
    """``fine_tune`` as a protocol."""

    name: ClassVar[str] = "fine_tune"
    needs = "images"
    shots: tuple[int, ...] = (10,)
    """Images per class."""
    settings: FineTuneSettings = field(default_factory=FineTuneSettings)

    def __post_init__(self) -> None:
        check_shots(self.shots)

    def check(self, subject: Subject, task: Task) -> None:
        check_trainable(subject.encoder)

    def run(self, subject: Subject, task: Task) -> list[Score]:
        scores = []
        for k in self.shots:
            tuned = fine_tune(subject.encoder, task, k, self.settings, seed=self.seed)
            title, how = f"{k}-shot fine-tuning", self.settings.words(subject.encoder, k)
            scores.append(
                task.scoring.score(
                    subject.encoder.name, title, how, tuned.predicted, tuned.label_M, tuned.row_M
                )
            )
        return scores


def check_trainable(encoder: Encoder) -> None:
    """Raise ConfigError unless the encoder has trainable weights."""
    if encoder.backbone is None:
        raise ConfigError(
            f"fine_tune: {encoder.name} has no trainable weights; expected a network. Use "
            "--protocols few_shot_probe."
        )


def fine_tune(
    encoder: Encoder,
    task: Task,
    k: int,
    settings: FineTuneSettings | None = None,
    *,
    seed: int = 0,
) -> FineTuneResult:
    """Fine-tune on several draws of K images per class, and predict the test images.

    No unit is both trained on and held out for the choice of the rate.

    Raises:
        ConfigError: the encoder has no trainable weights, or K < 1.
        DataError: a class has fewer than K images; the images of a draw are of fewer than five
            persons, so that none can be held out for the choice of the rate; no image can be read.
    """
    settings = settings or FineTuneSettings()
    check_trainable(encoder)
    (store, rows), unit_N = task.train, task.unit_N
    label_N = store.labels[rows]
    seeds = draws_of(seed, settings.draws)
    shots = [draw_shots(label_N, k, draw, names=store.label_names) for draw in seeds]
    rates, num_classes = settings.rates(encoder), int(label_N.max()) + 1
    job = _Job(encoder, task, num_classes, settings)
    chosen = middle_rate(rates)
    if len(rates) > 1 and k >= 5:
        held_by_draw = [
            held_out(label_N[shot], unit_N[shot], draw)
            for draw, shot in zip(seeds, shots, strict=True)
        ]
        for shot, held in zip(shots, held_by_draw, strict=True):
            if not held.any():
                got = (
                    f"the {len(shot)} images of a draw are of {len(np.unique(unit_N[shot]))} "
                    "persons"
                )
                remedy = (
                    "Import images of more persons, or use --shots 4, which takes the middle "
                    "learning rate."
                )
                raise DataError(
                    f"few-shot: {got}; expected at least five, to hold one out. {remedy}"
                )
        share_R = []
        for rate in rates:
            shares = []
            for draw, (shot, held) in enumerate(zip(shots, held_by_draw, strict=True)):
                model = job.train(
                    rows[shot[~held]],
                    rate,
                    seeds[draw],
                    f"lr {rate:g}, draw {draw + 1} of {settings.draws}",
                )
                predicted, truth, _ = job.predict(model, store, rows[shot[held]])
                shares.append(float((predicted == truth).mean()))
            share_R.append(float(np.mean(shares)))
        chosen = rates[int(np.argmax(share_R))]
        task.say(f"few-shot: lr {chosen:g} ({max(share_R):.1%} of the held-out images)")
    found, label_M, row_M = [], np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    for draw, shot in enumerate(shots):
        model = job.train(
            rows[shot],
            chosen,
            seeds[draw],
            f"lr {chosen:g}, draw {draw + 1} of {settings.draws}, all images",
        )
        predicted, label_M, row_M = job.predict(model, *task.test)
        found.append(predicted)
    return FineTuneResult(found, label_M, row_M, chosen)


def make_optimizer(
    model: nn.Module, encoder: Encoder, settings: FineTuneSettings
) -> torch.optim.Optimizer:
    """Make AdamW for transformers or SGD for convnets; the rate is set before each step."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if encoder.family == "transformer":
        return torch.optim.AdamW(parameters, lr=0.0, weight_decay=settings.weight_decay)
    return torch.optim.SGD(parameters, lr=0.0, momentum=settings.momentum)


@dataclass(frozen=True)
class _Job:
    encoder: Encoder
    task: Task
    num_classes: int
    settings: FineTuneSettings

    def train(self, rows: np.ndarray, learning_rate: float, seed: int, name: str) -> Tuned:
        """Fine-tune a network on the given rows. Randomness depends on ``seed``; global generators
        are not changed.
        """
        settings, task, store = self.settings, self.task, self.task.train[0]
        with torch.random.fork_rng(
            devices=[]
        ):  # AutoAugment and a backbone's dropout draw from torch's global state
            torch.manual_seed(seed)
            model = Tuned(self.encoder, self.num_classes).to(task.device)
            optimizer = make_optimizer(model, self.encoder, settings)
            epochs, done = (
                Epochs(
                    len(rows), settings.batch_size, settings.epochs, settings.warmup_epochs, seed
                ),
                0,
            )
            for epoch in range(settings.epochs):
                model.train()
                for part in np.array_split(rows[epochs.order(epoch)], epochs.batches):
                    x_BCHW, row_B = augmented(
                        store, part, StepKey(seed, epoch), self.encoder, settings, task.workers
                    )
                    for group in optimizer.param_groups:
                        group["lr"] = learning_rate * epochs.level(done)
                    done += 1
                    if len(row_B) < 2:  # batch normalisation needs two
                        continue
                    loss = F.cross_entropy(
                        model(x_BCHW.to(task.device)),
                        torch.from_numpy(store.labels[row_B]).to(task.device),
                    )
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                task.say(f"few-shot: {name}, epoch {epoch + 1} of {settings.epochs}")
        return model

    @torch.no_grad()
    def predict(
        self, model: Tuned, store: Store, rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return predicted and true labels of the readable rows, and those rows."""
        model.eval()
        data = self.encoder.data
        predicted, truth, read = [], [], []
        for x_BCHW, row_B, label_B in image_batches(
            store,
            rows,
            self.encoder.image_size,
            data,
            batch_size=self.task.batch_size,
            workers=self.task.workers,
        ):
            predicted.append(model(x_BCHW.to(self.task.device)).argmax(dim=1).cpu().numpy())
            truth.append(label_B.numpy())
            read.append(row_B.numpy())
        if not predicted:
            raise DataError(
                f"few-shot: {store.path} has no readable image among {len(rows)}; expected some. "
                "Import the source again."
            )
        return np.concatenate(predicted), np.concatenate(truth), np.concatenate(read)


def augmented(
    store: Store,
    rows: np.ndarray,
    key: StepKey,
    encoder: Encoder,
    settings: FineTuneSettings,
    workers: int,
) -> tuple[Tensor, np.ndarray]:
    """Return training images x_BCHW, float32, and their rows: crop and flip keyed by record,
    AutoAugment from torch's global generator.

    Images that do not decode are left out.
    """
    record_id = store.index["id"][rows].astype(np.int64)
    crop_BN = key.uniform_numpy(record_id, "crop", CROP_NUMBERS)
    flip_B = key.uniform_numpy(record_id, "flip", 1)[:, 0] < 0.5

    def cropped(b: int) -> np.ndarray | None:
        try:
            image = Image.fromarray(decode(store.read(int(rows[b]))))
        except BadImage:
            return None
        box = crop_box(image.height, image.width, crop_BN[b].tolist(), settings.crop_scale)
        return cut(image, box, encoder.image_size, bool(flip_B[b]))

    policy = v2.AutoAugment(v2.AutoAugmentPolicy.IMAGENET) if settings.auto_augment else None
    found, kept = [], []
    for b, pixels in enumerate(
        ordered_map(cropped, range(len(rows)), workers=workers, ahead=4 * workers)
    ):
        if pixels is not None:
            kept.append(b)
            found.append(pixels if policy is None else np.asarray(policy(Image.fromarray(pixels))))
    x_BCHW = np.empty((len(found), 3, encoder.image_size, encoder.image_size), dtype=np.float32)
    if found:
        normalise(np.stack(found), encoder.mean, encoder.std, x_BCHW)
    return torch.from_numpy(x_BCHW), rows[kept]
