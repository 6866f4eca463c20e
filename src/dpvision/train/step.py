"""One logical step's clipped sum: the plan draws the batch, each process takes its buckets, nothing
is divided by the realised size.

Physical batches are buckets of records by a public hash (``dp.buckets``): one record more or less
changes the sum of its own bucket only, bit for bit, whatever the number of other records. The
number of buckets follows from the expected batch size, never from the drawn one.
"""

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from dpvision.config import ClassifierConfig, DataConfig, RunConfig
from dpvision.data.batch import Batch, HostRows, mapped
from dpvision.data.keys import StepKey
from dpvision.data.loader import physical_batches
from dpvision.data.people import People
from dpvision.data.rows import Rows
from dpvision.data.store import Store
from dpvision.data.tokenizer import CaptionReader
from dpvision.data.transform import normalise_tensor
from dpvision.devices import loader_threads, send
from dpvision.dp.buckets import num_buckets, pass_sizes, passes
from dpvision.dp.clip import ClippedSum, LossFn, check_bits, clipped_sum, public_loss_scale
from dpvision.dp.compiled import CompiledBlocks
from dpvision.privacy.plan import DPPlan
from dpvision.privacy.sampling import derive_rng
from dpvision.privacy.stream import Key
from dpvision.train.distributed import Group, all_reduce_sum, all_reduce_vector
from dpvision.train.log import StepMetrics
from dpvision.train.objectives import example_batch


def on_device(
    batches: Iterable[Batch], device: torch.device, data: DataConfig
) -> Iterator[tuple[Batch, HostRows]]:
    """Yield batches on ``device``, with what the host keeps of their rows.

    Args:
        batches: from ``loader.physical_batches``, float32 or uint8; ids and validity are on the
            CPU.
        data: mean and standard deviation, for uint8 images.
    """
    for batch, rows in _copied(batches, device):
        if batch.image_BVCHW.dtype == torch.uint8:
            image = normalise_tensor(batch.image_BVCHW, data.mean, data.std)
            image = image.masked_fill_(
                ~batch.valid_B[:, None, None, None, None], 0.0
            )  # as the loader has it
            batch = batch._replace(image_BVCHW=image)
        yield batch, rows


def _copied(batches: Iterable[Batch], device: torch.device) -> Iterator[tuple[Batch, HostRows]]:
    """Copy the batches to the device; to a GPU on a stream of its own, one batch ahead."""
    if device.type != "cuda":
        for batch in batches:
            yield to_device(batch, device), HostRows(batch.record_id_B, batch.valid_B)
        return
    stream, source = torch.cuda.Stream(device), iter(batches)

    def fetch() -> tuple[Batch, HostRows, torch.cuda.Event] | None:
        with torch.cuda.device(device):  # a thread starts with the first GPU
            batch = next(source, None)
            if batch is None:
                return None
            with torch.cuda.stream(stream):
                return (
                    to_device(batch, device),
                    HostRows(batch.record_id_B, batch.valid_B),
                    stream.record_event(),
                )

    # In a thread: copying a batch into pinned memory would keep this one, which launches the
    # passes, for milliseconds.
    with ThreadPoolExecutor(1, "copy") as thread:
        ahead = thread.submit(fetch)
        while (sent := ahead.result()) is not None:
            ahead = thread.submit(fetch)
            yield _arrived(*sent, device)


def _arrived(
    batch: Batch, rows: HostRows, copied: torch.cuda.Event, device: torch.device
) -> tuple[Batch, HostRows]:
    """Let the computing stream, not the host, wait for the copy; and the allocator keep the memory
    until that stream is done with it.
    """
    current = torch.cuda.current_stream(device)
    current.wait_event(copied)
    for value in batch:
        if value is not None:
            value.record_stream(current)
    return batch, rows


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy every tensor of a batch to ``device`` without waiting."""
    return mapped(batch, lambda value: send(value, device))


@dataclass
class Training:
    """The inputs of a step."""

    config: RunConfig
    plan: DPPlan
    store: Store
    rows: Rows
    """int64 rows of the store that this run may draw (contribution bound applied; where people are
    drawn, all).
    """
    words: CaptionReader | None
    """Reads captions as tokens; None for a model without captions."""
    model: nn.Module
    loss_fn: LossFn
    group: Group
    blocks: CompiledBlocks | None = None
    """The model's compiled blocks; None without hardware.compile."""
    people: People | None = None
    """The people of the store, where they are drawn; None where records are."""


class Abandoned(Exception):
    """A step was given up before its sum was complete, on all ranks: nothing of it is released."""


def step_sum(
    step: int, t: Training, draw_key: Key, *, overdue: Callable[[], bool] = lambda: False
) -> tuple[ClippedSum, StepMetrics]:
    """Return the clipped sum of logical step ``step`` over all processes, and its metrics.

    Args:
        step: the ledger's number of this step.
        draw_key: secret key, the same on all ranks, new at every start.
        overdue: whether to give the step up, asked before each pass.

    Returns:
        The sum (secret; the same on all ranks) and the metrics (confidential).

    Raises:
        Abandoned: ``overdue`` was true on a rank. It is raised on all of them.
    """
    given_up = False

    def in_time() -> Iterator[tuple[Batch, HostRows]]:
        nonlocal given_up
        with contextlib.closing(_batches(t, drawn_B, key)) as batches:
            for pair in batches:
                if given_up := overdue():
                    return
                yield pair

    start, plan, key = time.monotonic(), t.plan, StepKey(t.config.seed, step)
    drawn_B = plan.draw(
        step, len(t.rows if t.people is None else t.people), derive_rng(draw_key, step)
    )
    with autocast(t.config.hardware.precision, t.group.device):
        scale = _loss_scale(t, key)
        total = ClippedSum.add_up(
            t.model,
            plan.max_grad_norm,
            (
                clipped_sum(
                    t.loss_fn,
                    t.model,
                    batch,
                    key,
                    max_grad_norm=plan.max_grad_norm,
                    rule=plan.clipping,
                    loss_scale=scale,
                    blocks=t.blocks,
                    host=host,
                    check_separability=False,  # start.py made every check
                    rows=t.config.hardware.physical_batch_size,
                )
                for batch, host in in_time()
            ),
        )
    metrics = _metrics(total, plan, t.group, start, given_up=given_up)
    return all_reduce_sum(total, t.group), metrics


def _batches(
    t: Training, drawn_B: np.ndarray, key: StepKey
) -> Generator[tuple[Batch, HostRows], None, None]:
    """Yield the physical batches of this rank's buckets, on its device."""
    hardware, model, group = t.config.hardware, t.config.model, t.group
    most = hardware.physical_batch_size
    count = num_buckets(t.plan.expected_batch_size, most, group.world_size)
    if t.people is None:
        drawn = t.rows[drawn_B]
        id_B = t.store.index["id"][drawn]
    else:
        drawn, id_B = (
            t.people.images(drawn_B, key, t.plan.unit.max_records),
            t.people.id_P[drawn_B],
        )
    mine = [drawn[part] for part in passes(key, id_B, count, most, group.rank, group.world_size)]
    batches = physical_batches(
        t.store,
        np.concatenate([drawn[:0], *mine]),
        key,
        t.config.data,
        model.encoder.image_size,
        physical_batch_size=[len(part) for part in mine],
        workers=loader_threads(hardware.workers, group.device),
        device=group.device,
        captions=t.words,
        labels=isinstance(model, ClassifierConfig),
        num_classes=model.num_classes if isinstance(model, ClassifierConfig) else None,
        normalised=group.device.type == "cpu",
    )
    yield from on_device(batches, group.device, t.config.data)


def check_reference_bits(t: Training) -> None:
    """Check, on public images, that a record's bits do not depend on the other rows of a pass,
    before any step; none without clipping.

    Compiled blocks are for full passes only, so others are padded to full ones.

    Raises:
        PrivacyError: as ``clip.check_bits``.
    """
    plan, hardware, key = t.plan, t.config.hardware, StepKey(t.config.seed, 0)
    if plan.max_grad_norm is None:
        return
    most = hardware.physical_batch_size
    sizes = (
        []
        if hardware.compile
        else pass_sizes(plan.expected_batch_size, most, plan.steps, t.group.world_size)
    )
    public = to_device(example_batch(t.config, most), t.group.device)
    with autocast(hardware.precision, t.group.device):
        check_bits(
            t.loss_fn,
            t.model,
            public,
            key,
            sizes,
            max_grad_norm=plan.max_grad_norm,
            rule=plan.clipping,
            loss_scale=_loss_scale(t, key),
            blocks=t.blocks,
        )


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager:
    """Autocast of the forward pass for ``hardware.precision``."""
    if precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(
        device.type, {"bfloat16": torch.bfloat16, "float16": torch.float16}[precision]
    )


def _loss_scale(t: Training, key: StepKey) -> float:
    """Factor of the losses for float16, the same on every rank, because weights, key and public
    batch are.
    """
    if t.config.hardware.precision != "float16":
        return 1.0
    return public_loss_scale(
        t.loss_fn, t.model, to_device(example_batch(t.config), t.group.device), key
    )


def _metrics(
    total: ClippedSum, plan: DPPlan, group: Group, start: float, *, given_up: bool
) -> StepMetrics:
    """Return the metrics of a sum over all ranks; raises Abandoned on all if one gave up."""
    norms, losses = (
        torch.cat([total.norms_B, total.losses_B])
        .cpu()
        .double()
        .split([len(total.norms_B), len(total.losses_B)])
    )
    good = torch.isfinite(norms)
    clipped = (
        norms > plan.max_grad_norm if plan.max_grad_norm is not None else torch.zeros_like(good)
    )
    sums = torch.tensor(
        [
            len(losses),
            losses.nansum(),
            good.sum(),
            norms[good].sum(),
            clipped[good].sum(),
            (~good).sum(),
            given_up,
        ],
        dtype=torch.float64,
    )
    count, loss, num_good, norm, num_clipped, num_bad, num_given_up = all_reduce_vector(
        sums, group
    ).tolist()
    if num_given_up:
        raise Abandoned
    nan = float("nan")
    return StepMetrics(
        loss=loss / count if count else nan,
        batch_size=int(count),
        grad_norm_mean=norm / num_good if num_good else nan,
        # The median over this rank's buckets: that over all would need every norm.
        grad_norm_median=float(norms[good].median()) if good.any() else nan,
        clip_fraction=num_clipped / num_good if num_good else nan,
        num_non_finite=int(num_bad),
        step_s=max(time.monotonic() - start, 1e-9),
    )
