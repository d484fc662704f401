"""Download entries of the Protein Data Bank, each checked before it appears under its name."""

from __future__ import annotations

import gzip
import http.client
import re
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpf.errors import TpfError, UsageError
from tpf.files import make_folder, read_list, write_whole

URL = "https://files.rcsb.org/download/{id}.cif.gz"
TIMEOUT = 60.0
"""Seconds without an answer or a byte."""
TRIES = 4
PAUSE = 1.0
"""Seconds before the second try; each further pause is twice as long."""
_ID = re.compile(r"[0-9][a-z0-9]{3}|pdb_[0-9a-z]{8}")

Opener = Callable[..., Any]
"""``urllib.request.urlopen`` or a stand-in."""


class _Unreachable(Exception):
    """No answer from the server."""


@dataclass(frozen=True)
class Fetched:
    """What came of one entry; ``failure`` is "" if its file is there."""

    id: str
    path: Path
    new: bool = False
    """Downloaded now, not found complete."""
    failure: str = ""


def read_ids(words: Sequence[str], listing: Path | None = None) -> list[str]:
    """Return the ids of a command line and a list (one a line, ``#`` comments), each once.

    Raises ``UsageError`` for what is no id and if there is none.
    """
    items = list(words)
    if listing is not None:
        items += read_list("--list", listing)
    ids = list(dict.fromkeys(item.lower() for item in items))
    for name in ids:
        if not _ID.fullmatch(name):
            raise UsageError(f"{name!r} is no PDB id; write four characters such as 1ubq")
    if not ids:
        raise UsageError("no entry to fetch; give ids or --list FILE")
    return ids


def fetch(
    ids: Sequence[str],
    out: Path,
    *,
    url: str = URL,
    workers: int = 4,
    opener: Opener = urllib.request.urlopen,
    pause: float = PAUSE,
) -> Iterator[Fetched]:
    """Yield each entry as its file ``out/ID.cif.gz`` is there and complete, or why it is not.

    Files that are there and whole are kept, so that a repeated call goes on. ``{id}`` in ``url``
    stands for the id; a mirror may serve ``.cif`` as well. Raises ``TpfError`` when the server
    cannot be reached, ``UsageError`` for a wrong ``url`` or folder.
    """
    if "{id}" not in url or "://" not in url:
        raise UsageError(f"--url {url}: write a URL with {{id}}, such as {URL}")
    make_folder(out)

    def one(name: str) -> Fetched:
        path = out / f"{name}.cif.gz"
        if path.is_file() and not _fault(path.read_bytes(), name):
            return Fetched(name, path)
        return _download(name, url.replace("{id}", name), path, opener, pause)

    pool = ThreadPoolExecutor(workers)
    try:
        yield from pool.map(one, ids)
    except _Unreachable as error:
        host = url.split("/")[2]
        raise TpfError(
            f"cannot reach {host} ({error}); check the network (or the proxy in https_proxy), "
            "name a mirror with --url, or copy the files here by hand"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _download(name: str, url: str, path: Path, opener: Opener, pause: float) -> Fetched:
    failure = ""
    for attempt in range(TRIES):
        if attempt:
            time.sleep(pause * 2 ** (attempt - 1))
        try:
            with opener(url, timeout=TIMEOUT) as answer:
                data: bytes = answer.read()
        except urllib.error.HTTPError as error:
            failure = f"the server says {error.code} {error.reason}"
            if error.code in (404, 410):
                return Fetched(name, path, failure="no such entry (obsolete or not yet released)")
            if error.code < 500 and error.code != 429:
                break
            continue
        except urllib.error.URLError as error:
            if attempt == TRIES - 1:
                raise _Unreachable(error.reason) from error
            continue
        except (OSError, http.client.HTTPException) as error:
            failure = f"broken off ({type(error).__name__})"
            continue
        if data[:2] != b"\x1f\x8b":
            data = gzip.compress(data, mtime=0)
        failure = _fault(data, name)
        if not failure:
            try:
                write_whole(path, data)
            except OSError as error:
                reason = (
                    f"cannot write {path} ({error.strerror}); free space or choose another folder"
                )
                raise TpfError(reason) from error
            return Fetched(name, path, new=True)
    return Fetched(name, path, failure=f"{failure}, {attempt + 1} tries")


def _fault(data: bytes, name: str) -> str:
    """Return what is wrong with the bytes of an entry, "" if nothing is."""
    try:
        text = gzip.decompress(data)
    except (OSError, EOFError, zlib.error):
        return "the download is not whole"
    if not text.startswith(b"data_") or b"_atom_site." not in text:
        return "the answer is no mmCIF file"
    block = text[5:64].partition(b"\n")[0].strip().decode("latin-1").lower()
    return "" if block in (name, name.removeprefix("pdb_0000")) else f"it holds entry {block}"
