"""SVDQuant (Li et al. 2024, arXiv:2411.05007): 4-bit weights and activations, and a low-rank branch for what those miss.

The tensors are those of Nunchaku's files (github.com/nunchaku-tech/nunchaku), held as they are packed there.
"""
