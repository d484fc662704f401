"""The command line of tpf."""
