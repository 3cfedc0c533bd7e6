"""Table of GPUs by name, with their rates and memory according to the manufacturers' data sheets.
`device.py` detects this machine's GPU.

Rates apply to dense matrices and accumulation in fp32. Under these conditions, GeForce cards reach
half their advertised rate. Memory sizes are those reported by the driver. They are up to a tenth
below the advertised sizes if a part is reserved for error correction.

Apple GPUs share their memory with the CPU. Apple publishes bandwidths and, for M1 and M2, fp32
rates (apple.com/newsroom, support.apple.com/specs). The rates of M3 and M4 are computed as cores x
256 x clock. The fp16 rate equals the fp32 rate. If several variants are sold with the same memory
size, the row describes the variant with the most GPU cores.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from firstlight.errors import ConfigError

_MIB = 2**20


#: Rate of fp8 matrix products as a multiple of the bf16 rate. According to the data sheets, this
#: multiple is the same for all GPUs in the table that have fp8 units. For GeForce cards, it applies
#: to accumulation in fp32.
FP8_SPEEDUP = 2.0


@dataclass(frozen=True)
class GPU:
    """A GPU model.

    Attributes:
        name: the manufacturer's name without the brand.
        memory_bytes: total memory reported by the driver.
        bandwidth: memory bandwidth in bytes per second.
        fp32, tf32, fp16, bf16: FLOP/s of matrix products in each format; 0 if the format is not
            supported in hardware. Kepler (K80) supports neither fp16 nor bf16. Pascal (P100) runs
            fp16 at twice the fp32 rate. Turing (T4) has tensor cores for fp16. bf16 requires
            capability (8, 0) or higher.
        link: bandwidth to another GPU in the same machine, in bytes per second in each direction.
        capability: CUDA compute capability; (0, 0) without CUDA.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    fp32: float
    tf32: float
    fp16: float
    bf16: float
    link: float
    capability: tuple[int, int]

    @property
    def is_apple(self) -> bool:
        """True if this is an Apple GPU, which torch uses as the device "mps"."""
        return re.match(r"M[1-9]\b", self.name) is not None

    @property
    def usable_share(self) -> float:
        """Fraction of the memory that is available to a run. It is 0.98, because displays, other
        programs and libraries that are loaded late use some memory. On Apple GPUs, Metal gives a
        process two thirds of the memory, or three quarters if the machine has 36 GB or more
        (recommendedMaxWorkingSetSize).
        """
        if not self.is_apple:
            return 0.98
        return 0.66 if self.memory_bytes < 36 * 2**30 else 0.75

    def peak_flops(self, precision: str) -> float:
        """Return the FLOP/s of matrix products at a given value of `efficiency.precision`. If the
        hardware does not support this precision, return the fp32 rate.
        """
        rates = {
            "tf32": self.tf32,
            "fp16": self.fp16,
            "bf16": self.bf16,
            "bf16_params": self.bf16,
            # With fp8, attention, the head and small layers stay in bf16, so MFU is relative to the
            # bf16 rate.
            "fp8": self.bf16,
        }
        return rates.get(precision, 0.0) or self.fp32


#: Compute capabilities of the A100 and later data-centre GPUs.
_WIDE_PACKETS = {(8, 0), (9, 0), (10, 0), (10, 3)}


def matrix_packet_bytes(capability: tuple[int, int]) -> int:
    """Return the alignment, in bytes, that tensor cores need to read the rows of a matrix at full
    speed. The length of a row should be a multiple of this number. The alignment is 128 bytes on an
    A100 and its successors, and 16 on other GPUs (NVIDIA, "Matrix Multiplication Background User's
    Guide", table 1).
    """
    return 128 if capability in _WIDE_PACKETS else 16


#: Bandwidth of PCIe 3.0, 4.0 and 5.0 with 16 lanes, in GB/s per direction.
_PCIE3 = 16
_PCIE4 = 32
_PCIE5 = 64

_Row = tuple[str, int, float, float, float, float, float, float, tuple[int, int]]

#: Columns: name, memory in MiB, memory bandwidth in GB/s, TFLOP/s in fp32, tf32, fp16 and bf16,
#: link bandwidth in GB/s, and capability.
_ROWS: tuple[_Row, ...] = (
    # This row is for one of the board's two GPUs (nvidia.com, Tesla K80 board specification, 2015).
    ("K80", 11441, 240, 4.37, 0, 0, 0, _PCIE3, (3, 7)),
    # Tesla P100 data sheet, 2016. The first two rows are PCIe boards, and the third is the SXM2
    # module with NVLink.
    ("P100 12GB PCIe", 12193, 549, 9.3, 0, 18.7, 0, _PCIE3, (6, 0)),
    ("P100 16GB PCIe", 16280, 732, 9.3, 0, 18.7, 0, _PCIE3, (6, 0)),
    ("P100 16GB", 16280, 732, 10.6, 0, 21.2, 0, 80, (6, 0)),
    ("V100 16GB", 16160, 900, 15.7, 0, 125, 0, 150, (7, 0)),
    ("V100 32GB", 32510, 900, 15.7, 0, 125, 0, 150, (7, 0)),
    ("T4", 15360, 320, 8.1, 0, 65, 0, _PCIE3, (7, 5)),
    ("RTX 2080 Ti", 11264, 616, 13.4, 0, 53.8, 0, _PCIE3, (7, 5)),
    ("A100 40GB", 40960, 1555, 19.5, 156, 312, 312, 300, (8, 0)),
    ("A100 40GB PCIe", 40960, 1555, 19.5, 156, 312, 312, _PCIE4, (8, 0)),
    ("A100 80GB", 81920, 2039, 19.5, 156, 312, 312, 300, (8, 0)),
    ("A100 80GB PCIe", 81920, 1935, 19.5, 156, 312, 312, _PCIE4, (8, 0)),
    ("A30", 24060, 933, 10.3, 82, 165, 165, _PCIE4, (8, 0)),
    ("A10", 23028, 600, 31.2, 62.5, 125, 125, _PCIE4, (8, 6)),
    ("A10G", 23028, 600, 31.5, 35, 70, 70, _PCIE4, (8, 6)),
    ("A40", 46068, 696, 37.4, 74.8, 149.7, 149.7, _PCIE4, (8, 6)),
    ("RTX A4000", 16376, 448, 19.2, 38.3, 76.7, 76.7, _PCIE4, (8, 6)),
    ("RTX A5000", 24564, 768, 27.8, 55.6, 111.1, 111.1, _PCIE4, (8, 6)),
    ("RTX A6000", 49140, 768, 38.7, 77.4, 154.8, 154.8, _PCIE4, (8, 6)),
    ("RTX 3060 12GB", 12288, 360, 12.7, 12.8, 25.5, 25.5, _PCIE4, (8, 6)),
    ("RTX 3060 Ti", 8192, 448, 16.2, 16.2, 32.4, 32.4, _PCIE4, (8, 6)),
    ("RTX 3070", 8192, 448, 20.3, 20.3, 40.6, 40.6, _PCIE4, (8, 6)),
    ("RTX 3080 10GB", 10240, 760, 29.8, 29.8, 59.5, 59.5, _PCIE4, (8, 6)),
    ("RTX 3080 Ti", 12288, 912, 34.1, 34.1, 68.2, 68.2, _PCIE4, (8, 6)),
    ("RTX 3090", 24576, 936, 35.6, 35.6, 71, 71, _PCIE4, (8, 6)),
    ("RTX 3090 Ti", 24564, 1008, 40.0, 40.0, 80, 80, _PCIE4, (8, 6)),
    ("L4", 23034, 300, 30.3, 60, 121, 121, _PCIE4, (8, 9)),
    ("L40", 46068, 864, 90.5, 90.5, 181, 181, _PCIE4, (8, 9)),
    ("L40S", 46068, 864, 91.6, 183, 362, 362, _PCIE4, (8, 9)),
    ("RTX 6000 Ada", 49140, 960, 91.1, 182.1, 364.2, 364.2, _PCIE4, (8, 9)),
    ("RTX 4060", 8188, 272, 15.1, 15.1, 30.2, 30.2, _PCIE4, (8, 9)),
    ("RTX 4060 Ti 8GB", 8188, 288, 22.1, 22.1, 44.1, 44.1, _PCIE4, (8, 9)),
    ("RTX 4060 Ti 16GB", 16380, 288, 22.1, 22.1, 44.1, 44.1, _PCIE4, (8, 9)),
    ("RTX 4070", 12282, 504, 29.1, 29.1, 58.3, 58.3, _PCIE4, (8, 9)),
    ("RTX 4070 SUPER", 12282, 504, 35.5, 35.5, 71, 71, _PCIE4, (8, 9)),
    ("RTX 4070 Ti", 12282, 504, 40.1, 40.1, 80.2, 80.2, _PCIE4, (8, 9)),
    ("RTX 4070 Ti SUPER", 16376, 672, 44.1, 44.1, 88.2, 88.2, _PCIE4, (8, 9)),
    ("RTX 4080", 16376, 717, 48.7, 48.7, 97.5, 97.5, _PCIE4, (8, 9)),
    ("RTX 4080 SUPER", 16376, 736, 52.2, 52.2, 104.4, 104.4, _PCIE4, (8, 9)),
    ("RTX 4090", 24564, 1008, 82.6, 82.6, 165.2, 165.2, _PCIE4, (8, 9)),
    ("H100 PCIe", 81559, 2000, 51, 378, 756, 756, _PCIE5, (9, 0)),
    ("H100 NVL", 95830, 3900, 60, 417, 835, 835, 300, (9, 0)),
    ("H100", 81559, 3350, 67, 494.7, 989, 989, 450, (9, 0)),
    ("GH200 96GB", 97871, 4000, 67, 494.7, 989, 989, 450, (9, 0)),
    ("H200 NVL", 143771, 4800, 60, 417, 835, 835, 450, (9, 0)),
    ("H200", 143771, 4800, 67, 494.7, 989, 989, 450, (9, 0)),
    ("B200", 183359, 8000, 75, 1125, 2250, 2250, 900, (10, 0)),
    ("RTX 5060 Ti 16GB", 16311, 448, 23.7, 23.7, 47.4, 47.4, _PCIE5, (12, 0)),
    ("RTX 5070", 12227, 672, 30.9, 30.9, 61.7, 61.7, _PCIE5, (12, 0)),
    ("RTX 5070 Ti", 16303, 896, 43.9, 43.9, 87.9, 87.9, _PCIE5, (12, 0)),
    ("RTX 5080", 16303, 960, 56.3, 56.3, 112.6, 112.6, _PCIE5, (12, 0)),
    ("RTX 5090", 32607, 1792, 104.8, 104.8, 209.5, 209.5, _PCIE5, (12, 0)),
    ("MI300X", 196592, 5300, 163.4, 653.7, 1307.4, 1307.4, 448, (0, 0)),
)

#: Columns: name, memory sizes in GB, memory bandwidth in GB/s, and TFLOP/s in fp32 and fp16.
_APPLE: tuple[tuple[str, tuple[int, ...], float, float], ...] = (
    ("M1", (8, 16), 68.3, 2.6),
    ("M1 Pro", (16, 32), 200, 5.2),
    ("M1 Max", (32, 64), 400, 10.4),
    ("M1 Ultra", (64, 128), 800, 20.8),
    ("M2", (8, 16, 24), 100, 3.6),
    ("M2 Pro", (16, 32), 200, 6.8),
    ("M2 Max", (32, 64, 96), 400, 13.6),
    ("M2 Ultra", (64, 128, 192), 800, 27.2),
    ("M3", (8, 16, 24), 100, 4.1),
    ("M3 Pro", (18, 36), 150, 7.4),
    # The variant with 30 GPU cores has 300 GB/s, and the one with 40 cores has 400 GB/s.
    ("M3 Max", (36, 96), 300, 12.3),
    ("M3 Max", (48, 64, 128), 400, 16.4),
    ("M3 Ultra", (96,), 819, 24.6),
    ("M3 Ultra", (256, 512), 819, 32.8),
    ("M4", (16, 24, 32), 120, 4.3),
    ("M4 Pro", (24, 48, 64), 273, 9.2),
    # The variant with 32 GPU cores has 410 GB/s, and the one with 40 cores has 546 GB/s.
    ("M4 Max", (36,), 410, 14.7),
    ("M4 Max", (48, 64, 128), 546, 18.4),
)


def _gpu(row: _Row) -> GPU:
    name, mib, gbs, fp32, tf32, fp16, bf16, link, capability = row
    fp32, tf32, fp16, bf16 = (rate * 1e12 for rate in (fp32, tf32, fp16, bf16))
    return GPU(
        name,
        mib * _MIB,
        gbs * 1e9,
        fp32,
        tf32=tf32,
        fp16=fp16,
        bf16=bf16,
        link=link * 1e9,
        capability=capability,
    )


_APPLE_ROWS: tuple[_Row, ...] = tuple(
    (f"{name} {size}GB", size * 1024, bandwidth, rate, 0, rate, 0, 0, (0, 0))
    for name, sizes, bandwidth, rate in _APPLE
    for size in sizes
)

GPUS: dict[str, GPU] = {row[0]: _gpu(row) for row in (*_ROWS, *_APPLE_ROWS)}

#: Words that drivers and vendors use in the names of GPUs but that do not distinguish one GPU from
#: another.
_BRANDS = re.compile(
    r"\b(?:nvidia|geforce|tesla|amd|apple|macbook|mac|instinct|quadro|graphics|generation|gpu|sxm\d?|hbm3e?)\b"
)

#: Words in a name that indicate a different device than the GPU in the table, such as a laptop GPU
#: or a MIG partition.
_OTHER_DEVICE = re.compile(r"\b(?:d|max-q|laptop|mobile|mig)\b")


def find_gpu(name: str, memory_bytes: int | None = None) -> GPU:
    """Find a GPU in the table by its name, as written by a user or a driver.

    Args:
        name: name of the GPU, such as "RTX 4090", "NVIDIA GeForce RTX 4090", "a100-80gb" or "h100".
        memory_bytes: the device's memory, which distinguishes GPUs sold with several memory sizes;
            None if it is unknown.

    Raises:
        ConfigError: the table has no such GPU, or several of its GPUs match. In the first case, the
            message lists the nearest names.
    """
    wanted = _words(name)
    matches = [gpu for gpu in GPUS.values() if _words(gpu.name) == wanted]
    if not matches and not _OTHER_DEVICE.search(name.lower()):
        # The memory size may be missing ("A100") or redundant ("RTX 4090 24GB").
        plain = _without_memory(wanted)
        said = wanted - plain
        matches = [
            gpu
            for gpu in GPUS.values()
            if _without_memory(_words(gpu.name)) == plain
            and (not said or said == _words(f"{round(gpu.memory_bytes / 2**30)}GB"))
        ]
    if len(matches) > 1 and memory_bytes is not None:
        matches = [min(matches, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes))]
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = " or ".join(f"'{gpu.name}'" for gpu in matches)
        raise ConfigError(f"GPU '{name}' is sold with several memory sizes: use {names}")
    raise ConfigError(f"GPU '{name}' is not in the table: {_nearest(name)}")


def _words(name: str) -> frozenset[str]:
    text = re.sub(r"(\d)\s+gi?b\b", r"\1gb", name.lower())
    text = re.sub(r"\b(m[1-9])(?=pro\b|max\b|ultra\b)", r"\1 ", text)
    # Split "RTX4090" and "4070Ti", but not "A10G" and "L40S".
    text = re.sub(r"\b(rtx|gtx)\s*(?=\d)", r"rtx ", text)
    text = re.sub(r"(?<=\d)(ti|super)\b", r" \1", text)
    words = frozenset(re.findall(r"[a-z0-9]+", _BRANDS.sub(" ", text.replace("-", " "))))
    # A number without a prefix, such as "4090", denotes a GeForce RTX card.
    return words | {"rtx"} if any(re.fullmatch(r"[2-5]0[5-9]0", word) for word in words) else words


def _without_memory(words: frozenset[str]) -> frozenset[str]:
    return frozenset(word for word in words if not re.fullmatch(r"\d+gb", word))


def _nearest(name: str) -> str:
    """Return advice that lists up to four of the nearest names. Names that share more words with
    the given name come first. Names that share the same number of words are ordered by similarity.
    """
    wanted = _without_memory(_words(name))

    def likeness(gpu: str) -> tuple[int, float]:
        words = _without_memory(_words(gpu))
        one, two = (" ".join(sorted(some)) for some in (wanted, words))
        same = wanted & words - {"rtx", "pcie"}
        return len(same), difflib.SequenceMatcher(None, one, two).ratio()

    ranked = sorted(GPUS, key=likeness, reverse=True)[:4]
    close = [gpu for gpu in ranked if likeness(gpu) > (0, 0.5)]
    names = ", ".join(repr(gpu) for gpu in close)
    found = f"the nearest are {names}" if close else f"use one of {', '.join(GPUS)}"
    return f"{found}; or run `firstlight plan` with --gpu-memory 24GiB"
