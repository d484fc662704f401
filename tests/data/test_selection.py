"""Which entries are used and how often: kinases, lists, dates, clusters."""

from __future__ import annotations

import datetime
import stat
from pathlib import Path

import pytest
from assemblies import make_tables
from test_dataset import make_entry, write_store
from typer.testing import CliRunner

from tpf.cli.app import app
from tpf.config import DataConfig
from tpf.data.cluster import cluster, protein_chains, write_clusters
from tpf.data.kinase import has_kinase, is_kinase
from tpf.data.load import load_tables
from tpf.data.records import Entries
from tpf.data.sampling import read_clusters
from tpf.data.tables import LIGAND, PROTEIN
from tpf.errors import DataError, TpfError, UsageError


def test_catalytic_loops() -> None:
    gap = "LLIDSEGHIKIT"
    assert is_kinase(f"AAHRDLKPEN{gap}DFGLCKE")  # AKT
    assert is_kinase(f"AAHRDLAARNC{gap}DFGLARL")  # ABL1
    assert is_kinase(f"AAYRDLKLDNV{gap}DFGMCKE")  # PKC
    assert not is_kinase(f"AAHRDLKPEA{gap}DFGLCKE")  # without the asparagine
    assert not is_kinase(f"AAHRDLKPEN{gap}EFGLCKE")
    assert not is_kinase("HRDLKPENLLDFG")  # too near


def test_kinases_of_the_archive_are_found_and_nothing_else(shared_data: Path) -> None:
    kinases = sorted((shared_data / "kinase").iterdir())[::5]
    assert all(has_kinase(load_tables(path)) for path in kinases)
    found = []
    for path in sorted((shared_data / "general").glob("*.cif.gz"))[::12]:
        try:
            found += [path.name] * has_kinase(load_tables(path))
        except DataError:
            continue
    assert found == []


def test_lists_dates_and_kinases_select_entries(tmp_path: Path) -> None:
    days = {"1aaa": (2019, 5, 1), "2bbb": (2021, 5, 1), "3ccc": (2023, 5, 1)}
    entries = [
        make_entry(name, k, release_date=datetime.date(*day))
        for k, (name, day) in enumerate(days.items())
    ]
    write_store(tmp_path / "cache", entries)
    listing = tmp_path / "list.txt"
    listing.write_text("# held out\n2BBB\nfolder/3ccc.cif.gz # with its path\n")

    def ids(**options: object) -> list[str]:
        config = DataConfig(path=str(tmp_path / "cache"), **options)  # type: ignore[arg-type]
        return [record.id for record in Entries(config).records]

    assert ids() == ["1aaa", "2bbb", "3ccc"]
    assert ids(only=str(listing)) == ["2bbb", "3ccc"]
    assert ids(without=str(listing)) == ["1aaa"]
    # a split by date leaves nothing out and has nothing twice
    assert ids(release_cutoff="2021-05-01") == ["1aaa", "2bbb"]
    assert ids(released_after="2021-05-01") == ["3ccc"]
    with pytest.raises(UsageError, match="no protein kinase"):
        ids(kinases=True)
    with pytest.raises(UsageError, match="data.only .*absent: cannot read"):
        ids(only=str(tmp_path / "absent"))
    with pytest.raises(UsageError, match="data.released_after is 'May'"):
        ids(released_after="May")


FAKE = """#!/usr/bin/env python3
import sys
fasta, out = sys.argv[2:4]
names = [line[1:].strip() for line in open(fasta) if line.startswith(">")]
if len(names) > 2:
    sys.exit("too many sequences")
assert sys.argv[6:10] == ["0.4", "-c", "0.8", "--threads"]
open(out + "_cluster.tsv", "w").write("".join(f"0\\t{name}\\n" for name in names))
"""


def test_clusters_by_an_installed_program(tmp_path: Path) -> None:
    program = tmp_path / "mmseqs"
    program.write_text(FAKE)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    long, other = ["ALA"] * 12, ["GLY"] * 11
    tables = make_tables([(PROTEIN, long), (PROTEIN, long), (PROTEIN, ["ALA"]), (LIGAND, ["ATP"])],
                         entry="1abc")  # fmt: skip
    chains = [*protein_chains(tables), ("2def_A", "G" * len(other))]
    assert [name for name, _ in chains] == ["1abc_A", "1abc_B", "2def_A"]
    found = cluster(chains, str(program))
    assert found == {"1abc_A": "1abc_A", "1abc_B": "1abc_A", "2def_A": "1abc_A"}
    write_clusters(tmp_path / "clusters.txt", found)
    assert read_clusters(tmp_path / "clusters.txt") == found
    with pytest.raises(TpfError, match="failed .too many sequences"):
        cluster([*chains, ("3", "M" * 10)], str(program))
    with pytest.raises(UsageError, match="nowhere is not installed"):
        cluster(chains, "nowhere")


def test_cluster_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "mmseqs"
    program.write_text(FAKE)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    write_store(tmp_path / "cache", [make_entry("1aaa", 0), make_entry("2bbb", 1)])
    out = tmp_path / "clusters.txt"
    result = CliRunner().invoke(
        app, ["data", "cluster", str(tmp_path / "cache"), "--out", str(out)]
    )
    assert "4 chains in 1 cluster" in result.output, result.output
    assert set(read_clusters(out)) == {"1aaa_A", "1aaa_B", "2bbb_A", "2bbb_B"}
