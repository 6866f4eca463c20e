"""Mutations of files for ``targets``: bytes, text, JSON, and the containers PNG, tar, zip, gzip,
safetensors and parquet, whose inner parts are mutated with lengths and checksums that fit.

All draws come from the generator that is passed, so a case is repeated by its number.
"""

import functools
import gzip
import io
import json
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

NUMBERS = (0, 1, 2, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**24, 2**31 - 1, 2**31, 2**32 - 1)
HUGE = (2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
RAW = (
    "NaN", "Infinity", "-Infinity", "1e400", "-1", "0", "1", "-0.0", "1e-320", "null", "true",
    '""', "[]", "{}", "9" * 30, "9" * 5000, "9" * 400, str(2**63), str(2**31), "1.5", '"\\u0000"',
    '"\\ud800"', '"a\\nb"', '"\\u001b[2J"', '"' + "x" * 100_000 + '"', "[[[[1]]]]", '{"a": 1}',
    "[null]", "[1, 2, 3]", '[""]', '"../../secret.png"', '"/etc/passwd"', '"."', '".."', '"a/b"',
)  # fmt: skip
"""JSON values that take the place of another."""
DEPTH = 100_000
NAMES = (
    "../../secret.png", "../secret.png", "/etc/passwd", "a/../../../secret.png", "./x.png", "",
    ".", "..", "a//b.png", "a\nb.png", "\x1b[2J.png", "n" * 300 + ".png", "a/" * 200 + "b.png",
    "-rf.png", "\u202egnp.png", "con.png", "é.png", "e\u0301.png", ".hidden.png", "a\\..\\b.png",
    "x.PNG", "x.tar.png", " .png", "x.png ",
)  # fmt: skip
WORDS = (
    "\0", "\x1b[31m", "\u2028", "\u202e", "\ud7ff", "\ufeff", "\r", "\r\n", "\n\n", '"', "'", ",",
    "\t", "#", "a" * 200_000, "\U0010ffff", "e" + "\u0301" * 5000, "ﷺ" * 300, "../", "/", "-1",
    "nan", "<eos>", "[UNK]", "  ", "\x85", ";", "\ufffe",
)  # fmt: skip


class _Planted:
    """Writes a file when it is unpickled."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (self._command,)


def planted(marker: Path, rest: Any = None) -> bytes:
    """Return a pickle that writes ``marker`` when it is executed, then gives ``rest``."""
    return pickle.dumps([_Planted(f"open({str(marker)!r}, 'w').close()"), rest], protocol=2)


def mutate_bytes(data: bytes, rng: Random) -> bytes:
    """Flip, overwrite, cut, repeat, remove, exchange and insert, once to four times."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        # half of the places are in the first 256 bytes: headers
        at = rng.randrange(min(len(made), 256 if rng.random() < 0.5 else len(made)) or 1)
        size = min(rng.choice((1, 2, 4, 16, 64, 1000)), max(len(made) - at, 0))
        kind = rng.randrange(9)
        if kind <= 1 and made:
            made[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            made[at : at + size] = bytes(
                rng.choice((0, 255, rng.randrange(256))) for _ in range(size)
            )
        elif kind == 3:
            form = rng.choice(("<H", ">H", "<I", ">I", "<Q", ">Q"))
            value = rng.choice(NUMBERS + HUGE) % 256 ** struct.calcsize(form)
            made[at : at + struct.calcsize(form)] = struct.pack(form, value)
        elif kind == 4:
            del made[rng.randrange(len(made) + 1) :]
        elif kind == 5:
            made[at:at] = made[at : at + size] * rng.choice((1, 2, 50))
        elif kind == 6:
            del made[at : at + size]
        elif kind == 7:
            other = rng.randrange(len(made) or 1)
            made[at : at + size] = made[other : other + size]
        else:
            made[at:at] = rng.randbytes(size)
    return bytes(made)


def mutate_text(data: bytes, rng: Random) -> bytes:
    """Insert odd characters and huge lines, remove and repeat lines, or change the encoding."""
    text = data.decode("utf-8", "replace")
    kind = rng.randrange(6)
    if kind == 0:
        return mutate_bytes(data, rng)
    if kind == 1:
        encoding = rng.choice(("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "cp037", "utf-7"))
        return text.encode(encoding, "replace")
    lines = text.split("\n")
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(lines))
        if kind == 2:
            lines.insert(at, lines[rng.randrange(len(lines))])
        elif kind == 3:
            del lines[at]
            lines = lines or [""]
        elif kind == 4:
            lines[at] = rng.choice(NAMES + WORDS)
        else:
            place = rng.randrange(len(lines[at]) + 1)
            lines[at] = lines[at][:place] + rng.choice(WORDS) + lines[at][place:]
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """List (container, key) of all values, at most 5,000."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        if len(found) < 5000:
            found.append((value, key))
            if isinstance(inner, dict | list):
                _places(inner, found)
    return found


def mutate_json(data: bytes, rng: Random) -> bytes:
    """Replace, remove, rename, repeat and nest values of one JSON text."""
    try:
        parsed = json.loads(data)
    except ValueError:
        return mutate_text(data, rng)
    if rng.random() < 0.1 or not isinstance(parsed, dict | list):
        return mutate_text(data, rng)
    raw: list[str] = []

    def token(text: str) -> str:
        raw.append(text)
        return f"@@{len(raw) - 1}@@"

    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = _places(parsed, [])
        if not places:
            break
        # by depth first: a long list would get nearly all the draws
        container, key = rng.choice(places[: rng.choice((8, 64, len(places)))])
        kind = rng.randrange(10)
        if kind <= 4:
            container[key] = token(rng.choice(RAW))
        elif kind == 5:
            del container[key]
        elif kind == 6 and isinstance(container, dict):
            container[rng.choice((*map(str, NAMES), f"{key} ", "x"))] = container.pop(key)
        elif kind == 7:
            container[key] = rng.choice(places)[0]  # a part of another kind
            try:
                json.dumps(parsed)
            except ValueError:  # it would hold itself
                container[key] = None
        elif kind == 8:
            container[key] = token(
                rng.choice(("[" * DEPTH, '{"a":' * DEPTH, "[" * DEPTH + "]" * DEPTH))
            )
        elif isinstance(container, dict):
            container[token('"twice": 1, "twice')[:-2]] = container[key]
        else:
            container += [container[key]] * rng.choice((1, 1000))
    text = json.dumps(parsed)
    for i, value in enumerate(raw):
        text = text.replace(f'"@@{i}@@"', value)
    return text.encode("utf-8", "surrogatepass")


def mutate_lines(data: bytes, rng: Random) -> bytes:
    """Mutate one line of a JSON Lines file as JSON, or the file as text."""
    lines = data.split(b"\n")
    if rng.random() < 0.3:
        return mutate_text(data, rng)
    at = rng.randrange(len(lines))
    lines[at] = mutate_json(lines[at], rng)
    return b"\n".join(lines)


@functools.cache
def _bomb() -> bytes:
    return zlib.compress(bytes(1 << 26), 9)


def mutate_png(data: bytes, rng: Random) -> bytes:
    """Mutate the chunks of a PNG, with checksums that fit; a bomb now and then."""
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    chunks, at = [], 8
    while at + 8 <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        chunks.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + size]))
        at += 12 + size
    i = rng.randrange(len(chunks))
    name, body = chunks[i]
    kind = rng.randrange(6)
    if kind <= 2:
        chunks[i] = name, mutate_bytes(body, rng)
    elif kind == 3:
        chunks.insert(i, chunks[rng.randrange(len(chunks))])
    elif kind == 4:
        value = _bomb()  # of text or a colour profile
        more = rng.choice(((b"zTXt", b"k\0\0"), (b"iCCP", b"p\0\0"), (b"iTXt", b"k\0\1\0\0\0")))
        chunks.insert(1, (more[0], more[1] + value))
    else:
        del chunks[i]
    made = data[:8]
    for name, body in chunks:
        made += (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )
    return made


def mutate_tar(data: bytes, rng: Random) -> bytes:
    """Mutate headers of a tar with checksums that fit, or add hostile members."""
    kind = rng.randrange(4)
    if kind == 0:
        return mutate_bytes(data, rng)
    if kind == 1:  # one field of one header, the checksum made again
        made = bytearray(data)
        heads = [i for i in range(0, len(made) - 511, 512) if made[i + 257 : i + 262] == b"ustar"]
        at = rng.choice(heads or [0])
        start, size = rng.choice(((0, 100), (124, 12), (156, 1), (157, 100), (345, 155)))
        value = {
            124: rng.choice(
                (b"-0000007777\0", b"77777777777\0", b"\x80" + b"\xff" * 11, b"\xff" * 12,
                 b"0x10\0", b"1_0\0", b"\0" * 12, b" 00000000 1", b"\x80" + bytes(10) + b"\1")
            ),
            156: bytes([rng.choice(b"0123456789SLKxgVNDM\0")]),
        }.get(start, rng.choice(NAMES).encode("utf-8", "surrogatepass")[:size])  # fmt: skip
        made[at + start : at + start + size] = value[:size].ljust(size, b"\0")
        if rng.random() < 0.8:
            made[at + 148 : at + 156] = b" " * 8
            made[at + 148 : at + 156] = b"%06o\0 " % sum(made[at : at + 512])
        return bytes(made)
    file = io.BytesIO()
    form = rng.choice((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT))
    with (
        tarfile.open(fileobj=io.BytesIO(data)) as old,
        tarfile.open(fileobj=file, mode="w", format=form) as new,
    ):
        for member in old.getmembers():
            body = old.extractfile(member)
            content = b"" if body is None else body.read()
            for _ in range(rng.choice((1, 1, 2))):
                if rng.random() < 0.4:
                    suffix = Path(member.name).suffix
                    member.name = rng.choice((*NAMES, "../../x" + suffix, "x" + suffix))
                if rng.random() < 0.3:
                    member.type = rng.choice(
                        (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE,
                         tarfile.DIRTYPE, tarfile.REGTYPE)
                    )  # fmt: skip
                    member.linkname = rng.choice((*NAMES[:5], member.name, "/dev/zero"))
                if rng.random() < 0.2 and form == tarfile.PAX_FORMAT:
                    key = rng.choice(("size", "path", "linkpath", "GNU.sparse.size", "mtime"))
                    value = rng.choice((*NAMES[:4], "-1", "9" * 30, "9" * 5000, "1e9", "x", "-512"))
                    member.pax_headers = {key: value}
                try:
                    new.addfile(member, io.BytesIO(content))
                except (ValueError, OSError, UnicodeError):  # this format has no such name
                    continue
    made_tar = file.getvalue()
    return mutate_bytes(made_tar, rng) if rng.random() < 0.2 else made_tar


def mutate_safetensors(data: bytes, rng: Random) -> bytes:
    """Mutate the header as JSON with a length that fits, or the bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    size = int.from_bytes(data[:8], "little")
    header = mutate_json(data[8 : 8 + size], rng)
    return struct.pack("<Q", len(header)) + header + data[8 + size :]


def mutate_zip(data: bytes, rng: Random, marker: Path) -> bytes:
    """Mutate a file of ``torch.save``: its pickle, its members, a planted pickle or a bomb."""
    kind = rng.randrange(6)
    if kind == 0:
        return mutate_bytes(data, rng)
    if kind == 1:
        return rng.choice((planted(marker), planted(marker) + data, b"\x80\x02}q\0."))
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w") as new:
        for member in old.infolist():
            body = old.read(member)
            if member.filename.endswith("data.pkl"):
                if kind == 2:
                    body = mutate_bytes(body, rng)
                elif kind == 3:
                    body = planted(marker)
                elif kind == 4:
                    numbers = [i for i in range(len(body) - 2) if body[i : i + 1] in b"KMJ"]
                    at = rng.choice(numbers)
                    more = struct.pack("<i", rng.choice((-1, 2**31 - 1, 0)))
                    body = body[:at] + b"J" + more + body[at + 2 + (body[at] == ord("M")) :]
            elif kind == 5 and rng.random() < 0.5:
                if rng.random() < 0.3:
                    new.writestr(member.filename, bytes(1 << 28), zipfile.ZIP_DEFLATED)
                    continue
                member.filename = rng.choice((*NAMES[:4], member.filename + "x"))
            new.writestr(member.filename, body)
    return file.getvalue()


def mutate_gzip(data: bytes, rng: Random) -> bytes:
    """Mutate the text in a gzip file, or its bytes; a bomb now and then."""
    kind = rng.randrange(24)
    if kind == 0:
        line = rng.choice((b"\0" * 100, b"a" * 100, b"two words\n" * 10))
        packer = zlib.compressobj(9, zlib.DEFLATED, 31)
        block = line * ((1 << 20) // len(line))
        return b"".join(packer.compress(block) for _ in range(32)) + packer.flush()
    if kind <= 14:
        return gzip.compress(mutate_text(gzip.decompress(data), rng), mtime=0)
    return mutate_bytes(data, rng)


def mutate_parquet(data: bytes, rng: Random) -> bytes:
    """Mutate bytes and the footer, or write the table with hostile cells and metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kind = rng.randrange(5)
    if kind <= 1:
        return mutate_bytes(data, rng)
    if kind == 2:  # in the footer
        size = int.from_bytes(data[-8:-4], "little") + 8
        footer = mutate_bytes(data[-size:-8], rng)
        return data[:-size] + footer + struct.pack("<I", len(footer)) + b"PAR1"
    table = pq.read_table(io.BytesIO(data))
    file = io.BytesIO()
    if kind == 3:
        about = json.dumps({"info": {"features": {"label": {"names": ["a"], "_type": "Image"}}}})
        known = (table.schema.metadata or {}).get(b"huggingface", about.encode())
        table = table.replace_schema_metadata({b"huggingface": mutate_json(known, rng)})
        pq.write_table(table, file)
        return file.getvalue()
    i = rng.randrange(table.num_columns)
    name, count = table.column_names[i], table.num_rows
    values = rng.choice((
        [None] * count, [b"\xff\xd8" + bytes(1 << 20)] * count, ["\ud7ff\0"] * count,
        [float("nan")] * count, [-1] * count, [2**62] * count, [[1, 2]] * count,
        [{"bytes": b"x", "path": "../../secret.png"}] * count, [{"bytes": None}] * count,
        [NAMES[k % len(NAMES)] for k in range(count)], [[]] * count, [True] * count,
    ))  # fmt: skip
    column = pa.array(values)
    if rng.random() < 0.3:
        table = table.append_column(name, column)
    elif rng.random() < 0.2:
        table = pa.table({name: pa.array([bytes(1 << 24)] * 40)})  # 0.7 GB
    else:
        table = table.set_column(i, name, column)
    pq.write_table(table, file, compression=rng.choice(("zstd", "snappy", "none", "gzip")))
    return file.getvalue()


def mutate_onnx(data: bytes, rng: Random) -> bytes:
    """Change names, sizes, attributes and places of weights in a graph, or the bytes."""
    import onnx

    if rng.random() < 0.2:
        return mutate_bytes(data, rng)
    model = onnx.load_model_from_string(data)
    graph, number = model.graph, rng.choice((-1, 0, 1, 2**31, 2**40, 2**62, 3, -(2**63)))
    for _ in range(rng.choice((1, 1, 2))):
        node, kind = rng.choice(graph.node), rng.randrange(9)
        if kind == 0:
            node.op_type = rng.choice(
                ("Loop", "If", "Conv", "Expand", "Tile", "", "ConstantOfShape")
            )
        elif kind == 1 and node.attribute:
            attribute = rng.choice(node.attribute)
            attribute.ints[:] = [number] * rng.choice((1, 2, 1000))
        elif kind == 2:
            node.input[0] = rng.choice(("x", "w", "vector", "", "nothing", "c\n\x1b[2J"))
        elif kind == 3:
            weights = rng.choice(graph.initializer)
            weights.dims[rng.randrange(len(weights.dims))] = number
        elif kind == 4:
            weights = rng.choice(graph.initializer)
            weights.data_location = onnx.TensorProto.EXTERNAL
            del weights.external_data[:]
            place = rng.choice((*NAMES[:8], "w.data", "a.onnx"))
            weights.external_data.add(key="location", value=place)
            weights.external_data.add(key="offset", value=rng.choice(("0", "-1", str(number), "x")))
        elif kind == 5:
            graph.input[0].type.tensor_type.shape.dim[rng.randrange(4)].dim_value = number
        elif kind == 6:
            weights = rng.choice(graph.initializer)
            weights.data_type = rng.randrange(25)
        elif kind == 7:
            for prop in model.metadata_props:
                prop.value = mutate_json(prop.value.encode(), rng).decode("utf-8", "replace")
        else:
            graph.node.append(graph.node[0])
    return model.SerializeToString()


def mutate_file(path: Path, rng: Random, marker: Path) -> None:
    """Mutate a file by its name; once in fifty it is emptied, removed, or made a folder."""
    data = path.read_bytes()
    if rng.random() < 0.02:
        if len(list(path.parent.iterdir())) == 1:
            path.write_bytes(b"")
            return
        path.unlink()
        rng.choice((path.touch, path.mkdir, lambda: path.symlink_to("nothing"), lambda: None))()
        return
    plain: dict[str, Callable[[bytes, Random], bytes]] = {
        ".json": mutate_json,
        ".jsonl": mutate_lines,
        ".txt": mutate_text,
        ".csv": mutate_text,
        ".pem": mutate_text,
        ".md": mutate_text,
        ".png": mutate_png,
        ".tar": mutate_tar,
        ".gz": mutate_gzip,
        ".safetensors": mutate_safetensors,
        ".parquet": mutate_parquet,
        ".onnx": mutate_onnx,
    }
    if path.suffix in (".pth", ".bin"):
        made = mutate_zip(data, rng, marker)
    else:
        made = plain.get(path.suffix, mutate_bytes)(data, rng)
    path.write_bytes(made)
