"""Physical batches on their way to the device: copied as uint8 while the batch before is computed,
normalised there.

Legend: B records (rows).
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from dpvision.config import DataConfig
from dpvision.data.batch import Batch, HostRows, mapped
from dpvision.data.transform import normalise_tensor
from dpvision.devices import send


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
