"""Making a 4-bit model: inputs of its Linears are kept from runs, then each Linear is rounded for its inputs."""
