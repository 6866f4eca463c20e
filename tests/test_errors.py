"""Messages have no passwords and no signed addresses."""

import pickle

import pytest

from dpvision.errors import DataError


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "source: http://u:PW@h:80/a.tar: no such file.",
            "source: http://h:80/a.tar: no such file.",
        ),
        ("source: sftp://u:P/W@h/a.tar: x", "source: sftp://h/a.tar: x"),
        ("ftp://u:P@W@h/a@1 and ftp://PW@h", "ftp://h/a@1 and ftp://h"),
        ("store=s3:/K:S@b/c; expected", "store=s3:/b/c; expected"),
        ("url='https://h/a?X-Sig=S&b=c'", "url='https://h/a'"),
        ("(https://h/a?s=S). Then 'https://h#S',", "(https://h/a). Then 'https://h',"),
        ("zip://a.zip::https://u:PW@h/b.zip?S", "zip://a.zip::https://h/b.zip"),
        ("https://u:P?W@h/a", "https://h/a"),
        ("http://[::1]:80/a@1", "http://[::1]:80/a@1"),
        ("hf://datasets/u/r@main/a.tar", "hf://datasets/u/r@main/a.tar"),
        ("file:///d/a@b/c?d#1.tar: x", "file:///d/a@b/c?d#1.tar: x"),
        ("/d/a@b/c?.tar: who? me@home", "/d/a@b/c?.tar: who? me@home"),
    ],
)
def test_a_message_keeps_scheme_host_and_path_of_a_url_only(text, said):
    error = DataError(text)
    assert str(error) == said
    assert str(pickle.loads(pickle.dumps(error))) == said, "as from another process"
