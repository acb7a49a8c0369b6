"""Known cards with their memory, dense matrix peak by dtype, memory bandwidth and PCIe rate, for planning and for MFU.

Peaks are the makers' dense figures (no sparsity) with fp32 accumulation, which is what PyTorch's matrix
products use by default. GeForce cards have a second rate, for float16 products that also accumulate in float16. A
card that is not listed has no peak: callers print no MFU rather than a wrong one.
"""

import re
from dataclasses import dataclass, field
from functools import partial

# Peak FLOP/s in 16 bits over bytes/s of memory: 70 to 300 in the table of cards, around 160 of recent consumer cards.
USUAL_FLOPS_PER_BYTE = 160
# Share of the nominal PCIe rate that one hop reaches: a boundary activation goes down to the host and up again, and the two
# directions overlap. RoundPipe's five measured hops are `boundary_bytes / (0.66 x 32 GB/s)` within 2 %.
LINK_EFFICIENCY = 0.66


class UnknownPeakError(ValueError):
    """No peak is known for this device and dtype."""


@dataclass(frozen=True)
class DeviceSpec:
    """One card.

    - `memory_gib`: usable memory in GiB.
    - `pcie_gb_per_s`: nominal rate of one direction, in 1e9 bytes per second.
    - `peak_flops`: dense FLOP/s by dtype name (`"bfloat16"`, `"float16"`, `"float32"`), accumulated in fp32.
    - `fp16_accumulation_flops`: dense FLOP/s of float16 accumulated in float16; None for a card that gains nothing.
    - `memory_gb_per_s`: bandwidth of the device's memory, in 1e9 bytes per second; None if it is not known.
    """

    name: str
    memory_gib: float
    pcie_gb_per_s: float
    peak_flops: dict[str, float] = field(default_factory=dict)
    fp16_accumulation_flops: float | None = None
    memory_gb_per_s: float | None = None

    def memory_bytes_per_s(self, flops_per_s: float) -> float:
        """Return the memory bandwidth; of a card that does not say it, what cards of this peak usually have."""
        if self.memory_gb_per_s is None:
            return flops_per_s / USUAL_FLOPS_PER_BYTE
        return self.memory_gb_per_s * 1e9

    @property
    def link_bytes_per_s(self) -> float:
        """Return the rate that transfers between host and device reach in one direction."""
        return self.pcie_gb_per_s * 1e9 * LINK_EFFICIENCY

    def hop_s(self, boundary_bytes: int) -> float:
        """Estimate the seconds in which a boundary activation of one device reaches the next one through host memory."""
        return boundary_bytes / self.link_bytes_per_s

    def flops_per_s(self, dtype: str, fp16_accumulation: bool = False) -> float | None:
        """Return the dense peak, None if it is not known for this dtype. `fp16_accumulation` counts for float16 alone."""
        if fp16_accumulation and dtype == "float16" and self.fp16_accumulation_flops is not None:
            return self.fp16_accumulation_flops
        return self.peak_flops.get(dtype)


def _card(
    name: str,
    memory_gib: float,
    pcie_gb_per_s: float,
    half_tflops: float,
    float32_tflops: float,
    memory: float,
    fp16_accumulation: float | None = None,
) -> DeviceSpec:
    half = half_tflops * 1e12
    peaks = {"bfloat16": half, "float16": half, "float32": float32_tflops * 1e12}
    faster = fp16_accumulation and fp16_accumulation * half
    return DeviceSpec(name, memory_gib, pcie_gb_per_s, peaks, faster, memory_gb_per_s=memory)


# A card whose tensor cores add up in float16 twice as fast as in fp32.
_geforce = partial(_card, fp16_accumulation=2)

# PCIe x16: generation 3 16, 4 32, 5 64 GB/s. float32 is without TF32. The last column is the makers' memory bandwidth.
DEVICES = (
    # NVIDIA's paper on the Ampere GA102 architecture: "Peak FP16 Tensor TFLOPS with FP32 Accumulate", and twice that with
    # FP16 Accumulate. The RTX 3090 Ti follows from its clock and its 84 multiprocessors.
    _geforce("rtx3060", 12, 32, 25.5, 12.7, 360),
    _geforce("rtx3070", 8, 32, 40.6, 20.3, 448),
    _geforce("rtx3080", 10, 32, 59.5, 29.8, 760),
    _geforce("rtx3090", 24, 32, 71.0, 35.6, 936),
    _geforce("rtx3090ti", 24, 32, 80.0, 40.0, 1008),
    # NVIDIA's paper on the Ada architecture, the same two rows: 165.2 and 330.3 for the RTX 4090. The RTX 4060, 4060 Ti and 4070
    # follow from their clocks and multiprocessors.
    _geforce("rtx4060", 8, 16, 30.2, 15.1, 272),
    _geforce("rtx4060ti", 16, 16, 44.1, 22.1, 288),
    _geforce("rtx4070", 12, 32, 58.3, 29.1, 504),
    _geforce("rtx4070ti", 12, 32, 80.2, 40.1, 504),
    _geforce("rtx4080", 16, 32, 97.5, 48.7, 717),
    _geforce("rtx4090", 24, 32, 165.2, 82.6, 1008),
    # NVIDIA's paper on the RTX Blackwell architecture, the same two rows: 209.5 and 419 for the RTX 5090.
    _geforce("rtx5070ti", 16, 64, 87.9, 43.9, 896),
    _geforce("rtx5080", 16, 64, 112.6, 56.3, 960),
    _geforce("rtx5090", 32, 64, 209.5, 104.8, 1792),
    # Workstations and data centres: NVIDIA's data sheets, and the architecture papers of A100 and H100. Their tensor
    # cores add up in fp32 at full rate. Figures given with sparsity are halved.
    _card("rtxa6000", 48, 32, 154.8, 38.7, 768),
    _card("rtx6000ada", 48, 32, 364.2, 91.1, 960),
    # Their tensor cores have no bfloat16, so no peak is given for it.
    DeviceSpec("t4", 15, 16, {"float16": 65e12, "float32": 8.1e12}, memory_gb_per_s=320),
    DeviceSpec("v100", 16, 16, {"float16": 112e12, "float32": 14e12}, memory_gb_per_s=900),
    DeviceSpec("v100-32gb", 32, 16, {"float16": 112e12, "float32": 14e12}, memory_gb_per_s=900),
    _card("a10", 24, 32, 125.0, 31.2, 600),
    _card("a40", 48, 32, 149.7, 37.4, 696),
    _card("l4", 24, 32, 121.0, 30.3, 300),
    _card("l40", 48, 32, 181.0, 90.5, 864),
    _card("l40s", 48, 32, 362.0, 91.6, 864),
    _card("a800", 80, 32, 312.0, 19.5, 2039),
    _card("a100", 80, 32, 312.0, 19.5, 2039),
    _card("a100-40gb", 40, 32, 312.0, 19.5, 1555),
    _card("h100pcie", 80, 64, 756.0, 51.0, 2039),
    _card("h100", 80, 64, 989.4, 67.0, 3350),
    _card("h200", 141, 64, 989.4, 67.0, 4800),
    _card("b200", 180, 64, 2250.0, 80.0, 8000),
)

# A stand-in if the card is not known, as with virtual devices
# on a CPU: its costs are proportions, not times to report.
ASSUMED_DEVICE = DeviceSpec(
    "assumed", float("inf"), 16, {"bfloat16": 1e12, "float16": 1e12, "float32": 1e12, "float64": 1e12}
)


def find_device(name: str) -> DeviceSpec | None:
    """Find the card of this name, as in `"rtx4090"` or as PyTorch reports it (`"NVIDIA GeForce RTX 4090"`).

    Returns None if no entry is certain: a variant ("RTX 4090 Laptop GPU", "4090 D") is another card.
    """
    wanted, gib = _model_and_gib(name)
    for model in (wanted, f"rtx{wanted}"):
        for device in DEVICES:
            if _model_and_gib(device.name)[0] == model and gib in (None, device.memory_gib):
                return device
    return None


def device_names() -> tuple[str, ...]:
    return tuple(device.name for device in DEVICES)


def _model_and_gib(name: str) -> tuple[str, int | None]:
    """Read a card's model, without maker, family, form and kind of memory, and the size of its memory if it is named."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    sizes = [word for word in words if re.fullmatch(r"\d+gb", word)]
    dropped = re.compile(r"nvidia|geforce|tesla|generation|gpu|tensor|core|sxm\d?|hbm3e?")
    model = "".join(word for word in words if word not in sizes and not dropped.fullmatch(word))
    # Only the H100 has another peak on a PCIe card.
    model = re.sub(r"^(a100|a800|v100)pcie$", r"\1", model)
    return model, int(sizes[0][:-2]) if sizes else None
