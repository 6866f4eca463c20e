"""Write a folder like a PACS export: 12-bit DICOM files of patients, each with 1 to 6 images of one
class, and beside it a table of sex, age band and scanner.

    python write_export.py FOLDER FIRST_PATIENT NUM_PATIENTS [PARQUET]

PARQUET has columns image (of bytes) and label, with classes.txt beside it; without it the images
are scikit-learn's digits. A patient's number always gives the same files.
"""

import csv
import io
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pydicom
from PIL import Image
from sklearn.datasets import load_digits

folder, first, num = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
if sys.argv[4:]:
    table = pyarrow.parquet.read_table(sys.argv[4]).to_pydict()
    pixels = [np.asarray(Image.open(io.BytesIO(i["bytes"])).convert("L")) for i in table["image"]]
    labels, names = table["label"], Path(sys.argv[4]).with_name("classes.txt").read_text().split()
else:
    eights, labels = load_digits(return_X_y=True)
    pixels = [(i.reshape(8, 8) * 15.9).astype(np.uint8) for i in eights]
    names = [f"digit{k}" for k in range(10)]
once = {image.tobytes(): i for i, image in enumerate(pixels)}.values()  # MedNIST has some twice
unused = [[i for i in once if labels[i] == k] for k in range(len(names))]
rows = [["file_name", "sex", "age", "scanner"]]
for patient in range(first + num):
    draw = np.random.default_rng(patient)
    label = int(draw.choice([k for k, left in enumerate(unused) if left]))
    drawn = [unused[label].pop() for _ in range(min(draw.integers(1, 7), len(unused[label])))]
    who = [draw.choice(["F", "M"]), draw.choice(["18-39", "40-64", "65+"]), draw.choice(["A", "B"])]
    for at, i in enumerate(drawn if patient >= first else []):
        tags = {
            "SOPClassUID": pydicom.uid.SecondaryCaptureImageStorage,
            "SOPInstanceUID": f"1.2.826.0.1.3680043.8.498.{patient + 1}.{at + 1}",
            "PatientID": f"P{patient:05}",
            "PatientSex": who[0],
            "BodyPartExamined": names[label].upper(),
            "Modality": "OT",
            "Rows": pixels[i].shape[0],
            "Columns": pixels[i].shape[1],
            "BitsAllocated": 16,
            "BitsStored": 12,
            "HighBit": 11,
            "PixelRepresentation": 0,
            "SamplesPerPixel": 1,
            "PhotometricInterpretation": "MONOCHROME2",
            "PixelData": (pixels[i].astype(np.uint16) * 16).tobytes(),
        }
        one = pydicom.Dataset()
        one.update(tags)
        one.file_meta = pydicom.dataset.FileMetaDataset()
        one.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
        rows.append([f"{tags['PatientID']}/{at}.dcm", *who])
        (folder / rows[-1][0]).parent.mkdir(parents=True, exist_ok=True)
        one.save_as(folder / rows[-1][0], enforce_file_format=True)
with folder.with_suffix(".csv").open("w", newline="") as table:
    csv.writer(table).writerows(rows)
folder.with_name("classes.txt").write_text("".join(f"{name.upper()}\n" for name in names))
