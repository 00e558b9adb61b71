"""Stochastic rounding to bf16.

A bf16 number has 8 significant bits, so an update below 1/512 of a parameter is lost when it is rounded to the
nearest. Rounded up or down at random, in proportion to the distance, it is kept in expectation. The draws come from
a generator of their own: the model's random numbers do not move.
"""

import torch

_KEPT_BITS = -0x10000  # the upper half of a 32-bit word: sign, exponent and fraction of a bf16


class StochasticRounding:
    """Rounds fp32 to bf16 so that the expected value is the number itself."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self.generator = torch.Generator(device)
        self.generator.manual_seed(seed)

    def round_into(self, rounded: torch.Tensor, exact: torch.Tensor) -> None:
        """Write `exact` (fp32) into `rounded` (bf16)."""
        bits = exact.view(torch.int32) + self._noise(exact)
        shortened = bits.bitwise_and_(_KEPT_BITS).view(torch.float32)
        # Noise could carry a NaN over into a number.
        rounded.copy_(torch.where(exact.isnan(), exact, shortened))

    def _noise(self, like: torch.Tensor) -> torch.Tensor:
        """16 random bits for every element: four of them from one draw of 64."""
        count = like.numel()
        draws = torch.empty((count + 3) // 4, dtype=torch.int64, device=like.device)
        draws.random_(-(2**63), None, generator=self.generator)
        return draws.view(torch.int16)[:count].to(torch.int32).bitwise_and_(0xFFFF).view(like.shape)

    def state(self) -> torch.Tensor:
        return self.generator.get_state()

    def load_state(self, state: torch.Tensor) -> None:
        self.generator.set_state(state)
