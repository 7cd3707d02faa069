"""One name for a GPU, whether its driver or the operator database names it."""

from __future__ import annotations

import re

_DRIVER_NAMES = (
    (r"NVIDIA H100 .*HBM3.*", "h100_sxm"),
    (r"NVIDIA H100 PCIe", "h100_pcie"),
    (r"NVIDIA H200", "h200_sxm"),
    (r"NVIDIA A100-SXM.*", "a100_sxm"),
    (r"NVIDIA A100.*PCIE.*", "a100_pcie"),
    (r"NVIDIA B200", "b200_sxm"),
    (r"NVIDIA GB200", "gb200"),
    (r"NVIDIA L40S", "l40s"),
    (r"NVIDIA L4", "l4"),
    (r"NVIDIA A30", "a30"),
)
"""What ``nvidia-smi`` prints, and what ``aiconfigurator-core`` calls the same card."""


def gpu_system(name: str | None) -> str | None:
    """The database's name of a card; a name that is not known stays as it is.

    A simulated run names its GPU by the database, a live one by the driver.
    """
    if name is None:
        return None
    for pattern, system in _DRIVER_NAMES:
        if re.fullmatch(pattern, str(name), re.IGNORECASE):
            return system
    return name
