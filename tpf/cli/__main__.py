"""``python -m tpf.cli``."""

from tpf.cli.app import main

main()
