"""Imports point one way, are absolute, and no forbidden file names appear."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tpf"

BASE = {"errors", "config", "files", "geometry"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "config": {"errors"},
    "files": {"errors"},
    "geometry": {"errors"},
    "kernels": BASE,
    "model": BASE | {"kernels"},
    "losses": BASE | {"permutation"},
    "permutation": BASE,
    "data": {"errors", "config", "files"},
    "metrics": BASE | {"data", "permutation"},
    "report": BASE | {"metrics"},
    "score": BASE | {"data", "metrics", "permutation"},
    "flat": BASE | {"dist"},
    "optim": BASE | {"flat"},
    "lock": {"errors", "signals"},
    "checkpoint": BASE | {"optim"},
    "dist": BASE,
    "launch": {"errors", "slurm"},
    "slurm": {"errors"},
    "phases": set(),
    "journal": set(),
    "precision": {"config"},
    "watchdog": {"errors", "signals"},
    "signals": set(),
    "tracker": BASE,
    "memory": {"config"},
    "budget": {"config", "memory"},
    "flops": {"config", "memory"},
    "trace": {"errors"},
    "weights": BASE | {"checkpoint", "model"},
    "saver": BASE | {"checkpoint", "signals"},
    "runfolder": BASE | {"checkpoint", "lock", "report", "saver"},
    "infer": BASE | {"data", "kernels", "metrics", "model", "checkpoint", "dist", "weights"},
    "targets": BASE | {"data", "metrics"},
    "validate": BASE
    | {"data", "metrics", "model", "permutation", "dist", "report", "infer", "signals", "targets"},
}
ANYTHING_BUT_CLI = {
    "train", "trainer", "loop", "replay", "step", "guard", "doctor", "bench", "predict",
    "stability",
}  # fmt: skip


def _owner(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names = [module] if module != "tpf" else [f"tpf.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("tpf.")}
    return found


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT))
)
def test_imports_point_one_way(path: Path) -> None:
    owner = _owner(path)
    if owner in ("__init__", "cli", "__main__"):
        return
    # tpf.presets, tpf.examples and tpf.cuda_src are folders of data, not code.
    used = _imports(path) - {owner, "presets", "examples", "cuda_src", "__version__"}
    if owner in ANYTHING_BUT_CLI:
        assert "cli" not in used
        return
    assert owner in ALLOWED, f"{owner} has no place in the import order; add it to ALLOWED"
    assert used <= ALLOWED[owner], f"{path} imports {sorted(used - ALLOWED[owner])}"


def test_no_grab_bag_modules() -> None:
    bad = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}
    assert not [p for p in PACKAGE.rglob("*.py") if p.name in bad]


def test_data_pipeline_imports_torch_only_at_its_end() -> None:
    allowed = {"batch.py", "dataset.py"}
    for path in (PACKAGE / "data").glob("*.py"):
        source = path.read_text()
        if path.name not in allowed:
            assert not re.search(r"^\s*(import|from) torch", source, re.M), f"{path} imports torch"
