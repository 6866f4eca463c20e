"""``dpvision data tokenizer`` and ``data import`` with captions, as people use them."""

import json
import os
from pathlib import Path

import pytest

from dpvision.cli import main
from dpvision.data.synthetic_store import write_scenes
from dpvision.data.tokenizer import CaptionTokenizer

SHARED = Path(__file__).parents[2].parent / "shared" / "data"


def _run(capsys: pytest.CaptureFixture[str], argv: list[str]) -> dict:
    assert main(argv) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def _refused(capsys: pytest.CaptureFixture[str], argv: list[str], words: str) -> None:
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert words in err and "Traceback" not in err, err


def test_each_kind_of_text_gives_a_tokenizer_with_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    public = write_scenes(tmp_path / "public", 200, 16)
    sentences = [public.captions(row)[0] for row in range(public.num_records)]
    (tmp_path / "text.txt").write_text("\n".join(sentences))
    same = {
        "text": ["--text", str(tmp_path / "text.txt")],
        "store": ["--store", str(public.path)],
        "scenes": ["--scenes", str(public.num_records)],
    }
    results = {}
    for name, options in same.items():
        out = tmp_path / "made" / f"{name}.json"
        results[name] = _run(
            capsys,
            [
                "data",
                "tokenizer",
                str(out),
                *options,
                "--vocab-size",
                "300",
                "--num-tokens",
                "30",
                "--json",
            ],
        )
        made = CaptionTokenizer.load(out)
        assert (made.vocab_size, made.digest) == (300, results[name]["digest"])
    assert len({result["digest"] for result in results.values()}) == 1, (
        "the same text gives the same tokenizer"
    )
    lengths = [len(made.words(sentence)) + 2 for sentence in sentences]
    assert results["text"]["tokens_per_caption"] == pytest.approx(sum(lengths) / len(lengths))
    assert results["text"]["share_cut"] == pytest.approx(
        sum(n > 30 for n in lengths) / len(lengths)
    )
    assert ["".join(split) for split in results["text"]["examples"]] == sentences[:5]


def test_sources_add_up_and_people_get_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "more.txt").write_text("zebra crossing\n" * 50)
    both = [
        "data",
        "tokenizer",
        str(tmp_path / "t.json"),
        "--text",
        str(tmp_path / "more.txt"),
        "--scenes",
        "50",
        "--vocab-size",
        "330",
    ]
    assert main(both) == 0
    out = capsys.readouterr().out
    assert "zebra| crossing" in out and "vocab_size" in out and "share_cut" in out
    assert CaptionTokenizer.load(tmp_path / "t.json").pieces("zebra crossing") == [
        "zebra",
        " crossing",
    ]


def test_text_from_a_pipe_is_measured_as_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "\n" + "zebra crossing\n" * 50
    (tmp_path / "text.txt").write_text(text)
    read_end, write_end = os.pipe()
    try:
        os.write(write_end, text.encode())
        os.close(write_end)
        options = ["--vocab-size", "270", "--json"]
        piped = _run(
            capsys,
            [
                "data",
                "tokenizer",
                str(tmp_path / "a.json"),
                "--text",
                f"/dev/fd/{read_end}",
                *options,
            ],
        )
    finally:
        os.close(read_end)
    filed = _run(
        capsys,
        [
            "data",
            "tokenizer",
            str(tmp_path / "b.json"),
            "--text",
            str(tmp_path / "text.txt"),
            *options,
        ],
    )
    assert piped["captions_measured"] == 50
    assert {**piped, "tokenizer": None} == {**filed, "tokenizer": None}


def test_what_cannot_be_made_gets_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private = write_scenes(tmp_path / "private", 20, 16, public=False)
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "latin.txt").write_bytes("über".encode("cp1252"))
    out = str(tmp_path / "t.json")
    for options, words in [
        (["--store", str(private.path)], "private store"),
        ([], "expected --text, --store or --scenes"),
        (["--text", str(tmp_path / "empty.txt")], "no text"),
        (["--text", str(tmp_path / "latin.txt")], "another encoding"),
        (["--text", str(tmp_path / "absent.txt")], "absent.txt"),
        (["--store", str(tmp_path / "absent")], "absent"),
        (["--scenes", "50"], "expected vocab_size=30,522"),
        (["--scenes", "50", "--vocab-size", "258"], "vocab_size=258"),
        (["--scenes", "50", "--num-tokens", "1"], "num_tokens=1"),
        (["--scenes", "0"], "scenes=0"),
    ]:
        _refused(capsys, ["data", "tokenizer", out, *options], words)
        assert not Path(out).exists()
    Path(out).write_text("mine")
    _refused(capsys, ["data", "tokenizer", out, "--scenes", "50", "--vocab-size", "300"], "exists")
    assert Path(out).read_text() == "mine"


def test_importing_with_captions_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "src"
    source.mkdir()
    scenes = write_scenes(tmp_path / "scenes", 3, 16)
    for row in range(3):
        (source / f"{row}.png").write_bytes(scenes.read(row))
    table = tmp_path / "f.token.txt"
    table.write_text("0.png#0\ta\n0.png#1\tb\n1.png#0\tc\n7.png#0\td\n")
    command = [
        "data",
        "import",
        str(source),
        str(tmp_path / "s"),
        "--captions",
        str(table),
        "--json",
    ]
    result = _run(capsys, command)
    assert (
        result["num_records"],
        result["captions"],
        result["without_caption"],
        result["captions_for_no_picture"],
    ) == (3, 3, 1, 1)
    command[3] = str(tmp_path / "strict")
    result = _run(capsys, [*command, "--require-captions"])
    assert (result["num_records"], result["left_out"]) == (2, {"no caption": 1})
    _refused(
        capsys,
        [
            "data",
            "import",
            str(source),
            str(tmp_path / "n"),
            "--captions",
            str(tmp_path / "none.json"),
        ],
        "none.json",
    )
    named = [
        "data",
        "import",
        str(source),
        str(tmp_path / "n"),
        "--dataset",
        "cifar10",
        "--split",
        "test",
        "--captions",
        str(table),
    ]
    _refused(capsys, named, "labels only")


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="the shared captions are not beside this checkout")
def test_real_captions_are_short_in_a_vocabulary_of_eight_thousand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = sorted(str(path) for path in (SHARED / "caption_text").glob("*.gz"))
    result = _run(
        capsys,
        [
            "data",
            "tokenizer",
            str(tmp_path / "t.json"),
            "--text",
            *texts,
            "--vocab-size",
            "8000",
            "--json",
        ],
    )
    assert result["captions_measured"] == 54_599
    # eleven to twelve words a caption, hardly any of them split
    assert 12 < result["tokens_per_caption"] < 15 and result["share_cut"] < 0.001
