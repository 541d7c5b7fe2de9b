"""The architectures that run here. A new one is a file and a line."""

from __future__ import annotations

from .chroma import CHROMA
from .flux import FLUX, FLUX_CONTROL, FLUX_FILL, FLUX_SCHNELL
from .flux2 import FLUX2
from .hunyuan import HUNYUAN15
from .ltx import LTX, LTX_CAUSAL
from .lumina2 import LUMINA2
from .qwen import QWEN, QWEN_2511
from .sd3 import SD3
from .spec import FamilySpec
from .wan import WAN
from .wan_image import WAN22_I2V, WAN22_TI2V, WAN_I2V
from .zimage import ZIMAGE

FAMILIES: dict[str, FamilySpec] = {
    family.name: family
    for family in (
        *(WAN, WAN_I2V, WAN22_I2V, WAN22_TI2V, LTX, LTX_CAUSAL, HUNYUAN15),
        *(FLUX, FLUX_SCHNELL, FLUX_FILL, FLUX_CONTROL, QWEN, QWEN_2511, ZIMAGE, FLUX2, CHROMA, SD3, LUMINA2),
    )
}
