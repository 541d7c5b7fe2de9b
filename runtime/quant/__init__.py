"""The cores of a `ParallelLinear`: how a weight is held and multiplied with."""
