"""The first biological assembly: which chains, under which operators."""

from __future__ import annotations

import dataclasses
import itertools
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tpf.data.cif import Block
from tpf.data.structure import Structure, counted, keep_chains
from tpf.errors import DataError

MAX_CHAINS = 300
"""Polymer chains above which an assembly is refused before it is expanded (AF3 SI 2.5.4)."""


_ELEMENTS = [(f"matrix[{i}][{j}]", f"matrix{i}{j}") for i in (1, 2, 3) for j in (1, 2, 3)] + [
    (f"vector[{i}]", f"vector{i}") for i in (1, 2, 3)
]
"""Items of an operator; some programs write them without brackets."""


@dataclass(frozen=True)
class Copy:
    """One application of an operator to a set of chains."""

    chains: frozenset[str]
    matrix: NDArray[np.float64]
    """[3, 3]"""
    vector: NDArray[np.float64]
    """[3] Angstrom."""


def parse_expression(text: str) -> list[tuple[str, ...]]:
    """Return the operator products of an expression such as ``1,2``, ``(1-60)`` or ``(X0)(1-5)``.

    The operators of a product are applied from right to left. Raises ``ValueError``.
    """
    factors = re.findall(r"\(([^()]*)\)", text) or [text]
    expanded: list[list[str]] = []
    for factor in factors:
        names: list[str] = []
        for item in factor.split(","):
            span = re.fullmatch(r"\s*(\d+)-(\d+)\s*", item)
            if span:
                names.extend(str(i) for i in range(int(span[1]), int(span[2]) + 1))
            elif item.strip():
                names.append(item.strip())
        if not names:
            raise ValueError(f"operator expression {text!r} names no operator")
        expanded.append(names)
    return list(itertools.product(*expanded))


def _operators(block: Block) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    ids = block.columns("pdbx_struct_oper_list", ("id",)).get("id", ())
    result = {}
    for row, name in enumerate(ids):
        numbers = np.array([_element(block, row, *names) for names in _ELEMENTS])
        result[str(name)] = (numbers[:9].reshape(3, 3), numbers[9:])
    return result


def _element(block: Block, row: int, *names: str) -> float:
    for name in names:
        values = block.numbers("pdbx_struct_oper_list", name)
        if values is not None:
            return float(values[row])
    return float("nan")


def read_assembly(entry: str, block: Block) -> list[Copy] | None:
    """Return the copies that make up assembly 1 (else the first one), None if none is recorded.

    Raises ``DataError`` (stage assembly) if an operator is unknown or no rigid motion.
    """
    columns = block.columns(
        "pdbx_struct_assembly_gen", ("assembly_id", "oper_expression", "asym_id_list")
    )
    if len(columns) < 3:
        return None
    ids = columns["assembly_id"]
    first = "1" if (ids == "1").any() else str(ids[0])
    operators = _operators(block)
    copies: list[Copy] = []
    for row in np.flatnonzero(ids == first):
        chains = frozenset(name.strip() for name in str(columns["asym_id_list"][row]).split(","))
        try:
            products = parse_expression(str(columns["oper_expression"][row]))
        except ValueError as error:
            raise DataError(entry, "assembly", str(error)) from error
        for product in products:
            matrix, vector = np.eye(3), np.zeros(3)
            for name in reversed(product):
                if name not in operators:
                    raise DataError(entry, "assembly", f"operator {name} is not in the file")
                rotation, shift = operators[name]
                if not (np.isfinite(rotation).all() and np.isfinite(shift).all()):
                    raise DataError(entry, "assembly", f"operator {name} lacks numbers")
                matrix, vector = rotation @ matrix, rotation @ vector + shift
            if not abs(np.linalg.det(matrix) - 1) < 0.01:
                raise DataError(entry, "assembly", f"operator {'*'.join(product)} is no rotation")
            copies.append(Copy(chains, matrix, vector))
    return copies


def expand(structure: Structure, copies: list[Copy], origin: dict[str, str]) -> Structure:
    """Return the assembly; the k-th copy of chain A is named A-k, the first keeps its name.

    ``origin`` maps a chain to the chain of the file that it was split from. Chains that the
    assembly does not list are left out. Raises ``DataError`` above ``MAX_CHAINS`` polymers.
    """
    parts: list[Structure] = []
    seen: dict[str, int] = {}
    taken = {chain.id for chain in structure.chains}
    listed = 0
    for copy in copies:
        inside = [origin.get(chain.id, chain.id) in copy.chains for chain in structure.chains]
        listed += sum(c.polymer for c, i in zip(structure.chains, inside, strict=True) if i)
        if listed > MAX_CHAINS:
            raise DataError(
                structure.id,
                "assembly",
                f"assembly 1 has more than {MAX_CHAINS} polymer chains",
            )
        if any(inside):
            parts.append(_apply(keep_chains(structure, np.array(inside)), copy, seen, taken))
    if not parts:
        return structure.noted("Assembly 1 lists no chain of the file; all chains were taken.")
    result = _concatenate(structure, parts)
    left_out = len(structure.chains) - len(seen)
    if left_out:
        result = result.noted(f"{counted(left_out, 'chain')} not in assembly 1.")
    extra = len(result.chains) - len(seen)
    if extra:
        result = result.noted(f"{counted(extra, 'chain')} of assembly 1 made by symmetry.")
    return result


def _apply(part: Structure, copy: Copy, seen: dict[str, int], taken: set[str]) -> Structure:
    chains = []
    for chain in part.chains:
        number = seen.get(chain.id, 0) + 1
        while number > 1 and f"{chain.id}-{number}" in taken:
            number += 1
        seen[chain.id] = number
        name = chain.id if number == 1 else f"{chain.id}-{number}"
        chains.append(dataclasses.replace(chain, id=name))
    return dataclasses.replace(
        part, pos=part.pos @ copy.matrix.T + copy.vector, chains=tuple(chains)
    )


def _concatenate(structure: Structure, parts: list[Structure]) -> Structure:
    if len(parts) == 1:
        return parts[0]
    atoms = np.cumsum([0] + [len(part.atom_name) for part in parts])
    residues = np.cumsum([0] + [len(part.res_name) for part in parts])
    chains = np.cumsum([0] + [len(part.chains) for part in parts])
    each = list(enumerate(parts))
    return dataclasses.replace(
        structure,
        atom_name=np.concatenate([p.atom_name for p in parts]),
        element=np.concatenate([p.element for p in parts]),
        pos=np.concatenate([p.pos for p in parts]),
        occupancy=np.concatenate([p.occupancy for p in parts]),
        b_factor=np.concatenate([p.b_factor for p in parts]),
        atom_residue=np.concatenate([p.atom_residue + residues[k] for k, p in each]).astype("i4"),
        res_name=np.concatenate([p.res_name for p in parts]),
        res_id=np.concatenate([p.res_id for p in parts]),
        auth_seq=np.concatenate([p.auth_seq for p in parts]),
        res_chain=np.concatenate([p.res_chain + chains[k] for k, p in each]).astype("i4"),
        chains=tuple(chain for part in parts for chain in part.chains),
        links=np.concatenate([p.links + atoms[k] for k, p in each]).astype("i4"),
        dative=np.concatenate([p.dative for p in parts]),
    )
