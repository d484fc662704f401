"""Built-in example entries and target lists (files beside this module)."""
