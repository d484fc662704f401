"""The network (AF3 SI, OpenFold3 parameter names).

Dimension letters: B batch, S diffusion samples, N tokens, A atoms, L atoms padded to whole
windows, W windows, M MSA rows, T templates, H heads, D head channels, C channels; i, j, k run
over tokens, l, m over atoms. Masks are boolean, so that they never change a tensor's dtype.
"""
