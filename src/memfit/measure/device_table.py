"""Devices that are not here: their memory and speed, from published specifications.

Figures are the vendors' (dense, without sparsity); memory is what the driver reports as total
on such a card, `reserved_bytes` what the driver, the context and the libraries' handles take
before the first tensor. Times that rest on them are estimates and are marked so.
"""

import dataclasses

_MIB = 2**20
CUDA_GRANULARITY_BYTES = 512  # the caching allocator rounds every block up to this

# Of an RTX 4090 with 24,564 MiB torch tells 23.65 GiB, and a process that ran out of memory there held 0.51 GiB beside
# torch's segments: context, and the kernels of libraries, loaded as they are needed. Before CUDA 11.7 all are loaded at
# once, which takes 1.1 to 1.5 GiB more.
_CUDA_RESERVED_BYTES = 870 * _MIB


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A machine's memory and speed."""

    name: str
    memory_bytes: int
    reserved_bytes: int
    granularity_bytes: int
    bandwidth_gb_per_s: float
    tflops_fp32: float  # as eager torch runs it by default (no TF32)
    tflops_half: float  # fp16 and bf16 with tensor cores where there are any
    launch_us: float  # least time of one operator
    capability: tuple[int, int] | None = None  # CUDA's compute capability; None: no CUDA device

    @property
    def is_cuda(self) -> bool:
        return self.capability is not None

    @property
    def usable_bytes(self) -> int:
        return self.memory_bytes - self.reserved_bytes


def _cuda(
    name: str, capability: tuple[int, int], memory_mib: int, bandwidth: float, fp32: float, half: float
) -> Device:
    return Device(
        name=name,
        memory_bytes=memory_mib * _MIB,
        reserved_bytes=_CUDA_RESERVED_BYTES,
        granularity_bytes=CUDA_GRANULARITY_BYTES,
        bandwidth_gb_per_s=bandwidth,
        tflops_fp32=fp32,
        tflops_half=half,
        launch_us=5.0,
        capability=capability,
    )


DEVICES = (
    _cuda("T4", (7, 5), 15_360, 320, 8.1, 65),
    _cuda("P40", (6, 1), 22_919, 346, 11.8, 11.8),
    _cuda("P100-16GB", (6, 0), 16_280, 732, 9.5, 19),
    _cuda("V100-16GB", (7, 0), 16_384, 900, 15.7, 125),
    _cuda("V100-32GB", (7, 0), 32_768, 900, 15.7, 125),
    _cuda("A2", (8, 6), 15_356, 200, 4.5, 18),
    _cuda("A10", (8, 6), 23_028, 600, 31.2, 125),
    _cuda("A10G", (8, 6), 23_028, 600, 31.2, 70),
    _cuda("A30", (8, 0), 24_576, 933, 10.3, 165),
    _cuda("A40", (8, 6), 46_068, 696, 37.4, 150),
    _cuda("L4", (8, 9), 23_034, 300, 30.3, 121),
    _cuda("L40", (8, 9), 46_068, 864, 90.5, 181),
    _cuda("L40S", (8, 9), 46_068, 864, 91.6, 362),
    _cuda("A100-40GB", (8, 0), 40_960, 1555, 19.5, 312),
    _cuda("A100-80GB", (8, 0), 81_920, 2039, 19.5, 312),
    _cuda("A800-80GB", (8, 0), 81_920, 2039, 19.5, 312),
    _cuda("H100-80GB", (9, 0), 81_559, 3350, 66.9, 989),
    _cuda("H100-NVL", (9, 0), 95_830, 3938, 60, 835),
    _cuda("H800-80GB", (9, 0), 81_559, 3350, 66.9, 989),
    _cuda("H20", (9, 0), 97_871, 4000, 44, 148),
    _cuda("GH200", (9, 0), 97_871, 4000, 66.9, 989),
    _cuda("H200", (9, 0), 143_771, 4800, 66.9, 989),
    _cuda("B200", (10, 0), 183_359, 8000, 80, 2250),
    _cuda("GTX-1080", (6, 1), 8_117, 320, 8.9, 8.9),
    _cuda("GTX-1080-Ti", (6, 1), 11_178, 484, 11.3, 11.3),
    _cuda("TITAN-Xp", (6, 1), 12_196, 548, 12.1, 12.1),
    _cuda("TITAN-V", (7, 0), 12_066, 653, 14.9, 110),
    _cuda("TITAN-RTX", (7, 5), 24_220, 672, 16.3, 130),
    _cuda("RTX-2060", (7, 5), 6_144, 336, 6.5, 26),
    _cuda("RTX-2070", (7, 5), 8_192, 448, 7.5, 30),
    _cuda("RTX-2080", (7, 5), 8_192, 448, 10, 40),
    _cuda("RTX-2080-Ti", (7, 5), 11_264, 616, 13.4, 54),
    _cuda("Quadro-RTX-6000", (7, 5), 24_576, 672, 16.3, 130),
    _cuda("Quadro-RTX-8000", (7, 5), 49_152, 672, 16.3, 130),
    _cuda("RTX-3050", (8, 6), 8_192, 224, 9.1, 18),
    _cuda("RTX-3060", (8, 6), 12_288, 360, 12.7, 25),
    _cuda("RTX-3060-Ti", (8, 6), 8_192, 448, 16.2, 32),
    _cuda("RTX-3070", (8, 6), 8_192, 448, 20.3, 41),
    _cuda("RTX-3070-Ti", (8, 6), 8_192, 608, 21.7, 43),
    _cuda("RTX-3080", (8, 6), 10_240, 760, 29.8, 60),
    _cuda("RTX-3080-Ti", (8, 6), 12_288, 912, 34.1, 68),
    _cuda("RTX-3090", (8, 6), 24_576, 936, 35.6, 71),
    _cuda("RTX-3090-Ti", (8, 6), 24_564, 1008, 40, 80),
    _cuda("RTX-A4000", (8, 6), 16_376, 448, 19.2, 77),
    _cuda("RTX-A5000", (8, 6), 24_564, 768, 27.8, 111),
    _cuda("RTX-A6000", (8, 6), 49_140, 768, 38.7, 155),
    _cuda("RTX-4060", (8, 9), 8_188, 272, 15.1, 30),
    _cuda("RTX-4060-Ti-8GB", (8, 9), 8_188, 288, 22.1, 44),
    _cuda("RTX-4060-Ti-16GB", (8, 9), 16_380, 288, 22.1, 44),
    _cuda("RTX-4070", (8, 9), 12_282, 504, 29.1, 58),
    _cuda("RTX-4070-SUPER", (8, 9), 12_282, 504, 35.5, 71),
    _cuda("RTX-4070-Ti", (8, 9), 12_282, 504, 40.1, 80),
    _cuda("RTX-4070-Ti-SUPER", (8, 9), 16_376, 672, 44.1, 88),
    _cuda("RTX-4080", (8, 9), 16_376, 717, 48.7, 97),
    _cuda("RTX-4080-SUPER", (8, 9), 16_376, 736, 52.2, 104),
    _cuda("RTX-4090", (8, 9), 24_564, 1008, 82.6, 165),
    _cuda("RTX-6000-Ada", (8, 9), 49_140, 960, 91.1, 182),
    _cuda("RTX-5070", (12, 0), 12_227, 672, 30.9, 62),
    _cuda("RTX-5070-Ti", (12, 0), 16_303, 896, 43.9, 88),
    _cuda("RTX-5080", (12, 0), 16_303, 960, 56.3, 113),
    _cuda("RTX-5090", (12, 0), 32_607, 1792, 104.8, 209),
)
