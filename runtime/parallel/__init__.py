"""The parallel kinds: functions of (tensors, group)."""
