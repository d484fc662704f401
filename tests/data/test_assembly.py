"""Assemblies: operators, copies and their names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cif_text import SEQUENCE, cif, peptide, residue, write

from tpf.data.assembly import parse_expression
from tpf.data.load import load_tables
from tpf.errors import DataError

FAR = (0.0, 60.0, 0.0)


def test_assembly_expansion(tmp_path: Path) -> None:
    generator = """loop_
_pdbx_struct_assembly_gen.assembly_id
_pdbx_struct_assembly_gen.oper_expression
_pdbx_struct_assembly_gen.asym_id_list
1 1,2 A
1 (2) C
2 1 B
loop_
_pdbx_struct_oper_list.id
"""
    names = [f"matrix[{i}][{j}]" for i in (1, 2, 3) for j in (1, 2, 3)]
    names += [f"vector[{i}]" for i in (1, 2, 3)]
    generator += "\n".join(f"_pdbx_struct_oper_list.{name}" for name in names)
    generator += "\n1 1 0 0 0 1 0 0 0 1 0 0 0\n2 -1 0 0 0 -1 0 0 0 1 0 200 5\n"
    rows = peptide("A", SEQUENCE) + peptide("B", SEQUENCE, FAR) + residue("ZN", "C", ".", (0, 9, 9))
    tables = load_tables(write(tmp_path, cif(rows, generator)))
    assert tables.chain_id.tolist() == ["A", "A-2", "C"]
    assert tables.chain_entity.tolist() == [1, 1, 2]
    first, second = (tables.res_chain[tables.atom_residue] == c for c in (0, 1))
    moved = tables.pos[first] * [-1, -1, 1] + [0, 200, 5]
    np.testing.assert_allclose(tables.pos[second], moved, atol=1e-4)
    np.testing.assert_allclose(tables.pos[-1], [0, 191, 14], atol=1e-4)
    assert "1 chain not in assembly 1." in tables.notes
    assert "1 chain of assembly 1 made by symmetry." in tables.notes
    broken = generator.replace("2 -1 0 0", "2 ? 0 0")
    with pytest.raises(DataError, match="assembly: operator 2 lacks numbers"):
        load_tables(write(tmp_path, cif(rows, broken)))
    with pytest.raises(DataError, match="assembly: operator 7 is not in the file"):
        load_tables(write(tmp_path, cif(rows, generator.replace("1 1,2 A", "1 1,7 A"))))
    with pytest.raises(DataError, match="more than 300 polymer chains"):
        load_tables(
            write(
                tmp_path,
                cif(rows, generator.replace("1 1,2 A", "1 (1,2)(1-200) A")).replace(
                    "\n1 1 0 0 0 1",
                    "".join(f"\n{k} 1 0 0 0 1 0 0 0 1 0 0 0" for k in range(3, 201))
                    + "\n1 1 0 0 0 1",
                ),
            )
        )


def test_a_copy_does_not_take_the_name_of_another_chain(tmp_path: Path) -> None:
    names = ["id", *(f"matrix[{i}][{j}]" for i in (1, 2, 3) for j in (1, 2, 3))]
    names += [f"vector[{i}]" for i in (1, 2, 3)]
    records = (
        "_pdbx_struct_assembly_gen.assembly_id 1\n_pdbx_struct_assembly_gen.asym_id_list A,A-2\n"
    )
    records += "_pdbx_struct_assembly_gen.oper_expression 1,2\nloop_\n"
    records += "\n".join(f"_pdbx_struct_oper_list.{name}" for name in names)
    records += "\n1 1 0 0 0 1 0 0 0 1 0 0 0\n2 1 0 0 0 1 0 0 0 1 0 0 99\n"
    rows = peptide("A", SEQUENCE) + peptide("A-2", SEQUENCE, FAR)
    tables = load_tables(write(tmp_path, cif(rows, records)))
    assert tables.chain_id.tolist() == ["A", "A-2", "A-2-2", "A-3"]
    assert tables.chain_sym.tolist() == [1, 2, 3, 4]


def test_operator_expressions() -> None:
    assert parse_expression("1") == [("1",)]
    assert parse_expression("1,2, 3") == [("1",), ("2",), ("3",)]
    assert parse_expression("(1-3)") == [("1",), ("2",), ("3",)]
    assert parse_expression("(X0)(1-2,P)") == [("X0", "1"), ("X0", "2"), ("X0", "P")]
    with pytest.raises(ValueError, match="names no operator"):
        parse_expression("( )")
