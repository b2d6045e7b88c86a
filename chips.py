"""What the chips can do, in numbers; train.py takes its MFU from here and plan.py its predictions.

Sources: Google's pages on each TPU (docs.cloud.google.com/tpu) and JAX's table of TPUs (jax/_src/tpu_info.py, August
2026); for the links, jax-ml.github.io/scaling-book; for GPUs, vendor sheets; for prices, SkyPilot's catalogue of Google
Cloud (v8, 2025 to 2026), the cheapest region in the US.  None: not known to us.
"""

from typing import NamedTuple

PRICES = "US dollars as in SkyPilot's catalogue v8, 2025 to 2026"


class Chip(NamedTuple):
    """Of one JAX device, which is half a chip on v2, v3 and 7x."""

    flops: float  # dense bfloat16 operations a second
    gib: float | None = None  # of high-bandwidth memory, nominally
    memory: float | None = None  # bytes a second, from and to high-bandwidth memory
    link: float | None = None  # bytes a second, one way over one link to a neighbour
    per_chip: int = 1  # devices
    on_demand: float | None = None  # dollars an hour for a chip
    spot: float | None = None


CHIPS = {  # by the name that JAX has for them
    "TPU v2": Chip(23e12, 8, 358e9, per_chip=2),
    "TPU v3": Chip(61.5e12, 16, 450e9, per_chip=2),
    "TPU v4": Chip(275e12, 32, 1200e9, 45e9),
    "TPU v5 lite": Chip(197e12, 16, 819e9, 45e9, on_demand=1.20, spot=0.245),
    "TPU v5e": Chip(197e12, 16, 819e9, 45e9, on_demand=1.20, spot=0.245),
    "TPU v5": Chip(459e12, 95, 2765e9, 90e9, on_demand=4.20, spot=0.84),
    "TPU v5p": Chip(459e12, 95, 2765e9, 90e9, on_demand=4.20, spot=0.84),
    "TPU v6 lite": Chip(918e12, 32, 1638e9, 90e9, on_demand=2.70, spot=0.54),
    "TPU v6e": Chip(918e12, 32, 1638e9, 90e9, on_demand=2.70, spot=0.54),
    "TPU7x": Chip(1153e12, 96, 3690e9, per_chip=2),
    "NVIDIA A100": Chip(312e12),
    "NVIDIA L4": Chip(121e12),
    "NVIDIA H100 80GB HBM3": Chip(989e12),
    "NVIDIA H200": Chip(989e12),
}


def chip_of(kind: str) -> Chip | None:
    """By name, or by a name that goes on, as in "NVIDIA A100-SXM4-40GB"; None for others, rather than a guess."""
    return next((chip for name, chip in CHIPS.items() if kind == name or kind.startswith(f"{name}-")), None)
