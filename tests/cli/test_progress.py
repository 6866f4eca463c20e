"""Progress on standard error: counts, rate and time left; no counts of private images in a log."""

import pytest

from dpvision.cli.progress import LINE_EVERY_S, ProgressLine


class Clock:
    """A clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def _lines(
    clock: Clock, capsys: pytest.CaptureFixture[str], total: int | None, **how: bool
) -> list[str]:
    """What a log has of 400 images, of which 40 were done before, at 4 images a second."""
    with ProgressLine(**how) as line:  # type: ignore[arg-type]
        for done in range(40, 401, 4):
            line.count("features", done, total)
            clock.now += 1
    return capsys.readouterr().err.splitlines()


def test_a_log_gets_a_line_every_15_seconds_with_rate_and_time_left(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = _lines(clock, capsys, 400)
    assert lines[0] == "features: 100 of 400 images, 4.0 images/s, 75 s left"
    assert len(lines) == (400 - 40) // 4 // LINE_EVERY_S
    assert _lines(clock, capsys, None)[0] == "features: 100 images, 4.0 images/s"
    assert _lines(clock, capsys, 50)[0] == "features: 100 images, 4.0 images/s", "more than said"
    assert _lines(clock, capsys, 400, quiet=True) == []


def test_a_log_has_no_count_of_private_images(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _lines(clock, capsys, 400, private=True)[0] == "features: 25%, about 2 min left"
    assert _lines(clock, capsys, None, private=True)[0] == "features: in progress"
    shown = _lines(clock, capsys, 400, private=True, asked=True)[0]
    assert shown.startswith("operator only: features: 100 of 400 images, ")
    with ProgressLine(private=True) as line:
        clock.now += 20
        line.say("epoch 3, loss 0.123")
        line.say("step 3 of 60", public=True)
    assert capsys.readouterr().err == "step 3 of 60\n"


def test_short_work_leaves_no_line(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine() as line:
        line.count("features", 10, 20)
        clock.now += 5
        line.count("features", 20, 20)
    assert not capsys.readouterr().err


def test_names_with_brackets_are_shown_as_they_are(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressLine() as line:
        clock.now += 20
        line.count("runs/[red]a[/]: features", 1)
    assert capsys.readouterr().err == "runs/[red]a[/]: features: 1 images\n"
