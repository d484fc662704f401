"""Training losses (spec model.md section 5): diffusion, distogram, confidence, and their sum."""
