"""The memory behind the allocator: a capacity, and addresses that nobody else has."""

_FIRST_ADDRESS = 0x7000_0000_0000
_GAP_BYTES = 2 * 2**20  # segments never touch: they must not look like one


class DeviceMemory:
    """What the driver gives: segments at ascending addresses, until the capacity is used up."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes  # None: as much as is asked for
        self.used_bytes = 0
        self._next_address = _FIRST_ADDRESS

    def allocate(self, size_bytes: int) -> int | None:
        """Give a segment; None where the capacity does not hold it."""
        if not self.take_pages(size_bytes):
            return None
        return self.reserve_addresses(size_bytes)

    def release(self, address: int, size_bytes: int) -> None:
        self.used_bytes -= size_bytes

    def reserve_addresses(self, size_bytes: int) -> int:
        """Give a range of addresses without memory behind it."""
        address = self._next_address
        self._next_address += size_bytes + _GAP_BYTES
        return address

    def take_pages(self, size_bytes: int) -> bool:
        """Use memory behind addresses that are reserved; say whether there was enough."""
        if self.capacity_bytes is not None and self.used_bytes + size_bytes > self.capacity_bytes:
            return False
        self.used_bytes += size_bytes
        return True

    def map_pages(self, address: int, size_bytes: int) -> bool:
        return self.take_pages(size_bytes)

    def unmap_pages(self, address: int, size_bytes: int) -> None:
        self.used_bytes -= size_bytes
