import io
import subprocess
import tarfile

import pytest

from dpvision.data.tarindex import Member, TarWriter, member_size, scan
from dpvision.errors import DataError

from .image_files import write_tar

NAMES = [
    "a.jpg",
    "deep/" * 30 + "b.jpg",
    "x" * 150 + ".json",
    "ü.txt",
    "empty.txt",
    "y" * 99,
    "z" * 100,
    "w" * 101,
]
MEMBERS = {name: bytes([i % 256]) * (i * 300) for i, name in enumerate(NAMES)}
MEMBERS["empty.txt"] = b""


def by_tarfile(path):
    with tarfile.open(path) as tar:
        return [Member(m.name, m.offset_data, m.size) for m in tar if m.isreg()]


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_scan_finds_what_tarfile_finds(tmp_path, kind):
    members = {
        n: d
        for n, d in MEMBERS.items()
        if kind != tarfile.USTAR_FORMAT or len(n) <= 100 or "/" in n
    }
    path = write_tar(tmp_path / "t.tar", members, kind)
    assert scan(path) == by_tarfile(path)
    data = path.read_bytes()
    assert {m.name: data[m.offset : m.offset + m.size] for m in scan(path)} == members


def test_folders_are_passed_over_and_links_are_their_files(tmp_path):
    path = tmp_path / "t.tar"
    long = "deep/" * 30 + "f.jpg"
    with tarfile.open(
        path, "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "global"}
    ) as tar:
        links = (
            ("a/sym.jpg", tarfile.SYMTYPE, "../f.jpg"),
            ("hard.jpg", tarfile.LNKTYPE, "f.jpg"),
            ("twice.jpg", tarfile.SYMTYPE, "hard.jpg"),
        )
        lost = (
            ("lost.jpg", tarfile.SYMTYPE, "none.jpg"),
            ("loop.jpg", tarfile.SYMTYPE, "loop.jpg"),
            ("to_folder", tarfile.SYMTYPE, "folder"),
        )
        for name, kind, target in (("folder", tarfile.DIRTYPE, ""), *links, *lost):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            tar.addfile(info)
        info = tarfile.TarInfo("f.jpg")
        info.size = 3
        tar.addfile(info, io.BytesIO(b"abc"))
    found = {m.name: m for m in scan(path)}
    data = path.read_bytes()
    (file,) = by_tarfile(path)
    for name in ("f.jpg", "a/sym.jpg", "hard.jpg", "twice.jpg"):
        assert (
            found.pop(name) == file._replace(name=name)
            and data[file.offset : file.offset + 3] == b"abc"
        )
    assert {name: m.problem for name, m in found.items()} == dict.fromkeys(
        ("lost.jpg", "loop.jpg", "to_folder"), "link without its file"
    )
    for kind in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):  # a long target, after a long name
        with tarfile.open(path, "w", format=kind) as tar:
            info = tarfile.TarInfo(long)
            info.size = 3
            tar.addfile(info, io.BytesIO(b"abc"))
            info = tarfile.TarInfo("x" * 150 + ".jpg")
            info.type, info.linkname = tarfile.LNKTYPE, long
            tar.addfile(info)
        assert [(m.name, m.size) for m in scan(path)] == [(long, 3), ("x" * 150 + ".jpg", 3)]


def test_a_header_without_the_ustar_magic_needs_its_checksum():
    header = bytearray(tarfile.TarInfo("old.jpg").tobuf(tarfile.USTAR_FORMAT))
    header[257:265] = bytes(8)
    with pytest.raises(ValueError, match="no tar header"):
        member_size(bytes(header))
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    header[124:136] = b"00000000017\0"
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    assert member_size(bytes(header)) == 15


def test_binary_sizes_above_8_gib_are_read():
    info = tarfile.TarInfo("big")
    info.size = 9 << 30
    assert member_size(info.tobuf(tarfile.GNU_FORMAT)) == 9 << 30


@pytest.mark.parametrize("cut", [1, 600, 2000])
def test_a_tar_that_ends_inside_a_member_is_an_error(tmp_path, cut):
    path = write_tar(tmp_path / "t.tar", {"a.jpg": b"a" * 700, "b.jpg": b"b" * 3000})
    last = scan(path)[-1]
    path.write_bytes(path.read_bytes()[: last.offset + last.size - cut])
    with pytest.raises(DataError, match="ends inside a member"):
        scan(path)


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_tar_that_ends_between_members_or_inside_a_header_is_an_error(tmp_path, kind):
    whole = write_tar(tmp_path / "t.tar", {"a.jpg": b"a" * 700, "x" * 99: b"b" * 3000}, kind)
    data, last = whole.read_bytes(), scan(whole)[-1]
    starts = last.offset - 512, last.offset + 3072
    for start in (0, *starts):
        for cut, said in ((start, "without its end mark"), (start + 300, "inside a header")):
            whole.write_bytes(data[:cut])
            with pytest.raises(DataError, match=said if cut else "an empty file"):
                scan(whole)
    whole.write_bytes(data[: starts[1]] + bytes(1024))  # the remedy
    assert len(scan(whole)) == 2


def test_what_writes_tars_writes_the_end_mark(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"a" * 700)
    path, more = tmp_path / "t.tar", tmp_path / "more.tar"
    with path.open("wb") as file, tarfile.open(fileobj=file, mode="w|") as tar:  # webdataset's way
        tar.add(tmp_path / "a.jpg", "a.jpg")
    assert len(scan(path)) == 1
    for options in ((), ("-b", "1")):
        for out in (more, "-"):
            made = ["tar", "-C", str(tmp_path), *options, "-cf", str(out), "a.jpg"]
            printed = subprocess.run(made, check=True, capture_output=True).stdout
            if out == "-":
                more.write_bytes(printed)
            assert len(scan(more)) == 1
    subprocess.run(["tar", "-Af", str(path), str(more)], check=True)
    assert len(scan(path)) == 2


def test_what_is_no_tar_is_an_error(tmp_path):
    path = tmp_path / "t.tar"
    path.write_bytes(b"not a tar " * 100)
    with pytest.raises(DataError, match="no uncompressed tar"):
        scan(path)
    with tarfile.open(path, "w:gz") as tar:
        info = tarfile.TarInfo("noise")
        info.size = 3000
        tar.addfile(info, io.BytesIO(bytes(i * i % 251 for i in range(3000))))
    path.write_bytes(path.read_bytes() * 4)
    with pytest.raises(DataError, match="no uncompressed tar"):
        scan(path)
    path.write_bytes(b"")
    with pytest.raises(DataError, match="an empty file"):
        scan(path)
    with pytest.raises(DataError, match="No such file"):
        scan(tmp_path / "absent.tar")


def test_what_we_write_is_what_tarfile_reads(tmp_path):
    path = tmp_path / "t.tar"
    with path.open("wb") as file:
        writer = TarWriter(file)
        offsets = {name: writer.add(name, data) for name, data in MEMBERS.items()}
        size = writer.finish()
    assert path.stat().st_size == size
    with tarfile.open(path) as tar:
        assert {m.name: tar.extractfile(m).read() for m in tar} == MEMBERS
    assert [m.offset for m in by_tarfile(path)] == list(offsets.values())
