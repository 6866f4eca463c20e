"""DICOM files made for tests, and pydicom's own."""

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pydicom, encaps, filereader, filewriter, pixels, uid = (
    pytest.importorskip(f"pydicom{name}", reason="DICOM needs the extra dicom (pydicom)")
    for name in ("", ".encaps", ".filereader", ".filewriter", ".pixels", ".uid")
)
Dataset = pydicom.Dataset
SAMPLES = Path(os.path.dirname(pydicom.__file__), "data", "test_files")
"""The samples that pydicom's package has; others would be downloaded."""


def sample(name: str) -> bytes:
    """Return a sample of pydicom, or skip the test."""
    path = SAMPLES / name
    if not path.exists():
        pytest.skip(f"this pydicom has no sample {name}")
    return path.read_bytes()


def dicom(values: np.ndarray, bits: int = 12, *, num_frames: int = 0, **elements: Any) -> bytes:
    """Return an uncompressed file of grey or RGB samples, a frame or several."""
    colour = values.shape[-1] == 3 and values.ndim > 2 and not num_frames
    data = Dataset()
    data.file_meta = pydicom.dataset.FileMetaDataset()
    data.file_meta.TransferSyntaxUID = uid.ExplicitVRLittleEndian
    data.SOPClassUID = uid.CTImageStorage
    data.SOPInstanceUID = uid.generate_uid()
    data.SamplesPerPixel = 3 if colour else 1
    data.PhotometricInterpretation = "RGB" if colour else "MONOCHROME2"
    if colour:
        data.PlanarConfiguration = 0
    first = values[0] if num_frames else values
    data.Rows, data.Columns = first.shape[:2]
    if num_frames:
        data.NumberOfFrames = num_frames
    data.BitsAllocated = values.dtype.itemsize * 8
    data.BitsStored, data.HighBit = bits, bits - 1
    data.PixelRepresentation = int(values.dtype.kind == "i")
    samples = values.tobytes()
    data.add_new(
        0x7FE00010, "OW" if values.dtype.itemsize > 1 else "OB", samples + bytes(len(samples) % 2)
    )
    for name, value in elements.items():
        setattr(data, name, value)
    return saved(data)


def saved(data: Any) -> bytes:
    file = io.BytesIO()
    data.preamble = bytes(128)
    data.save_as(file, enforce_file_format=False)
    return file.getvalue()


def changed(file: bytes, **elements: Any) -> bytes:
    """Return a file with other elements; None removes one."""
    data = pydicom.dcmread(io.BytesIO(file))
    for name, value in elements.items():
        if value is None:
            delattr(data, name)
        else:
            setattr(data, name, value)
    return saved(data)


def relabelled(file: bytes, syntax: str) -> bytes:
    """Return a file whose header states another transfer syntax than its bytes have."""
    meta = pydicom.dcmread(io.BytesIO(file), stop_before_pixels=True).file_meta
    meta.TransferSyntaxUID = uid.UID(syntax)
    old, new = io.BytesIO(file), io.BytesIO()
    old.seek(132)
    filereader.read_dataset(old, False, True, stop_when=lambda tag, vr, length: tag >> 16 != 2)
    filewriter.write_file_meta_info(new, meta, enforce_standard=False)
    return bytes(128) + b"DICM" + new.getvalue() + file[old.tell() :]
