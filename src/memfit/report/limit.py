"""The memory a step is held against, and what to say about it."""

import dataclasses
from typing import Self

from memfit.measure.devices import find_device, is_bytes, usable_bytes
from memfit.units import format_bytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """A device by name, or a number of bytes."""

    label: str  # "A100-40GB" or "24.00 GiB"
    usable_bytes: int
    is_device: bool  # a known device, rather than a number of bytes

    @classmethod
    def of(cls, device: str) -> Self:
        """Read a device as users write it: by its name or by its memory.

        >>> Limit.of("rtx 4090").label, Limit.of("24GiB").label
        ('RTX-4090', '24.00 GiB')
        """
        size_bytes = usable_bytes(device)
        is_device = not is_bytes(device)
        label = find_device(device).name if is_device else format_bytes(size_bytes)
        return cls(label=label, usable_bytes=size_bytes, is_device=is_device)

    def fits(self, peak_bytes: int) -> bool:
        return peak_bytes <= self.usable_bytes

    def verdict(self, peak_bytes: int, most_bytes: int | None = None, reason: str = "") -> str:
        """One line that says whether it fits, and by how much; of a range, what it depends on.

        >>> Limit.of("24GiB").verdict(20 * 2**30)
        'FITS 24.00 GiB with 4.00 GiB to spare (83.3% used)'
        >>> Limit.of("24GiB").verdict(30 * 2**30)
        'DOES NOT FIT 24.00 GiB: 6.00 GiB too much (125.0% needed)'
        >>> Limit.of("24GiB").verdict(20 * 2**30, 30 * 2**30, "workspaces")
        'MAY FIT 24.00 GiB: 20.00 GiB to 30.00 GiB, depends on workspaces'
        """
        share = f"{peak_bytes / self.usable_bytes:.1%}"
        room = f"{self.label} ({format_bytes(self.usable_bytes)} usable)" if self.is_device else self.label
        if most_bytes is not None and self.fits(peak_bytes) and not self.fits(most_bytes):
            return f"MAY FIT {room}: {format_bytes(peak_bytes)} to {format_bytes(most_bytes)}, depends on {reason}"
        if self.fits(peak_bytes):
            return f"FITS {room} with {format_bytes(self.usable_bytes - peak_bytes)} to spare ({share} used)"
        return f"DOES NOT FIT {room}: {format_bytes(peak_bytes - self.usable_bytes)} too much ({share} needed)"
