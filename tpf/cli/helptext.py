"""The help of every command as one text; ``python -m tpf.cli.helptext`` prints it."""

from __future__ import annotations

import os
from typing import Any

WIDTH = 100


def all_help() -> str:
    """Return the help texts of all commands at a fixed width (kept in docs/cli.txt)."""
    os.environ["COLUMNS"] = os.environ["TERMINAL_WIDTH"] = str(WIDTH)
    import typer
    import typer.main

    from tpf.cli.app import app

    parts: list[str] = []

    def visit(command: Any, words: list[str], parent: typer.Context | None) -> None:
        context = typer.Context(command, parent, info_name=words[-1], terminal_width=WIDTH)
        parts.append(f"$ {' '.join(words)} --help\n{command.get_help(context)}\n")
        for name, child in sorted(getattr(command, "commands", {}).items()):
            if not child.hidden:
                visit(child, [*words, name], context)

    visit(typer.main.get_command(app), ["tpf"], None)
    return "\n".join(parts)


if __name__ == "__main__":
    print(all_help(), end="")
