"""Weight files: our own, OpenFold3's, and the way between them."""
