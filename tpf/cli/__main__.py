"""``python -m tpf.cli``."""

import sys

if __name__ == "__main__":
    try:
        from tpf.cli.app import main

        main()
    except KeyboardInterrupt:  # before there is a command
        print("tpf: interrupted", file=sys.stderr)
        sys.exit(130)
