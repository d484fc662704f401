"""Features of small entries for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from tpf.config import DataConfig
from tpf.data.ccd import Dictionary
from tpf.data.features import featurize
from tpf.data.tables import Tokens

CONFIG = DataConfig(max_templates=2, conformers="ideal")
DICTIONARY = Dictionary()
PEPTIDE = ["MET", "PHE", "CYS", "GLY", "ASP", "ARG"]


def features_of(tokens: Tokens, crop: Any = None, seed: int = 0, **options: Any) -> dict[str, Any]:
    index = np.arange(len(tokens)) if crop is None else np.asarray(crop)
    options = {"config": CONFIG} | options
    return featurize(tokens, index, DICTIONARY, np.random.default_rng(seed), **options)
