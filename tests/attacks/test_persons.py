"""One person under several names: who counts as several persons takes part several times, and the
guarantee per person is false.
"""

import itertools
import random
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpvision.cli import main
from dpvision.data.importer import import_samples, import_source
from dpvision.data.open import open_store
from dpvision.data.people import People
from dpvision.data.person_names import PersonRule, alike, loosely, one_spelling, person_name
from dpvision.data.sources import Sample
from dpvision.errors import DataError

from ..data.image_files import js, png, write_folder, write_tar

ONE = {
    "a whole number": [
        "7",
        "7.0",
        "7.00",
        7,
        7.0,
        " 7 ",
        "\t7",
        "\ufeff7",
        "7\u200b",
        "\u00a07",
        "\u20077",
        "\uff17",
        "\u0667",
        "7\u2060",
        "7\U00016fe4\U0001d159",
    ],
    "a number with a sign": ["-7", "\u22127", "\u20117", "\uff0d7", "-7.0", -7, "\u00ad-7"],
    "a dash": [
        "P-1",
        "P\u20111",
        "P\u20131",
        "P\u2010\u200d1",
        "P\u22121",
        "P\ufe631",
        "P-\u200e1",
    ],
    "a space": [
        "Ann  Lee",
        "Ann\u00a0Lee",
        "Ann\u2003Lee",
        "Ann\u3000 Lee",
        " Ann Lee\n",
        "Ann \u202fLee",
        "Ann\u2028Lee",
        "Ann\u2800Lee",
    ],
    "letters": [
        "Zo\u00eb",
        "Zoe\u0308",
        "\uff3aoe\u200d\u0308",
        "Z\u2060o\u00eb",
        "Zo\ufe0f\u00eb",
        "\U0001d419o\u00eb",
    ],
    "an apostrophe": ["O'Neil", "O\u2019Neil", "O\u02bcNeil", "O\uff07Neil"],
}
NOBODY = [
    None,
    "",
    " ",
    "\u200b",
    "\u00a0",
    "nan",
    "NaN",
    "NA",
    "N/A",
    "#N/A",
    "<NA>",
    "None",
    "null",
    "NULL",
    "unknown",
    "Unknown ",
    -1,
    "-1.0",
]
ALIKE = [
    ["007", "7", "+7", "7.", "7,0", "'007", '="007"'],
    ["P1", "p1", "P01", "p001"],
    ["site 01-07", "Site 1-7"],
    ["STRASSE", "stra\u00dfe"],
    ["100000", "1e+05", "1.0E5", "100,000", "100 000", "0100000"],
    ["-7", "-07"],
    ["1.05", "1.5"],
    [
        "O'Brien",
        "O\u00b4Brien",
        "O\u02bbBrien",
        "O\u201bBrien",
        "O\u2035Brien",
        "O\u055aBrien",
        "O\u02b9Brien",
    ],
    ["A-1", "A\u27961", "A\u30fc1", "A\u25001", "A\u23af1"],
    ["A123", "\u0410123", "\u0391123"],
    ["Koop", "K\u03bfop", "\u041aoop", "Ko\u043ep"],
    ["1/2", "\u00bd", "1\u22152"],
    ["x2", "x\u00b2"],
    ["1", "\u2460", "1.000", "1,000"],
    ["1000", "1.000", "1e3", "1E3"],
    ["1234567", "1.234.567"],
    ["0", "-0", "00"],
    ["\u0130BRAH\u0130M", "ibrahim", "\u0130brahim"],
    ["\u039c\u03b1\u03c1\u03af\u03b1", "\u039c\u0391\u03a1\u0399\u0391"],
    ["Jos\u00e9", "JOSE"],
    ["\u0421\u0435\u043c\u0451\u043d", "\u0421\u0435\u043c\u0435\u043d"],
    [
        "\u0645\u062d\u0645\u062f",
        "\u0645\u064f\u062d\u0645\u0651\u062f",
        "\u0645\u0640\u062d\u0645\u062f",
    ],
    ["\u0639\u0644\u064a", "\u0639\u0644\u0649", "\u0639\u0644\u06cc"],
    ["\u0110or\u0111e", "\u00d0or\u00f0e"],
    ["\u0141ukasz", "Lukasz"],
    ["ag1", "\u0251\u02611"],
    ["100000", "1e+005", "1.0D+05", "1,00,000"],
    ["1000", "1_000", "1\u066c000"],
    ["1", "\u0661\u066b\u0660"],
    ["P1", "P 1", "P1.", "P1;", "P_1", "P-1", "P.1", "P#1", "P/1", "P (1)", "[P:1]", "P-001"],
    ["P1A", "P001A", "P-01 a"],
    ["1A", "001A"],
    ["A1", "00A1"],
    ["Smith, John", "Smith,John", "Smith John", "smith_john", "Smith\u00b7John"],
    ["St. John", "St John"],
    ["O'Brien", "OBrien"],
    ["Jos&eacute;", "Jos\u00e9", "Jos%C3%A9"],
    ["1.50", "1.5", "1,5", "1.500"],
    ["\u0126al", "Hal"],
    ["\u0167om \u01b6", "Tom Z"],
    ["\u014bo", "no"],
    ["\u00de\u00f3r", "Thor"],
    ["\u00c6sa", "AEsa"],
    ["12", "(12)", "12-", "#12", "\u201c12\u201d"],
    ["2020-01-02", "2020-1-2", "2020/01/02"],
]
NOT_MERGED = [
    ("1", "1.000"),
    ("12", "12.000"),
    ("x2", "x\u00b2"),
    ("1", "\u2460"),
    ("fi", "\ufb01"),
    ("1/2", "\u00bd"),
]


def images_of(people: list[Any]) -> list[Sample]:
    return [Sample(f"{i}.png", png(i), {"patient": person}) for i, person in enumerate(people)]


@pytest.mark.parametrize("what", ONE)
def test_spellings_that_look_the_same_are_one_person(what: str, tmp_path: Path) -> None:
    assert len({person_name(value, "patient", "1.png") for value in ONE[what]}) == 1
    store = import_samples(images_of(ONE[what]), tmp_path / "s", people=PersonRule("patient"))
    assert len(People.of(store)) == 1 and store.num_records == len(ONE[what])


def test_what_means_that_nobody_is_known_is_no_person(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{len(NOBODY)} images without one"):
        import_samples(images_of(NOBODY), tmp_path / "s", people=PersonRule("patient"))
    store = import_samples(
        [*images_of(NOBODY), Sample("p", png(99), {"patient": "p"})],
        tmp_path / "s",
        people=PersonRule("patient", unmatched="drop"),
    )
    assert store.num_records == 1


@pytest.mark.parametrize("names", ALIKE, ids=[names[0] for names in ALIKE])
def test_names_that_may_be_one_persons_are_refused_with_both_spellings(
    names: list[str], tmp_path: Path
) -> None:
    for one, other in itertools.combinations(names, 2):
        assert person_name(one, "patient", "") != person_name(other, "patient", "")
        with pytest.raises(
            DataError,
            match=r"^data import: --unit-from patient: operator only: 1 persons spelled .* = ",
        ) as error:
            import_samples(
                images_of([one, "somebody else", other]),
                tmp_path / "s",
                people=PersonRule("patient", unmatched="own-person"),
            )
        assert all(
            one_spelling(name) in str(error.value) for name in (one, other)
        ) and "somebody" not in str(error.value)
        assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(("one", "other"), NOT_MERGED, ids=ascii)
def test_two_persons_are_not_made_one(one: str, other: str) -> None:
    """A thousand as German tables write it, and what Unicode calls compatible: one person's images
    were clipped together with another's, and each then moved the sum by up to 2 C.
    """
    assert person_name(one, "patient", "") != person_name(other, "patient", "")
    assert alike([one, other]) == [[one, other]]


def test_a_number_with_an_e_in_it_is_hexadecimal_beside_others() -> None:
    assert alike(["1e3", "1000", "7a0"]) == [] and alike(["1e3", "1000", "bad"]) != []
    assert alike(["1.000", "7"]) == [], "alone it may be either"


def test_other_persons_stay_apart() -> None:
    """No false alarm on ids of one length: numbers with zeros in front, hexadecimal, with
    separators.
    """
    rng = random.Random(0)
    forms: list[Callable[[], str]] = [
        lambda: f"{rng.randrange(10**5):05d}",
        lambda: f"{rng.randrange(16**5):05x}",
        lambda: str(rng.randrange(10**5)),
        lambda: f"{rng.randrange(100):02d}-{rng.randrange(1000):03d}",
        lambda: f"{rng.randrange(16**3):03x}-{rng.randrange(16**2):02x}",
        lambda: f"P{rng.randrange(10**5)}",
        lambda: f"{rng.randrange(1, 10**4)}{rng.choice('abc')}",
    ]
    for form in forms:
        ids = {form() for _ in range(5000)}
        assert len({person_name(name, "patient", "") for name in ids}) == len(ids)
        assert alike(ids) == []
    others = [
        "Ann Lee",
        "Anna Lee",
        "AnnLee",
        "7",
        "-7",
        "7a",
        "a7",
        "7-1",
        "71",
        "7 1 1",
        "71 1",
        "a",
        "aa",
        "*",
        "+",
        "\u304b",
        "\u304c",
        "\u0915\u093f",
        "\u0915\u0941",
    ]
    assert len({loosely(name) for name in others}) == len(others) and alike(others) == []


def test_runs_of_letters_and_digits_make_a_person_and_signs_between_them_do_not() -> None:
    rng = random.Random(2)
    signs = [" ", "-", "_", ".", ", ", "/", "#", ":", " (", "\u00b7", "\u2013", "\u3001"]
    for _ in range(500):
        runs = [str(rng.randrange(1000)) if rng.random() < 0.5 else rng.choice(["p", "ann", "x"])]
        for _ in range(rng.randrange(1, 4)):
            digits = not runs[-1].isdecimal() or rng.random() < 0.5
            runs.append(str(rng.randrange(1000)) if digits else rng.choice(["lee", "q"]))

        def written(parts: list[str]) -> str:
            name = parts[0]
            for before, part in itertools.pairwise(parts):
                apart = before.isdecimal() == part.isdecimal() or rng.random() < 0.5
                zeros = "0" * rng.randrange(3) if part.isdecimal() else ""
                name += (rng.choice(signs) if apart else "") + zeros + part
            return name.title() if rng.random() < 0.5 else name

        one, other = written(runs), written(runs)
        if person_name(one, "f", "") != person_name(other, "f", ""):
            assert alike([one, other, "somebody else", "a0"]) == [[one, other]], (one, other)
        further = written([*runs, "1"])
        assert alike([one, further, "somebody else"]) == [], (one, further)


MISREAD = [
    name.encode("utf-8").decode(encoding)
    for name, encoding in [
        ("Jos\u00e9", "latin-1"),
        ("Jos\u00e9", "cp1252"),
        ("Jos\u00e9", "mac_roman"),
        ("Jos\u00e9", "cp437"),
        ("Jose\u0301", "latin-1"),
        ("\u0160koda", "cp1252"),
        ("\u0418\u0432\u0430\u043d", "latin-1"),
        ("\u039d\u03af\u03ba\u03b7", "latin-1"),
        ("\u674e\u660e", "latin-1"),
        ("O\u2019Brien", "cp1252"),
    ]
]


@pytest.mark.parametrize("name", [*MISREAD, "Jos\ufffd"], ids=ascii)
def test_a_name_read_in_a_wrong_encoding_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"operator only: .* in 0\.png.*another encoding.*UTF-8"):
        import_samples(images_of([name]), tmp_path / "s", people=PersonRule("patient"))


@pytest.mark.parametrize(
    "name",
    [
        "L\u00cd\u0160KA",
        "REN\u00c9\u2019S",
        "IRM\u00c3",
        "\u00c5se",
        "H\u00da\u017dVA",
        "\u00d1a\u00f1ez",
        "\u00c2ngela",
        "NA\u00cfM",
        "\u674e\u660e",
        "\u0418\u0432\u0430\u043d",
        "\u00d6\u00df\u00e4",
    ],
    ids=ascii,
)
def test_names_with_accents_are_not_taken_for_misread_ones(name: str) -> None:
    assert person_name(name, "patient", "") == one_spelling(name)


def test_the_rule_merges_and_never_splits() -> None:
    """Whatever is inserted that nobody sees, and in any Unicode form, a name keeps its spelling; a
    spelling is its own.
    """
    rng = random.Random(1)
    letters = [
        "a",
        "B",
        "7",
        "0",
        ".",
        "-",
        " ",
        "\u00fc",
        "\u00df",
        "\u0130",
        "\u0660",
        "\u4e2d",
        "\uac00",
        "\u2019",
        ",",
    ]
    hidden = [
        "\u200b",
        "\u200d",
        "\u2060",
        "\ufeff",
        "\u00ad",
        "\u034f",
        "\ufe0f",
        "\x00",
        "\x1b",
        "\u202e",
    ]
    for _ in range(3000):
        name = "".join(rng.choices(letters, k=rng.randrange(1, 8)))
        spelled = one_spelling(name)
        assert one_spelling(spelled) == spelled and loosely(spelled) == loosely(loosely(spelled)), (
            ascii(name)
        )
        form = unicodedata.normalize(rng.choice(["NFC", "NFD", "NFKC", "NFKD"]), name)
        place = rng.randrange(len(form) + 1)
        assert one_spelling(form[:place] + rng.choice(hidden) + form[place:]) == spelled, ascii(
            name
        )


@pytest.mark.parametrize("kind", ["csv", "jsonl", "tar", "parquet", "folders"])
def test_all_sources_have_one_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """7 and 7.0 of a CSV were two persons, and the dry run confirmed a guarantee per person."""

    def source(name: str, people: list[str]) -> tuple[Path, str]:
        root, images = tmp_path / name, {f"{i}.png": png(i) for i in range(len(people))}
        if kind == "csv":
            table = "file_name,patient\n" + "".join(
                f"{i}.png,{person}\n" for i, person in enumerate(people)
            )
            return write_folder(root, images | {"metadata.csv": table.encode()}), "patient"
        if kind == "jsonl":
            lines = [js(file_name=f"{i}.png", patient=person) for i, person in enumerate(people)]
            return write_folder(root, images | {"metadata.jsonl": b"\n".join(lines)}), "patient"
        if kind == "tar":
            members = {f"{i}.json": js(patient=person) for i, person in enumerate(people)}
            return write_tar(
                root.with_suffix(".tar"), dict(sorted((images | members).items()))
            ), "patient"
        if kind == "parquet":
            root.mkdir()
            pq.write_table(
                pa.table({"image": list(images.values()), "patient": people}), root / "a.parquet"
            )
            return root, "patient"
        return write_folder(
            root, {f"{person}/{i}.png": png(i) for i, person in enumerate(people)}
        ), "parent"

    path, field = source("same", ["7", "7.0", "\u00a07", "7\u200b", "8"])
    assert (
        main(["data", "import", str(path), str(tmp_path / "s"), "--unit-from", field, "--public"])
        == 0
    )
    assert len(People.of(open_store(tmp_path / "s"))) == 2
    capsys.readouterr()
    path, field = source("alike", ["007", "7", "8"])
    assert (
        main(["data", "import", str(path), str(tmp_path / "t"), "--unit-from", field, "--public"])
        == 2
    )
    error = capsys.readouterr().err
    assert "007 = 7" in error and len(error.splitlines()) == 1 and not (tmp_path / "t").exists()


def test_a_whole_number_that_a_float_column_does_not_hold_is_refused(tmp_path: Path) -> None:
    """As integers two persons; as floats, of a file with missing cells, one, and a third name for
    either.
    """
    (tmp_path / "src").mkdir()
    for i, column in enumerate(([2**53 + 1, 2**53 + 3], [float(2**53 + 1), None])):
        table = {"image": [png(2 * i), png(2 * i + 1)], "patient": column}
        pq.write_table(pa.table(table), tmp_path / "src" / f"{i}.parquet")
    with pytest.raises(DataError, match=r"expected whole numbers below 2\^53"):
        import_source(
            tmp_path / "src", tmp_path / "s", people=PersonRule("patient", unmatched="drop")
        )
    assert person_name(float(2**53 - 1), "f", "") == str(2**53 - 1) and person_name(
        2**53 + 1, "f", ""
    ) == str(2**53 + 1)
