"""Sampling weights and the order of training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tpf.data.sampling import cluster_weights, epoch_order, rank_positions, read_clusters, weight
from tpf.data.tables import DNA, LIGAND, PROTEIN, RNA
from tpf.errors import UsageError


@pytest.mark.parametrize(
    ("types", "cluster", "expected"),
    [
        ([PROTEIN], 12, 0.125),
        ([PROTEIN, LIGAND], 4, 1.0),
        ([PROTEIN, PROTEIN], 1, 6.0),
        ([LIGAND], 20, 0.025),
        ([RNA], 1, 1.5),
        ([DNA, PROTEIN], 2, 3.0),
        ([LIGAND, LIGAND], 1, 2.0),
    ],
)
def test_weight(types: list[int], cluster: int, expected: float) -> None:
    assert weight(types, cluster) == pytest.approx(expected)


def test_cluster_sizes_count_units_and_ignore_the_order_of_a_pair() -> None:
    types = [[PROTEIN], [PROTEIN], [PROTEIN, LIGAND], [LIGAND, PROTEIN], [LIGAND]]
    clusters = [["p"], ["p"], ["p", "l"], ["l", "p"], ["l"]]
    np.testing.assert_allclose(cluster_weights(types, clusters), [0.75, 0.75, 2.0, 2.0, 0.5])


def test_epoch_order_follows_weights_and_seed() -> None:
    weights = np.array([1.0, 0.0, 3.0])
    order = epoch_order(weights, 20_000, seed=5, epoch=2)
    np.testing.assert_allclose(np.bincount(order, minlength=3) / 20_000, [0.25, 0, 0.75], atol=0.01)
    np.testing.assert_array_equal(order, epoch_order(weights, 20_000, seed=7, epoch=0))
    assert (order != epoch_order(weights, 20_000, seed=5, epoch=3)).any()


def test_ranks_share_every_position_once() -> None:
    shares = [list(rank_positions(8, 20, rank, 4)) for rank in range(4)]
    assert shares[1] == [9, 13, 17]
    assert sorted(sum(shares, [])) == list(range(8, 20))


def test_read_clusters(tmp_path: Path) -> None:
    file = tmp_path / "clusters.txt"
    file.write_text("# made by hand\n1abc_A\tk1\n\n2xyz_B k2\n")
    assert read_clusters(file) == {"1abc_A": "k1", "2xyz_B": "k2"}
    file.write_text("1abc_A\n")
    with pytest.raises(UsageError, match="a line is '1abc_A'"):
        read_clusters(file)
