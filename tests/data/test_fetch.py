"""Downloads from a local server: whole files only, tries, resuming, clear failures."""

from __future__ import annotations

import gzip
import urllib.error
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from typer.testing import CliRunner

from tpf.cli.app import app
from tpf.data.fetch import fetch, read_ids
from tpf.errors import TpfError, UsageError


def entry(name: str) -> bytes:
    return gzip.compress(f"data_{name.upper()}\n_atom_site.id 1\n".encode())


class Archive(ThreadingHTTPServer):
    """Answers by id: a list of (status, body) that the requests use up, the last one stays."""

    answers: dict[str, list[tuple[int, bytes]]]
    asked: list[str]


class Handler(BaseHTTPRequestHandler):
    server: Archive

    def do_GET(self) -> None:  # noqa: N802 (name of the base class)
        name = self.path.strip("/").split(".")[0]
        self.server.asked.append(name)
        answers = self.server.answers.get(name, [(404, b"")])
        status, body = answers.pop(0) if len(answers) > 1 else answers[0]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) + (7 if name == "5cut" else 0)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def archive() -> Iterator[Archive]:
    server = Archive(("127.0.0.1", 0), Handler)
    server.answers, server.asked = {}, []
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def url(server: Archive) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}/{{id}}.cif.gz"


def run(server: Archive, ids: list[str], out: Path) -> dict[str, str]:
    return {item.id: item.failure for item in fetch(ids, out, url=url(server), pause=0)}


def test_entries_are_downloaded_checked_and_kept(archive: Archive, tmp_path: Path) -> None:
    archive.answers = {
        "1abc": [(200, entry("1abc"))],
        "2bad": [(200, entry("2bad")[:-9])],
        "3err": [(503, b""), (500, b""), (200, entry("3err"))],
        "4txt": [(200, gzip.decompress(entry("4txt")))],
        "5cut": [(200, entry("5cut"))],
        "6web": [(200, b"<html>busy</html>")],
        "7not": [(200, entry("1abc"))],
        "8for": [(403, b"")],
    }
    ids = [*archive.answers, "9gon"]
    assert run(archive, ids, tmp_path) == {
        "1abc": "",
        "2bad": "the download is not whole, 4 tries",
        "3err": "",
        "4txt": "",
        "5cut": "broken off (IncompleteRead), 4 tries",
        "6web": "the answer is no mmCIF file, 4 tries",
        "7not": "it holds entry 1abc, 4 tries",
        "8for": "the server says 403 Forbidden, 1 tries",
        "9gon": "no such entry (obsolete or not yet released)",
    }
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "1abc.cif.gz", "3err.cif.gz", "4txt.cif.gz",
    ]  # fmt: skip
    archive.asked.clear()
    (tmp_path / "1abc.cif.gz").write_bytes(entry("1abc")[:-3])  # as a full disk leaves it
    assert run(archive, ["1abc", "3err", "4txt"], tmp_path) == dict.fromkeys(
        ("1abc", "3err", "4txt"), ""
    )
    assert archive.asked == ["1abc"]
    assert (tmp_path / "1abc.cif.gz").read_bytes() == entry("1abc")


def test_without_a_network(tmp_path: Path) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise urllib.error.URLError("Name or service not known")

    with pytest.raises(TpfError, match=r"cannot reach files.rcsb.org \(Name or.*--url"):
        list(fetch(["1abc", "2abc"], tmp_path, opener=offline, pause=0))


def test_ids(tmp_path: Path) -> None:
    listing = tmp_path / "list.txt"
    listing.write_text("# kinases\n1ABC  # first\n\npdb_00001xyz\n")
    assert read_ids(["1abc", "2def"], listing) == ["1abc", "2def", "pdb_00001xyz"]
    for words in (["abc"], ["../1abc"], []):
        with pytest.raises(UsageError, match="no PDB id|no entry to fetch"):
            read_ids(words)
    with pytest.raises(UsageError, match="cannot read the list"):
        read_ids([], tmp_path / "absent")
    listing.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="cannot read the list .it is not UTF-8"):
        read_ids([], listing)
    with pytest.raises(UsageError, match="list.txt: cannot make the folder"):
        list(fetch(["1abc"], listing))
    with pytest.raises(UsageError, match="write a URL with"):
        list(fetch(["1abc"], tmp_path, url="http://mirror/"))


def test_command(archive: Archive, tmp_path: Path) -> None:
    archive.answers = {"1abc": [(200, entry("1abc"))]}
    words = ["data", "fetch", "1abc", "9gon", "--out", str(tmp_path), "--url", url(archive)]
    result = CliRunner().invoke(app, words)
    assert "9gon: no such entry" in result.output
    assert "1 downloaded, 0 were there" in result.output
    assert isinstance(result.exception, TpfError)
