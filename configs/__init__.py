"""Preset configurations (YAML files beside this module)."""
