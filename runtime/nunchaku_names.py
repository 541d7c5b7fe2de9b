"""What a file in 4 bits as Nunchaku writes it calls its tensors, and whether they are those that can be read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import Refused
from .safetensors_header import TensorEntry
from .stored import GROUPS, SVDQUANT_INT4, SVDQUANT_NVFP4

CODES = "qweight"
FIRST_NAMES = {
    "proj_down": "lora_down",
    "proj_up": "lora_up",
    "smooth_factor": "smooth",
    "smooth_factor_orig": "smooth_orig",
}
"""What the first generation of files called some tensors of a 4-bit Linear."""
LEAVES = {
    name: name
    for name in (
        CODES,
        "wscales",
        "wcscales",
        "wtscale",
        "proj_down",
        "proj_up",
        "smooth_factor",
        "smooth_factor_orig",
        "bias",
    )
} | {first: name for name, first in FIRST_NAMES.items()}
"""What a file calls a tensor of a 4-bit Linear -> what we do."""
AWQ_LEAVES = frozenset((CODES, "wscales", "wzeros", "bias"))
CODE_DTYPES = ("I8", "U8", "I32")
"""Two codes in a byte; in an I32 those of a Linear of which only the weight is in 4 bits."""
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
SCALE_DTYPES = (*PLAIN_DTYPES, "F8_E4M3")
ROUNDING, PLACES = "quantization_config", "runtime_tensor_layout"
"""What a file says of its numbers, and where other writers say whether its tensors are packed."""
GROUP_OF = {"int4": 64, "fp4_e2m1_all": 16}
UNIT, RANKS = 128, 16
"""What the sizes of a 4-bit Linear are filled up to, and what its rank is a multiple of."""


def check_rounding(path: Path, rounding: Any, metadata: Mapping[str, str]) -> None:
    """Raise `Refused` where a file says of itself that its numbers are others than those that are read here."""
    rounding = rounding if isinstance(rounding, dict) else {}
    weight = rounding["weight"] if isinstance(rounding.get("weight"), dict) else {}
    said = {
        "method": (rounding.get("method"), ("svdquant",)),
        "dtype": (weight.get("dtype"), tuple(GROUP_OF)),
        "group_size": (weight.get("group_size"), (GROUP_OF.get(weight.get("dtype")),)),
        PLACES: (rounding.get(PLACES, metadata.get(PLACES)), ("nunchaku_packed",)),
    }
    for key, (value, known) in said.items():
        if value is not None and value not in known:
            raise Refused(
                f"{path} says that its {key} is {value!r}, but only {' and '.join(map(repr, known))} can be read: choose an "
                f"INT4 or NVFP4 file of Nunchaku"
            )


def check_shapes(path: Path, module: str, entries: Mapping[str, TensorEntry]) -> None:
    """Raise `Refused` where the tensors of a Linear do not go together."""
    ours = {LEAVES[leaf]: entry for leaf, entry in entries.items()}
    lacking = [leaf for leaf in ("proj_down", "proj_up", "smooth_factor") if leaf not in ours]
    if lacking:
        raise Refused(f"{path}: {module} has no {', '.join(lacking)}: choose another file")
    if ours["wscales"].dtype not in SCALE_DTYPES:
        raise Refused(
            f"{path}: {module}.wscales is {ours['wscales'].dtype}, but scales of INT4 are BF16 or F16, and of NVFP4 F8_E4M3: "
            f"choose another file"
        )
    n, k = ours[CODES].shape[0], 2 * ours[CODES].shape[1]
    group = GROUPS[SVDQUANT_NVFP4 if ours["wscales"].dtype == "F8_E4M3" else SVDQUANT_INT4]
    rank = ours["proj_down"].shape[-1] if ours["proj_down"].shape else 0
    expected = {
        "wscales": (k // group, n), "proj_down": (k, rank), "proj_up": (n, rank), "smooth_factor": (k,),
        "smooth_factor_orig": (k,), "bias": (n,), "wcscales": (n,),
    }  # fmt: skip
    wrong = next((leaf for leaf, shape in expected.items() if leaf in ours and ours[leaf].shape != shape), None)
    if wrong is not None:
        raise Refused(
            f"{path} is damaged: {module} has codes for {n} x {k}, in groups of {group}, and a rank of {rank}, but {wrong} "
            f"is {ours[wrong].shape} and not {expected[wrong]}. Download it again"
        )
    if n % UNIT or k % UNIT or rank % RANKS or not rank:
        raise Refused(
            f"{path}: {module} has codes for {n} x {k} and a rank of {rank}; sizes are multiples of {UNIT}, and ranks of "
            f"{RANKS}: choose another file"
        )
