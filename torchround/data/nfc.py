"""Normalisation form C by the tables of Unicode 9, as the package tokenizers has it.

Python's tables are newer. They know marks that Unicode 9 does not, and move them past other marks; released models were
trained on text in which those stayed where they were.
"""

import re
import unicodedata

# Combining marks from Unicode 10 on, and letters with new compositions: in Unicode 9 none of them combines. Found by
# asking the package about each one that the tables of the package regex have (its version 2026.11.15: newer than 16).
NEWER = re.compile(
    "(["
    "\u05c8\u05c9\u07fd\u0897-\u089f\u08ca-\u08d3\u09fe\u0c3c\u0d3b\u0d3c\u0eba\u0ece\u1715\u1abf-\u1af0\u1df6-\u1dfa\ua82c"
    "\U000105c9\U000105d2\U000105da\U000105e4"
    "\U00010d24-\U00010d27\U00010d69-\U00010d6d\U00010eab\U00010eac\U00010ecb-\U00010eff\U00010f46-\U00010f50"
    "\U00010f82-\U00010f85\U00011070\U0001133b\U00011380-\U000113ff\U0001145e\U00011839\U0001183a\U00011930"
    "\U0001193d\U0001193e\U00011943\U000119e0\U00011a34\U00011a47\U00011a99\U00011d42\U00011d44\U00011d45\U00011d97"
    "\U00011f41\U00011f42\U00016100-\U0001613f\U00016d40-\U00016d7f\U00016ff0\U00016ff1"
    "\U0001d127\U0001d128\U0001d250-\U0001d281\U0001e08f\U0001e130-\U0001e136"
    "\U0001e2ae\U0001e2ec-\U0001e2ef\U0001e4ec-\U0001e4ef\U0001e5ee\U0001e5ef\U0001e6e3-\U0001e6f5"
    "])"
)


def nfc(text: str) -> str:
    """`text` normalised."""
    if unicodedata.is_normalized("NFC", text):  # then it is by Unicode 9 too, which combines less
        return text
    parts = NEWER.split(text)  # newer marks are at odd places
    return "".join(
        part if index % 2 else unicodedata.normalize("NFC", part) for index, part in enumerate(parts)
    )
