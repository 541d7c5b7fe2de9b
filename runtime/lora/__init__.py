"""LoRA files of every layout people have, put on a loaded model and taken off again."""
