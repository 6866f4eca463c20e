"""Folders of DICOM files: what is imported, what is left out, and what no store holds."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from dpvision.cli import main
from dpvision.data.decode import decode
from dpvision.data.dicom_source import DicomRule
from dpvision.data.image_files import find_images
from dpvision.data.import_labels import LabelRule
from dpvision.data.import_merge import DICOM_FILE
from dpvision.data.importer import import_source
from dpvision.data.open import open_store
from dpvision.data.person_names import PersonRule
from dpvision.data.sources import open_source
from dpvision.data.store import Store
from dpvision.errors import OPERATOR_ONLY, DataError

from .dicom_files import changed, dicom, pydicom
from .image_files import png, write_folder, write_tar

NAME, BORN, STUDY = "Secretname^Ada", "19610203", "20260401"
HEAD = {
    "PatientName": NAME,
    "PatientBirthDate": BORN,
    "StudyDate": STUDY,
    "WindowCenter": 2000,
    "WindowWidth": 4001,
}


def scan(k: int, patient: str = "", **elements) -> bytes:
    values = np.random.default_rng(k).integers(0, 4096, (24, 20)).astype("<u2")
    return dicom(values, **HEAD, PatientID=patient or f"P{k % 3}", **elements)


def cine(k: int, num: int = 3) -> bytes:
    values = np.random.default_rng(k).integers(0, 4096, (num, 24, 20)).astype("<u2")
    return dicom(values, num_frames=num, **HEAD, PatientID="P0", Modality="US")


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """Six files of three patients, as a PACS names them; two of Modality CT, one with 3 frames."""
    files = {f"DICOM/PA{k}/IM{k:04}": scan(k, Modality="CT" if k < 2 else "CR") for k in range(5)}
    files |= {"DICOM/PA0/IM0005": cine(5), "DICOMDIR": scan(9)[:200] + bytes(50)}
    return write_folder(tmp_path / "export", files)


def keys(store: Store) -> list[str]:
    return [store.record(row).key for row in range(store.num_records)]


def left_out(store: Store) -> dict[str, str]:
    lines = (store.path / "confidential" / "left_out.jsonl").read_text().splitlines()
    return {line["key"]: line["reason"] for line in map(json.loads, lines)}


def test_one_command_imports_an_export_with_its_patients(export: Path, capsys) -> None:
    assert main(["data", "import", str(export), f"{export}-store", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    store = open_store(f"{export}-store")
    assert said["records"] == 8 and store.meta["unit_field"] == "PatientID"
    assert len(set(store.index["unit"].tolist())) == 3
    assert keys(store)[1:4] == [f"DICOM/PA0/IM0005#{k}" for k in range(3)]


def test_each_record_has_the_pixels_that_prediction_reads(export: Path, tmp_path: Path) -> None:
    """By each file's own window, and by a declared one."""
    for number, window in enumerate([None, (100, 3000)]):
        store = import_source(export, tmp_path / f"store{number}", window=window)
        files = {
            file.name: file.image for file in find_images([export]).samples if not file.problem
        }
        for row in range(store.num_records):
            record = store.record(row)
            there = files[f"{export}/{record.key}"]
            assert np.array_equal(decode(record.image), decode(there, window=window))
            if "#" not in record.key:
                alone = (export / record.key).read_bytes()
                assert np.array_equal(decode(record.image), decode(alone, window=window))
    assert open_store(tmp_path / "store1").window == (100, 3000)


def test_no_header_value_enters_the_store(export: Path, tmp_path: Path) -> None:
    """Not even under confidential/: patients are hashes under the store's key."""
    store = import_source(export, tmp_path / "store")
    uids = [pydicom.dcmread(path).SOPInstanceUID for path in export.rglob("IM*")]
    secrets = [NAME, BORN, STUDY, "DICM", "P0", "P1", "P2", *uids]
    for path in store.path.rglob("*"):
        if path.is_file() and path.name not in ("key", "index.npy"):
            data = path.read_bytes()
            text = path.suffix in (".json", ".jsonl")
            for secret in secrets:
                assert secret.encode() not in data or (not text and len(secret) < 4), (path, secret)


def test_a_multi_frame_file_gives_the_declared_frames(export: Path, tmp_path: Path) -> None:
    for frames, expected in (("first", [0]), ("middle", [1]), ("2,0,7", [0, 2])):
        store = import_source(export, tmp_path / frames, dicom=DicomRule(frames=frames))
        assert [key for key in keys(store) if "#" in key] == [
            f"DICOM/PA0/IM0005#{k}" for k in expected
        ]
    store = import_source(export, tmp_path / "late", dicom=DicomRule(frames="2"))
    assert keys(store) == ["DICOM/PA0/IM0005#2"]
    assert set(left_out(store).values()) == {"DICOM: without these frames"}


def test_series_are_selected_by_their_tags(export: Path, tmp_path: Path) -> None:
    rule = DicomRule(series=("Modality=CT, US", f"PatientBirthDate={BORN}"))
    store = import_source(export, tmp_path / "store", dicom=rule)
    assert {key[6:9] for key in keys(store)} == {"PA0", "PA1"} and store.num_records == 5
    assert left_out(store) == {
        f"DICOM/PA{k}/IM000{k}": "DICOM: of another series" for k in (2, 3, 4)
    }


def test_a_label_is_a_tag_without_its_padding(export: Path, tmp_path: Path) -> None:
    rule = LabelRule("Modality", classes=("CT", "CR", "US"))
    store = import_source(export, tmp_path / "store", labels=rule)
    assert sorted(store.index["label"].tolist()) == [0, 0, 1, 1, 1, 2, 2, 2]


def test_a_table_by_instance_or_by_file_has_the_findings(export: Path, tmp_path: Path) -> None:
    files = sorted(export.rglob("IM*"))
    findings = ["mass|effusion", "", "mass", "effusion", "mass"]
    for column in ("SOPInstanceUID", "file_name"):
        lines = [f"{column},findings"]
        for path, found in zip(files, findings, strict=False):
            name = pydicom.dcmread(path).SOPInstanceUID
            name = name if column == "SOPInstanceUID" else path.relative_to(export)
            lines.append(f"{name},{found}")
        absent = "1.2.3.4" if column == "SOPInstanceUID" else "absent"
        (export / "metadata.csv").write_text("\n".join([*lines, f"{absent},mass", ""]))
        rule = LabelRule("findings", "|", classes=("effusion", "mass"))
        store = import_source(export, tmp_path / column, labels=rule)
        summary = store.import_summary()
        assert summary["table_rows_without_file"] == 1
        assert summary["files_without_table_row"] == len(files) - len(findings)
        assert store.multi_label


def test_an_image_without_a_patient_is_refused_before_any_is_stored(export, tmp_path) -> None:
    write_folder(export, {"DICOM/PA9/IM0009": scan(9, " ")})
    with pytest.raises(DataError, match=r"1 images without one \(DICOM/PA9/IM0009\)"):
        import_source(export, tmp_path / "store")
    store = import_source(export, tmp_path / "dropped", people=PersonRule(unmatched="drop"))
    assert left_out(store) == {"DICOM/PA9/IM0009": "no person"}
    by_image = import_source(export, tmp_path / "by", people=PersonRule("SOPInstanceUID"))
    assert len(set(by_image.index["unit"].tolist())) == 7


def test_padding_and_spelling_do_not_make_two_persons(tmp_path: Path) -> None:
    files = {"a/1": scan(1, "P7 "), "a/2": scan(2, "P7"), "a/3": scan(3, " P7")}
    store = import_source(write_folder(tmp_path / "in", files), tmp_path / "store")
    assert len(set(store.index["unit"].tolist())) == 1


def test_one_image_under_two_patients_is_refused(tmp_path: Path) -> None:
    file = scan(1)
    files = {"a": file, "b": changed(file, PatientID="P2", SOPInstanceUID="1.2.3")}
    with pytest.raises(DataError, match="1 files have the bytes of an image of another person"):
        import_source(write_folder(tmp_path / "in", files), tmp_path / "store")


@pytest.mark.parametrize("more", [[], ["--unmatched", "drop", "--shared-images", "first"]])
def test_a_patient_of_the_training_store_is_refused(export, tmp_path, capsys, more) -> None:
    train = import_source(export, tmp_path / "train")
    held = write_folder(tmp_path / "held", {"a": scan(11, "P1 "), "b": scan(12, "P8")})
    line = ["data", "import", str(held), str(tmp_path / "test"), "--public", *more, "--apart-from"]
    assert main([*line, str(train.path)]) == 2
    said = capsys.readouterr().err
    assert f"{OPERATOR_ONLY}1 of 2 persons are in it too (P1)" in said and "Traceback" not in said
    assert not (tmp_path / "test").exists()
    others = write_folder(tmp_path / "others", {"c": scan(13, "P2"), "d": scan(14, "P9")})
    other = import_source(others, tmp_path / "other")
    assert main([*line, str(other.path)]) == 0
    capsys.readouterr()
    faceless = import_source(
        write_folder(tmp_path / "in", {"a.png": png(1)}), tmp_path / "faceless"
    )
    line[3] += "-2"
    assert main([*line, str(faceless.path)]) == 2
    assert "a store without persons; expected one" in capsys.readouterr().err


def test_blank_frames_of_two_patients_are_left_out_not_shared(tmp_path: Path) -> None:
    blank = dicom(np.zeros((9, 9), "<u2"), **HEAD, PatientID="P1")
    files = {"a": blank, "b": changed(blank, PatientID="P2"), "c": scan(1)}
    store = import_source(write_folder(tmp_path / "in", files), tmp_path / "store")
    assert keys(store) == ["c"]
    assert store.import_summary()["left_out"] == {"DICOM: one value only": 2}


def test_what_is_left_out_is_named_as_dicom(export: Path, tmp_path: Path, capsys) -> None:
    whole = scan(7, "P1")
    bad = {
        "DICOM/X/half": (whole[: len(whole) // 2], "DICOM: damaged"),
        "DICOM/X/report": (changed(whole, PixelData=None, Rows=None), "DICOM: no pixels"),
        "DICOM/X/old.dcm": (whole[132:], "DICOM: without its preamble"),
        "DICOM/X/huge": (changed(whole, Rows=65535, Columns=65535), "DICOM: oversized"),
        "DICOM/X/frames": (changed(whole, NumberOfFrames=2**31 - 1), "DICOM: damaged"),
        "DICOM/X/viewer.exe": (b"MZ" + bytes(200), "not an image"),
    }
    write_folder(export, {name: data for name, (data, _) in bad.items()})
    assert main(["data", "import", str(export), str(tmp_path / "store")]) == 0
    found = {
        key.partition("#")[0]: reason
        for key, reason in left_out(open_store(tmp_path / "store")).items()
    }
    assert found == {name: reason for name, (_, reason) in bad.items()}
    assert "left_out: DICOM: damaged" in capsys.readouterr().out


def test_the_operator_is_told_of_text_in_the_image_and_of_windows(tmp_path: Path, capsys) -> None:
    flat = {"WindowCenter": None, "WindowWidth": None}
    files = {
        "a": scan(1, BurnedInAnnotation="YES"),
        "b": changed(scan(2), **flat),
        "c": changed(scan(3), WindowCenter=9, WindowWidth=9),
    }
    write_folder(tmp_path / "in", files)
    assert main(["data", "import", str(tmp_path / "in"), str(tmp_path / "store")]) == 0
    said = capsys.readouterr().out
    assert "1 DICOM images of more than 8 bits have no window of their own" in said
    assert "1 DICOM images lose more than half of their pixels to their window" in said
    line = json.loads((tmp_path / "store" / "confidential" / DICOM_FILE).read_text())
    assert line == {"key": "a", "dicom": ["burned-in annotation"]}
    assert open_store(tmp_path / "store").undeclared_range


def test_one_file_and_a_dicomdir_are_sources(export: Path) -> None:
    one = [s.key for s in open_source(export / "DICOM/PA0/IM0005").samples]
    assert one == [f"IM0005#{k}" for k in range(3)]
    assert len(list(open_source(export / "DICOMDIR").samples)) == 8
    place = export / "DICOM/PA0/IM0005"
    assert [f.name for f in find_images([place]).samples] == [f"{place}#{k}" for k in range(3)]


SERIES = ["--series", "Modality=MR"]
WRONG = {
    "an unknown tag": (["--series", "Modalty=CR"], "Did you mean Modality?"),
    "no value": (["--series", "Modality"], "expected TAG=VALUE[,VALUE]"),
    "a tag twice": (["--series", "Modality=CR", "--series", "Modality=CT"], "each tag once"),
    "nothing kept": (SERIES, f"{OPERATOR_ONLY}no file; found Modality: CR (3), CT (2), US (1)"),
    "an unknown person": (["--unit-from", "PatientId"], "Did you mean PatientID?"),
    "an unknown label": (["--label-from", "findings"], "expected the keyword of a DICOM tag"),
    "frames by word": (["--frames", "last"], "expected all, first, middle or numbers"),
    "a frame below 0": (["--frames", "-1"], "expected all, first, middle or numbers"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_option_is_refused_with_the_remedy(
    case: str, export: Path, tmp_path, capsys
) -> None:
    options, words = WRONG[case]
    assert main(["data", "import", str(export), str(tmp_path / "store"), *options]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert words in said, said
    assert not (tmp_path / "store").exists()


def test_other_images_beside_dicom_are_refused_with_the_commands(export, tmp_path, capsys) -> None:
    write_folder(export, {"VIEWER/icon.png": png(1)})
    assert main(["data", "import", str(export), str(tmp_path / "store")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"dpvision data import {export}/DICOM STORE" in said and "is DICOM, beside" in said


def test_options_of_dicom_are_refused_where_there_is_none(tmp_path: Path) -> None:
    write_folder(tmp_path / "in", {"a.png": png(1)})
    assert main(["data", "import", str(tmp_path / "in"), str(tmp_path / "png")]) == 0
    with pytest.raises(DataError, match="no DICOM files; expected some with --series or --frames"):
        import_source(tmp_path / "in", tmp_path / "store", dicom=DicomRule(frames="first"))


@pytest.mark.parametrize("name", ["brain.nii.gz", "brain.nii"])
def test_nifti_is_refused_with_the_tool(name: str, tmp_path: Path) -> None:
    write_folder(tmp_path / "in", {name: bytes(400)})
    for place in (tmp_path / "in", tmp_path / "in" / name):
        with pytest.raises(DataError, match=r"NIfTI.*nibabel.*docs/dicom\.md"):
            import_source(place, tmp_path / "store")


def test_without_pydicom_a_folder_is_refused_with_the_extra(export: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(DataError, match=r"pip install 'dpvision\[dicom\]'"):
        open_source(export)


def test_dicom_in_a_tar_is_named(tmp_path: Path) -> None:
    tar = write_tar(tmp_path / "a.tar", {"1.dcm": scan(1), "2.png": png(2)})
    assert left_out(import_source(tar, tmp_path / "store")) == {"1": "DICOM in a tar"}


def test_dicom_in_a_parquet_file_is_stored_as_pixels(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table({"image": [scan(1), scan(2)], "label": [0, 1]})
    (tmp_path / "in").mkdir()
    parquet.write_table(table, tmp_path / "in" / "a.parquet")
    store = import_source(tmp_path / "in", tmp_path / "store")
    assert store.num_records == 2
    assert store.record(0).image.startswith(b"\x89PNG")
