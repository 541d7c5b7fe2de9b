"""Bytes as one reads them."""

from __future__ import annotations

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def in_units(size: float) -> str:
    """A number of bytes, such as "1.5 GiB"."""
    place = 0
    while round(size, 1) >= 1024 and place < len(UNITS) - 1:
        size, place = size / 1024, place + 1
    return f"{size:.1f} {UNITS[place]}" if place else f"{size:.0f} B"
